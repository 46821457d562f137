"""Checks of the user's arguments, the same for every lane: a refusal names the argument, its value, what would do."""

from __future__ import annotations

import math
from typing import Any, Union

import torch

from .masks import Mask

Device = Union[str, torch.device, None]
Window = tuple[Union[int, None], Union[int, None]]

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
LAYOUTS = ("bshd", "bhsd")
MAX_HEAD_DIM = 256


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


def refuse_grad(**tensors: Any) -> None:
    """There is no backward: say so rather than return something that silently has no gradient."""
    for name, x in tensors.items():
        if x is not None and getattr(x, "requires_grad", False) and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, and fa_multi has no backward yet: "
                f"call it under torch.no_grad(), or pass {name}.detach()"
            )


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def check_count(name: str, value: object, least: int) -> int:
    """An int >= least."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def check_tensors(ranks: dict[str, int], **tensors: Any) -> None:
    """q, k, v: tensors of the given ranks, of one dtype and on one device."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != ranks[name]:
            raise ValueError(f"{name} must have {ranks[name]} dimensions, got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16 or (on the CPU) float32, got {x.dtype}")
    q = tensors["q"]
    for name, x in tensors.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def check_layout(layout: object) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")


def check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Batch sizes and lengths of q, k, v in one layout."""
    seq, head = (1, 2) if layout == "bshd" else (2, 1)
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have q's batch size {q.shape[0]}, got {x.shape[0]}")
    if v.shape[seq] != k.shape[seq]:
        raise ValueError(f"v must have k's sequence length {k.shape[seq]}, got {v.shape[seq]}")
    check_heads(q, k, v, head, f" (layout {layout!r})")


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int, note: str = "", key: str = "k") -> None:
    """Heads and head dims; `head` counts from the first axis and -2 from the last."""
    value = "v" + key[1:]
    if v.shape[head] != k.shape[head]:
        raise ValueError(f"{value} must have {key}'s number of heads {k.shape[head]}, got {v.shape[head]}")
    heads_q, heads_k = q.shape[head], k.shape[head]
    if heads_q != heads_k and (heads_k == 0 or heads_q % heads_k):
        raise ValueError(f"q must have a multiple of {key}'s {heads_k} heads, got {heads_q}{note}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{key} must have q's head dim {q.shape[-1]}, got {k.shape[-1]}")
    for name, x in (("q", q), (value, v)):
        d = x.shape[-1]
        if d % 8 or not 8 <= d <= MAX_HEAD_DIM:
            raise ValueError(f"{name} must have a head dim that is a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {d}")


def check_integers(name: str, x: Any, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """An int32 tensor of a shape, on the device of `like`, with a unit last stride."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of int32, got {type(x).__name__}")
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on q's device {like.device}, got {x.device}")


def check_head_numbers(name: str, x: Any, shapes: tuple[tuple[int, ...], ...], like: torch.Tensor) -> None:
    """A float tensor with one number per head (or per batch entry and head)."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not x.dtype.is_floating_point or x.dtype == torch.float64:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {x.dtype}")
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(x.shape)}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on q's device {like.device}, got {x.device}")


def parse_window(window_size: Any) -> Window:
    """(left, right) with None for no limit."""
    accepted = "a pair of ints >= 0, or -1 or None for no limit"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be {accepted}, got {window_size!r}")
    for w in window_size:
        if w is not None and (isinstance(w, bool) or not isinstance(w, int)):
            raise TypeError(f"window_size must be {accepted}, got {window_size!r}")
        if w is not None and w < -1:
            raise ValueError(f"window_size must be {accepted}, got {window_size!r}")
    left, right = (None if w == -1 else w for w in window_size)
    return left, right


def make_mask(causal: object, window_size: Any, block_causal: object) -> Mask:
    """The mask of the arguments, in the one form that equal masks share."""
    check_flag("causal", causal)
    left, right = parse_window(window_size)
    return Mask(bool(causal), (left, None if causal else right), check_count("block_causal", block_causal, 0))


def make_scale(softmax_scale: Any, head_dim: int) -> float:
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"softmax_scale must be a number or None, got {type(scale).__name__}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"softmax_scale must be finite and > 0, got {scale}")
    return float(scale)


def make_softcap(softcap: Any) -> float:
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap must be a number, got {type(softcap).__name__}")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap must be finite and >= 0 (0 is off), got {softcap}")
    return float(softcap)


def check_states(outs: Any, lses: Any) -> None:
    """Parts to be merged: equal shapes, and an lse for each."""
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs and lses must be of one length, at least 1, got {len(outs)} and {len(lses)}")
    first = outs[0]
    for name, x in [("out", x) for x in outs] + [("lse", x) for x in lses]:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"every {name} must be a torch.Tensor, got {type(x).__name__}")
        if x.device != first.device:
            raise ValueError(f"every {name} must be on {first.device}, got {x.device}")
    if first.dim() not in (3, 4) or first.dtype not in DTYPES:
        raise ValueError(
            f"every out must be a float tensor of 3 or 4 dimensions, got {first.dtype} {tuple(first.shape)}"
        )
    shape = tuple(first.shape[i] for i in ((1, 0) if first.dim() == 3 else (0, 2, 1)))
    for x in outs:
        if x.shape != first.shape or x.dtype != first.dtype:
            raise ValueError(f"every out must be {first.dtype} {tuple(first.shape)}, got {x.dtype} {tuple(x.shape)}")
    for x in lses:
        if tuple(x.shape) != shape or x.dtype != torch.float32:
            raise ValueError(f"every lse must be torch.float32 {shape}, got {x.dtype} {tuple(x.shape)}")


def check_buffer(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """A buffer the caller wants the result in."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    if name == "lse" and not x.is_contiguous():
        raise ValueError(f"lse must be contiguous, got strides {x.stride()}")
    if x.numel() and x.stride(-1) != 1:
        raise ValueError(f"{name} must have a unit last stride, got strides {x.stride()}")
