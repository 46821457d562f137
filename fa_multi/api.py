"""The user's entry points. Arguments are checked once for all lanes and become a request; the contract lives here."""

from __future__ import annotations

from typing import Any

import torch

from . import arguments as check
from . import backends
from .arguments import Device, parse_device, refuse_grad
from .backends import Lowered
from .calls import Call, Request, Result, call_key, find, remember, unit_last
from .spec import Addressing, AttentionSpec


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
    window_size: tuple[int | None, int | None] = (-1, -1),
    block_causal: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Result:
    """Exact attention, out = softmax(softmax_scale * q k^T) v per head, with fp32 sums. Forward only.

    Query i of seqlen_q stands at key position p = i + seqlen_k - seqlen_q: bottom-right, as in FlashAttention since 2.1.
    All masks given apply together.

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim); (batch, heads_q, seqlen_q, head_dim) with layout "bhsd".
    k : (batch, seqlen_k, heads_k, head_dim), heads_q a multiple of heads_k (GQA, MQA).
    v : (batch, seqlen_k, heads_k, head_dim_v).
        float16, bfloat16, or (CPU only) float32. Any strides: a unit last stride is used in place, anything else is
        copied once. Head dims are multiples of 8 up to 256; every length may be 0.
    causal : query i sees keys up to p.
    softmax_scale : > 0; default 1 / sqrt(head_dim).
    layout : "bshd" or "bhsd", of q, k, v and out.
    return_lse : also return the log-sum-exp of the scaled scores.
    device : where to run; default where q is. "cpu", "cuda[:n]", "npu[:n]", or "npu-sim" for the Ascend kernel in the
        CPU simulator. Inputs elsewhere are moved there, and the result stays there (for "npu-sim": on the CPU).
    window_size : (left, right): keys from p - left to p + right, both inclusive; -1 or None is no limit.
    block_causal : n > 0: the keys of p's own block of n keys, and all before it.
    softcap : c > 0: scores become c * tanh(score / c), before any bias.
    alibi_slopes : (heads_q,) or (batch, heads_q): adds -slope * |p - j| to the score of key j.
    sink : (heads_q,), one more logit per head in natural units, in the denominator only. -inf is none, +inf gives 0.
    out, lse : buffers for the results, like what is returned; `lse` needs return_lse.

    Returns
    -------
    out : like q, with head_dim_v columns; contiguous in `layout`. A query that sees no key gives 0.
    lse : (batch, heads_q, seqlen_q) float32, natural log, sink included; -inf for a query that sees no key (with a
        sink: the sink). Only with return_lse.

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
        refuse_grad(q=q, k=k, v=v, alibi_slopes=alibi_slopes, sink=sink)
    options = (causal, softmax_scale, layout, return_lse, device, window_size, block_causal, softcap)
    key = call_key((q, k, v, alibi_slopes, sink), options)
    call = find(key)
    if call is None:
        lane, target = parse_device(device, q)
        request = _dense(
            q, k, v, causal, softmax_scale, layout, return_lse, window_size, block_causal, softcap, alibi_slopes, sink
        )
        call = remember(key, _prepare(request, lane, target, (q, k, v, alibi_slopes, sink)))
    if out is not None or lse is not None:
        _check_buffers(call, out, lse)
    return call([x for x in (q, k, v, alibi_slopes, sink) if x is not None], out, lse)


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, device: Device = None, **options: Any) -> str | None:
    """None if `attention` takes these arguments on that device's lane, else the reason in one line.

    Arguments as `attention` (without buffers). Nothing runs, and the device need not exist (see `unavailable`); tensors
    may be on the "meta" device.
    """
    try:
        lane, _ = parse_device(device, q)
        return backends.get(lane).supports(_dense_options(q, k, v, options).spec)
    except (TypeError, ValueError) as error:
        return str(error)


def lower(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    device: Device = None,
    arch: str | None = None,
    **options: Any,
) -> Lowered:
    """What `attention` would run on a device, from the tile program to the kernel text; needs no device and no DSL.

    Arguments as `attention` (without buffers); `arch` picks a target of the lane ("sm_80", "sm_90a", "sm_100a",
    "sm_120a"). Returns an object with `.program` (printable), `.roles` (roles and channels, printable) and `.source`
    (the kernel text).
    """
    lane, _ = parse_device(device, q)
    spec = _dense_options(q, k, v, options).spec
    backend = backends.get(lane)
    reason = backend.supports(spec, arch)
    if reason:
        raise ValueError(reason)
    return backend.lower(spec, arch)


def unavailable(device: str) -> str | None:
    """None if this machine can run the device's lane, else why not, with the remedy, in one line."""
    lane, _ = parse_device(device, None)
    return backends.get(lane).unavailable()


# ------------------------------------------------------------------------------------------------- requests


_DENSE_DEFAULTS: dict[str, Any] = {
    "causal": False,
    "softmax_scale": None,
    "layout": "bshd",
    "return_lse": False,
    "window_size": (-1, -1),
    "block_causal": 0,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sink": None,
}


def _dense_options(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> Request:
    unknown = set(options) - set(_DENSE_DEFAULTS)
    if unknown:
        raise TypeError(f"unexpected argument {min(unknown)!r}; accepted are {', '.join(_DENSE_DEFAULTS)}")
    return _dense(q, k, v, **{**_DENSE_DEFAULTS, **options})


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    layout: str,
    return_lse: bool,
    window_size: Any,
    block_causal: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> Request:
    """The request of dense q, k, v, or the error its arguments deserve."""
    check.check_layout(layout)
    check.check_tensors({"q": 4, "k": 4, "v": 4}, q=q, k=k, v=v)
    check.check_dense(q, k, v, layout)
    bhsd = layout == "bhsd"
    heads = q.shape[1 if bhsd else 2]
    rows = q.shape[2 if bhsd else 1]
    spec = _spec(
        q, v, causal, softmax_scale, return_lse, window_size, block_causal, softcap, alibi_slopes, sink,
        q.shape[0], heads, Addressing(),
    )  # fmt: skip

    def arrange(tensors: Any) -> list[torch.Tensor]:
        qkv = [unit_last(x) for x in tensors[:3]]
        return [x.transpose(1, 2) for x in qkv] if bhsd else qkv

    names = ("q", "k", "v")
    return Request(
        spec,
        names + _head_names(spec),
        _with_head_numbers(arrange, spec, 3, q.shape[0]) if spec.alibi or spec.sink else arrange,
        (lambda x: x.transpose(1, 2) if x.dim() == 4 else x) if bhsd else (lambda x: x),
        (*q.shape[:3], v.shape[3]),
        (q.shape[0], heads, rows),
        empty=q.numel() == 0 or k.numel() == 0,
    )


def _spec(
    q: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    window_size: Any,
    block_causal: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sink: torch.Tensor | None,
    batch: int,
    heads: int,
    addressing: Addressing,
) -> AttentionSpec:
    """What all entry points have in common."""
    check.check_flag("return_lse", return_lse)
    if alibi_slopes is not None:
        check.check_head_numbers("alibi_slopes", alibi_slopes, ((heads,), (batch, heads)), q)
    if sink is not None:
        check.check_head_numbers("sink", sink, ((heads,),), q)
    return AttentionSpec(
        check.DTYPES[q.dtype],
        q.shape[-1],
        v.shape[-1],
        check.make_scale(softmax_scale, q.shape[-1]),
        check.make_mask(causal, window_size, block_causal),
        return_lse,
        check.make_softcap(softcap),
        alibi_slopes is not None,
        sink is not None,
        addressing,
    )


def _head_names(spec: AttentionSpec) -> tuple[str, ...]:
    return (("alibi_slopes",) if spec.alibi else ()) + (("sink",) if spec.sink else ())


def _with_head_numbers(arrange: Any, spec: AttentionSpec, count: int, batch: int) -> Any:
    """`arrange` for the first `count` tensors, then slopes as (batch, heads) and the sink, both float32."""

    def both(tensors: Any) -> list[torch.Tensor]:
        numbers = [x.float() for x in tensors[count:]]
        if spec.alibi:
            numbers[0] = numbers[0].expand(batch, numbers[0].shape[-1])
        return [*arrange(tensors[:count]), *numbers]

    return both


def _prepare(request: Request, lane: str, target: torch.device, tensors: Any) -> Call:
    backend = backends.get(lane)
    reason = backend.supports(request.spec)
    if reason:
        raise ValueError(reason)
    reason = backend.unavailable()
    if reason:
        raise RuntimeError(reason)
    if tensors[0].device.type == "meta":
        raise ValueError('q is on device "meta": it has no values; use supports() or lower()')
    return Call(request, backend, target, [x for x in tensors if x is not None])


def _check_buffers(call: Call, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    request = call.request
    if out is not None:
        check.check_buffer("out", out, request.out_shape, call.dtype, call.target)
    if lse is not None:
        if not request.spec.return_lse:
            raise ValueError("lse is given, but return_lse is False")
        check.check_buffer("lse", lse, request.lse_shape, torch.float32, call.target)
