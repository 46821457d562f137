"""The user's entry points: arguments are checked here, once for all lanes, and turned into a spec and a launch."""

from __future__ import annotations

import logging
import math
from typing import Any, Union

import torch

from . import backends
from .backends import Launch, Lowered
from .masks import Mask
from .spec import AttentionSpec

logger = logging.getLogger("fa_multi")

Device = Union[str, torch.device, None]
Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
LAYOUTS = ("bshd", "bhsd")
MAX_HEAD_DIM = 256


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    device: Device = None,
) -> Result:
    """Exact attention, out = softmax(softmax_scale * q k^T) v per head, with fp32 sums. Forward only.

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim); (batch, heads_q, seqlen_q, head_dim) with layout "bhsd".
    k : (batch, seqlen_k, heads_k, head_dim), heads_q a multiple of heads_k (GQA, MQA).
    v : (batch, seqlen_k, heads_k, head_dim_v).
        float16, bfloat16, or (CPU only) float32. Any strides: a unit last stride is used in place, anything else is
        copied once. Head dims are multiples of 8 up to 256; every length may be 0.
    causal : query i sees keys up to i + seqlen_k - seqlen_q (bottom-right, as in FlashAttention since 2.1).
    softmax_scale : > 0; default 1 / sqrt(head_dim).
    layout : "bshd" or "bhsd", of q, k, v and out.
    return_lse : also return the log-sum-exp of the scaled scores.
    device : where to run; default where q is. "cpu", "cuda[:n]", "npu[:n]", or "npu-sim" for the Ascend kernel in the
        CPU simulator. Inputs elsewhere are moved there, and the result stays there (for "npu-sim": on the CPU).

    Returns
    -------
    out : like q, with head_dim_v columns; contiguous in `layout`. A query that sees no key gives 0.
    lse : (batch, heads_q, seqlen_q) float32, natural log, -inf for a query that sees no key. Only with return_lse.

    Raises
    ------
    ValueError, TypeError : an argument is not acceptable; the message says which, its value, and what is.
    RuntimeError : the device is not there, in one line with the remedy.

    Examples
    --------
    >>> q, k, v = (torch.randn(2, 128, 8, 64, dtype=torch.bfloat16) for _ in range(3))
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 128, 8, 64])
    """
    if torch.is_grad_enabled():
        _refuse_grad(q, k, v)
    key: tuple[Any, ...] | None
    try:
        key = (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
            causal, softmax_scale, layout, return_lse, device,
            type(causal), type(softmax_scale), type(return_lse),  # 1 == True == 1.0, but the checks tell them apart
        )  # fmt: skip
        call = _calls.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not tensors, or unhashable: the checks below say which
        key = call = None
    if call is None:
        call = _prepare(q, k, v, causal, softmax_scale, layout, return_lse, device)
        if key is not None:
            if len(_calls) >= _MAX_CALLS:
                del _calls[next(iter(_calls))]
            _calls[key] = call
    return call(q, k, v)


def supports(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    device: Device = None,
) -> str | None:
    """None if `attention` takes these arguments on that device's lane, else the reason in one line.

    Nothing runs, and the device need not exist (see `unavailable`); tensors may be on the "meta" device.
    """
    try:
        lane, _ = parse_device(device, q)
        spec = _spec(q, k, v, causal, softmax_scale, layout, return_lse)
        return backends.get(lane).supports(spec)
    except (TypeError, ValueError) as error:
        return str(error)


def lower(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    device: Device = None,
    arch: str | None = None,
) -> Lowered:
    """What `attention` would run on a device, from the tile program to the kernel text; needs no device and no DSL.

    Parameters as `attention`; `arch` picks a target of the lane ("sm_80", "sm_90a", "sm_100a", "sm_120a").
    Returns an object with `.program` (printable), `.roles` (roles and channels, printable) and `.source` (the text).
    """
    lane, _ = parse_device(device, q)
    spec = _spec(q, k, v, causal, softmax_scale, layout, return_lse)
    backend = backends.get(lane)
    reason = backend.supports(spec, arch)
    if reason:
        raise ValueError(reason)
    return backend.lower(spec, arch)


def unavailable(device: str) -> str | None:
    """None if this machine can run the device's lane, else why not, with the remedy, in one line."""
    lane, _ = parse_device(device, None)
    return backends.get(lane).unavailable()


# ------------------------------------------------------------------------------------------------- preparing a call


_calls: dict[Any, Any] = {}
_MAX_CALLS = 4096


class _Call:
    """Everything about a call that its argument values do not change: checks are done, the kernel is loaded."""

    def __init__(self, launch: Launch | None, spec: AttentionSpec, target: torch.device, bhsd: bool) -> None:
        self.launch, self.spec, self.target, self.bhsd = launch, spec, target, bhsd

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        if q.device != self.target:
            q, k, v = q.to(self.target), k.to(self.target), v.to(self.target)
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=self.target)
        lse = None
        if self.spec.return_lse:
            batch, heads, rows = (
                (q.shape[0], q.shape[1], q.shape[2]) if self.bhsd else (q.shape[0], q.shape[2], q.shape[1])
            )
            lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=self.target)
        if self.launch is None:
            out.zero_()
            return out if lse is None else (out, lse.fill_(-math.inf))
        if self.bhsd:
            self.launch(*(_unit_last(x).transpose(1, 2) for x in (q, k, v)), out.transpose(1, 2), lse)
        else:
            self.launch(_unit_last(q), _unit_last(k), _unit_last(v), out, lse)
        return out if lse is None else (out, lse)


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    layout: str,
    return_lse: bool,
    device: Device,
) -> _Call:
    lane, target = parse_device(device, q)
    spec = _spec(q, k, v, causal, softmax_scale, layout, return_lse)
    backend = backends.get(lane)
    reason = backend.supports(spec)
    if reason:
        raise ValueError(reason)
    reason = backend.unavailable()
    if reason:
        raise RuntimeError(reason)
    if q.device.type == "meta":
        raise ValueError('q is on device "meta": it has no values; use supports() or lower()')
    bhsd = layout == "bhsd"
    if q.numel() == 0 or k.numel() == 0:
        return _Call(None, spec, target, bhsd)
    views = [_unit_last(x.to(target)) for x in (q, k, v)]
    launch = backend.prepare(spec, *(x.transpose(1, 2) if bhsd else x for x in views))
    return _Call(launch, spec, target, bhsd)


def _unit_last(x: torch.Tensor) -> torch.Tensor:
    if x.stride(3) == 1:
        return x
    logger.debug("copying a tensor of shape %s: its last stride is %d, not 1", tuple(x.shape), x.stride(3))
    return x.contiguous()


# ------------------------------------------------------------------------------------------------- checking arguments


def parse_device(device: Device, q: torch.Tensor | None) -> tuple[str, torch.device]:
    """(lane, torch device) of the `device` argument; None means where q is."""
    accepted = 'None, "cpu", "cuda", "cuda:N", "npu", "npu:N" or "npu-sim"'
    if device is None:
        if not isinstance(q, torch.Tensor):
            raise TypeError(f"q must be a torch.Tensor, got {type(q).__name__}")
        if q.device.type == "meta":
            return "cpu", torch.device("cpu")
        device = q.device
    if isinstance(device, str):
        if device == "npu-sim":
            return "npu-sim", torch.device("cpu")
        kind, _, number = device.partition(":")
        if kind == "npu" and (number.isdigit() or device == "npu") and not hasattr(torch, "npu"):
            return "npu", torch.device("cpu")  # torch has no such device without torch_npu; the lane says so in time
        try:
            device = torch.device(device)
        except RuntimeError:
            raise ValueError(f"device must be {accepted}, got {device!r}") from None
    if not isinstance(device, torch.device):
        raise TypeError(f"device must be {accepted}, got {type(device).__name__}")
    if device.type not in ("cpu", "cuda", "npu"):
        raise ValueError(f"device must be {accepted}, got {str(device)!r}")
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return device.type, device


def _spec(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    layout: str,
    return_lse: bool,
) -> AttentionSpec:
    """The spec of a call, or the error its arguments deserve."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {flag!r}")
    _check_tensors(q, k, v)
    _check_shapes(q, k, v, layout)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"softmax_scale must be a number or None, got {type(scale).__name__}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"softmax_scale must be finite and > 0, got {scale}")
    return AttentionSpec(DTYPES[q.dtype], q.shape[3], v.shape[3], float(scale), Mask(causal=causal), return_lse)


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16 or (on the CPU) float32, got {x.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    seq, head = (1, 2) if layout == "bshd" else (2, 1)
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have q's batch size {q.shape[0]}, got {x.shape[0]}")
    if v.shape[seq] != k.shape[seq]:
        raise ValueError(f"v must have k's sequence length {k.shape[seq]}, got {v.shape[seq]}")
    if v.shape[head] != k.shape[head]:
        raise ValueError(f"v must have k's number of heads {k.shape[head]}, got {v.shape[head]}")
    heads_q, heads_k = q.shape[head], k.shape[head]
    if heads_q != heads_k and (heads_k == 0 or heads_q % heads_k):
        raise ValueError(f"q must have a multiple of k's {heads_k} heads, got {heads_q} (layout {layout!r})")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have q's head dim {q.shape[3]}, got {k.shape[3]}")
    for name, x in (("q", q), ("v", v)):
        d = x.shape[3]
        if d % 8 or not 8 <= d <= MAX_HEAD_DIM:
            raise ValueError(f"{name} must have a head dim that is a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {d}")


def _refuse_grad(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise ValueError(
                f"{name} requires grad, and fa_multi has no backward yet: "
                f"call it under torch.no_grad(), or pass {name}.detach()"
            )
