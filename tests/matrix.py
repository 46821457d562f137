"""THE case list. Every lane runs it: cpu and npu-sim in CI, gpu on an NVIDIA machine, npu where one exists."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa_multi import reference
from fa_multi.accuracy import Verdict, judge

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One attention call. `values` shapes the random inputs, `view` lays them out in memory; both keep the meaning."""

    name: str
    batch: int = 1
    seqlen_q: int = 64
    seqlen_k: int = 64
    heads_q: int = 2
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bf16"
    causal: bool = False
    softmax_scale: float | None = None
    layout: str = "bshd"
    values: str = "normal"
    view: str = "contiguous"

    def kwargs(self) -> dict[str, object]:
        return {"causal": self.causal, "softmax_scale": self.softmax_scale, "layout": self.layout}

    def inputs(self) -> Tensors:
        """q, k, v on the CPU, the same on every machine: drawn from a generator seeded by the case's name."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        dv = self.head_dim if self.head_dim_v is None else self.head_dim_v
        shapes = [
            (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_k, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_k, dv),
        ]
        drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        q, k, v = (x.to(DTYPES[self.dtype]) for x in VALUES[self.values](*drawn))
        return VIEWS[self.view](q, k, v, self.layout)


def _large(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return q * 30, k * 30, v * 100


VALUES: dict[str, Callable[..., Tensors]] = {
    "normal": lambda q, k, v: (q, k, v),
    "large": _large,
    "equal_scores": lambda q, k, v: (q, torch.ones_like(k) * 0.5, v),
    "zeros_q": lambda q, k, v: (torch.zeros_like(q), k, v),
    "rising": lambda q, k, v: (q.abs(), k.abs() * torch.linspace(0.1, 4, k.shape[1])[None, :, None, None], v),
}


def _layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x if layout == "bshd" else x.transpose(1, 2).contiguous()


def _contiguous(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> Tensors:
    return _layout(q, layout), _layout(k, layout), _layout(v, layout)


def _transposed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> Tensors:
    """The other layout's memory, seen through a transpose."""
    other = "bhsd" if layout == "bshd" else "bshd"
    return tuple(_layout(x, other).transpose(1, 2) for x in (q, k, v))  # type: ignore[return-value]


def _qkv_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> Tensors:
    packed = torch.stack([q, k, v], dim=2)  # (batch, seq, 3, heads, dim)
    parts = packed.unbind(2)
    return parts if layout == "bshd" else tuple(x.transpose(1, 2) for x in parts)  # type: ignore[return-value]


def _expanded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> Tensors:
    """One key and value head seen as several, with stride 0."""
    k, v = (x[:, :, :1].expand(-1, -1, x.shape[2], -1) for x in (k, v))
    return (q, k, v) if layout == "bshd" else tuple(x.transpose(1, 2) for x in (q, k, v))  # type: ignore[return-value]


def _odd_stride(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> Tensors:
    """Rows a few elements apart, so that none but the first is aligned, with NaN between them."""
    result = []
    for x in (q, k, v):
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan"))
        wide[..., : x.shape[-1]] = x
        view = wide[..., : x.shape[-1]]
        result.append(view if layout == "bshd" else view.transpose(1, 2))
    return tuple(result)  # type: ignore[return-value]


def _cache_slice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> Tensors:
    """The first part of a larger buffer whose rest is NaN, along sequence and batch."""
    result = []
    for x in (q, k, v):
        b, s, h, d = x.shape
        wide = x.new_full((b + 1, s + 37, h, d), float("nan"))
        wide[:b, :s] = x
        view = wide[:b, :s]
        result.append(view if layout == "bshd" else view.transpose(1, 2))
    return tuple(result)  # type: ignore[return-value]


def _last_stride_2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> Tensors:
    """Every second column: the one kind of view that must be copied."""
    return tuple(torch.stack([_layout(x, layout)] * 2, -1)[..., 0] for x in (q, k, v))  # type: ignore[return-value]


VIEWS: dict[str, Callable[..., Tensors]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "qkv_packed": _qkv_packed,
    "expanded": _expanded,
    "odd_stride": _odd_stride,
    "cache_slice": _cache_slice,
    "last_stride_2": _last_stride_2,
}

CASES: tuple[Case, ...] = (
    # features, one at a time
    Case("plain"),
    Case("plain_fp16", dtype="fp16"),
    Case("plain_fp32", dtype="fp32"),
    Case("causal", causal=True),
    Case("causal_fp16", causal=True, dtype="fp16", seqlen_q=130, seqlen_k=130),
    Case("causal_fp32", causal=True, dtype="fp32", seqlen_q=130, seqlen_k=130),
    Case("scale", softmax_scale=0.5, seqlen_q=33),
    Case("batch", batch=3, seqlen_q=40, seqlen_k=150),
    Case("bhsd", layout="bhsd", batch=2, seqlen_q=70, seqlen_k=90, heads_q=4),
    # groups
    Case("gqa_4", heads_q=8, heads_k=2, seqlen_q=20, causal=True),
    Case("mqa", heads_q=5, heads_k=1, seqlen_q=17),
    Case("gqa_6", heads_q=12, heads_k=2, seqlen_q=9, seqlen_k=140),
    Case("gqa_7", heads_q=7, heads_k=1, seqlen_q=30, causal=True),
    Case("gqa_12", heads_q=24, heads_k=2, seqlen_q=3, dtype="fp16"),
    # lengths around 16, 64, 128
    Case("one_by_one", seqlen_q=1, seqlen_k=1),
    Case("single_key", seqlen_q=100, seqlen_k=1),
    Case("one_query", seqlen_q=1, seqlen_k=300, causal=True),
    Case("r15", seqlen_q=15, seqlen_k=17, causal=True),
    Case("r16_r65", seqlen_q=16, seqlen_k=65),
    Case("r63_r64", seqlen_q=63, seqlen_k=64, causal=True),
    Case("r127_r129", seqlen_q=127, seqlen_k=129),
    Case("r128_r128", seqlen_q=128, seqlen_k=128, causal=True),
    Case("r129_r127", seqlen_q=129, seqlen_k=127, causal=True),
    Case("r200_r257", seqlen_q=200, seqlen_k=257, causal=True, dtype="fp16"),
    Case("long_keys", seqlen_q=5, seqlen_k=1000, causal=True, heads_q=1, heads_k=1),
    # more queries than keys: the first rows see nothing
    Case("empty_rows", seqlen_q=5, seqlen_k=2, causal=True),
    Case("empty_blocks", seqlen_q=300, seqlen_k=100, causal=True, heads_q=1, heads_k=1),
    # head dims
    Case("d32", head_dim=32, seqlen_q=70, seqlen_k=200, causal=True),
    Case("d128", head_dim=128, seqlen_q=140, seqlen_k=140, causal=True),
    Case("d128_fp16", head_dim=128, seqlen_q=66, seqlen_k=190, dtype="fp16"),
    Case("d96", head_dim=96, seqlen_q=66, seqlen_k=130),
    Case("d192", head_dim=192, seqlen_q=66, seqlen_k=130, causal=True),
    Case("d256", head_dim=256, seqlen_q=66, seqlen_k=130, causal=True, dtype="fp16"),
    Case("d192_128", head_dim=192, head_dim_v=128, seqlen_q=66, seqlen_k=130, causal=True),
    Case("d40", head_dim=40, seqlen_q=66, seqlen_k=130),
    Case("d8", head_dim=8, seqlen_q=66, seqlen_k=130, causal=True),
    Case("d200", head_dim=200, head_dim_v=104, seqlen_q=33, seqlen_k=65),
    # values
    Case("large", values="large", seqlen_q=40, seqlen_k=200, causal=True),
    Case("large_fp16", values="large", seqlen_q=40, seqlen_k=200, dtype="fp16"),
    Case("equal_scores", values="equal_scores", seqlen_q=20, seqlen_k=150, causal=True),
    Case("zeros_q", values="zeros_q", seqlen_q=20, seqlen_k=150),
    Case("rising", values="rising", seqlen_q=33, seqlen_k=400),
    # views
    Case("transposed", view="transposed", seqlen_q=50, seqlen_k=50),
    Case("transposed_bhsd", view="transposed", layout="bhsd", seqlen_q=50, seqlen_k=70),
    Case("qkv_packed", view="qkv_packed", batch=2, seqlen_q=70, seqlen_k=70, causal=True),
    Case("expanded", view="expanded", heads_q=4, heads_k=4, seqlen_q=30, seqlen_k=130),
    Case("odd_stride", view="odd_stride", batch=2, seqlen_q=40, seqlen_k=140, causal=True),
    Case("cache_slice", view="cache_slice", batch=2, seqlen_q=40, seqlen_k=140),
    Case("last_stride_2", view="last_stride_2", seqlen_q=20, seqlen_k=30),
)


def golden(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.attention(q, k, v, **case.kwargs())  # type: ignore[arg-type]


def verdicts(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[Verdict, Verdict]:
    """The tolerance rule applied to out and lse."""
    out64, lse64 = golden(case, q, k, v)
    low_out, low_lse = reference.attention(q, k, v, dtype=q.dtype, **case.kwargs())  # type: ignore[arg-type]
    return judge(out, out64, low_out), judge(lse, lse64, low_lse)
