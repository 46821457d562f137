"""THE case list: every lane runs it, the tests and `fa-multi` alike. A case is a named attention call with its inputs.

Inputs depend on the seed, the case's name and the tensor's name alone (`philox.py`), on every machine.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from . import reference
from .philox import key, normal

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Fields of a case that are arguments of `fa_multi.attention` and of the reference, under the same names.
OPTIONS = ("causal", "softmax_scale", "layout")
MORE_OPTIONS = ("window_size", "block_causal", "softcap")  # passed on only where they are set
SINKS = ("none", "normal", "extreme")
_DRAWN_AT_ONCE = 1 << 14  # elements; float64 temporaries of this size stay in cache


@dataclass(frozen=True)
class Case:
    """One attention call. `values` shapes the random inputs, `view` lays them out in memory; both keep the meaning.

    name: letters, digits, and _ . - (it names files). dtype: a key of DTYPES. head_dim_v: head_dim if None.
    values: a key of VALUES. view: a key of VIEWS.
    lengths: (queries, keys) of every sequence, in place of batch, seqlen_q and seqlen_k: a call of `attention_varlen`,
    or with a page_size of `attention_paged`, whose pool has pages in any order and NaN in every slot that is not used.
    The rest is as in those functions.
    """

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
    window_size: tuple[int, int] = (-1, -1)
    block_causal: int = 0
    softcap: float = 0.0
    alibi: bool = False
    sink: str = "none"
    lengths: tuple[tuple[int, int], ...] = ()
    page_size: int = 0
    num_splits: int = 0

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the call that are no tensors."""
        chosen = self.options()
        if self.lengths:
            del chosen["layout"]
            _, seqlen_q, seqlen_k = self.sizes()
            chosen |= {"max_seqlen_q": seqlen_q} if self.packed_queries() else {}
            chosen |= {"num_splits": self.num_splits} if self.page_size else {"max_seqlen_k": seqlen_k}
        return chosen

    def options(self) -> dict[str, Any]:
        """Those that the reference takes too."""
        chosen = {name: getattr(self, name) for name in OPTIONS}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        more = {name: getattr(self, name) for name in MORE_OPTIONS if getattr(self, name) != defaults[name]}
        return chosen | more

    def extras(self, seed: int = 0) -> dict[str, Any]:
        """The tensors that are keyword arguments, on the CPU: lengths and tables, int32; numbers by head, float32."""
        return {**self._addresses(seed), **self.head_numbers(seed)}

    def head_numbers(self, seed: int = 0) -> dict[str, Any]:
        """alibi_slopes and sink, (heads_q,) float32."""

        def draw(name: str) -> torch.Tensor:
            return torch.from_numpy(normal(key(seed, self.name, name), 0, self.heads_q)).float()

        found = {"alibi_slopes": draw("alibi_slopes").abs()} if self.alibi else {}
        if self.sink != "none":
            sink = draw("sink")
            if self.sink == "extreme":  # far above, far below, all, none
                for head, value in zip(range(self.heads_q), (40.0, -40.0, math.inf, -math.inf)):
                    sink[head] = value
            found["sink"] = sink
        return found

    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Shapes of q, k and v as (batch, seq, heads, dim), whatever the layout; sequences one behind the other."""
        dv = self.head_dim if self.head_dim_v is None else self.head_dim_v
        batch, queries, keys = self.batch, self.seqlen_q, self.seqlen_k
        if self.lengths:
            batch, queries, keys = 1, *(sum(n) for n in zip(*self.lengths))
        return {
            "q": (batch, queries, self.heads_q, self.head_dim),
            "k": (batch, keys, self.heads_k, self.head_dim),
            "v": (batch, keys, self.heads_k, dv),
        }

    def sizes(self) -> tuple[int, int, int]:
        """(sequences, longest queries, longest keys)."""
        if not self.lengths:
            return self.batch, self.seqlen_q, self.seqlen_k
        return len(self.lengths), *(max(n) for n in zip(*self.lengths))

    def argument_names(self) -> tuple[str, str, str]:
        """Names of the three tensors that the call takes by position."""
        return ("q", "k_cache", "v_cache") if self.page_size else ("q", "k", "v")

    def inputs(self, seed: int = 0) -> Tensors:
        """q, k, v on the CPU in the case's dtype, layout and view, bit-identical on every machine.

        Drawn in float64 and rounded, a piece at a time: little more memory than the result.
        """
        q, k, v = (self._draw(name, shape, seed) for name, shape in self.shapes().items())
        if not self.lengths:
            return VIEWS[self.view](q, k, v, self.layout)
        q = q[0] if self.packed_queries() else q.view(len(self.lengths), -1, *q.shape[2:])
        return q, self._pool(k[0], seed), self._pool(v[0], seed)

    def sequences(self, seed: int = 0) -> list[Tensors]:
        """q, k and v of every sequence, each (1, seq, heads, dim)."""
        q, k, v = (self._draw(name, shape, seed) for name, shape in self.shapes().items())
        queries, keys = ([*n] for n in zip(*self.lengths))
        return list(zip(q.split(queries, 1), k.split(keys, 1), v.split(keys, 1)))

    def packed_queries(self) -> bool:
        """Are queries packed? Those of a cache are not where all sequences have as many."""
        return bool(self.lengths) and (not self.page_size or len({n for n, _ in self.lengths}) > 1)

    def _pages(self, seed: int) -> torch.Tensor:
        """Page numbers, one sequence behind the other, in an order drawn from the seed; one page is left over."""
        count = sum(-(-n // self.page_size) for _, n in self.lengths)
        return torch.from_numpy(normal(key(seed, self.name, "block_table"), 0, count + 1)).argsort()

    def _pool(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        """Packed keys or values, as pages where the call takes pages."""
        if not self.page_size:
            return x
        pages, size = self._pages(seed), self.page_size
        pool = torch.full((len(pages), size, *x.shape[1:]), math.nan, dtype=x.dtype)
        used = 0
        for rows in x.split([n for _, n in self.lengths]):
            for part in rows.split(size):
                pool[pages[used], : len(part)] = part
                used += 1 if len(part) else 0
        return pool

    def _addresses(self, seed: int) -> dict[str, torch.Tensor]:
        """Lengths and tables. Entries of a table that are not used are out of range."""
        if not self.lengths:
            return {}
        queries, keys = (torch.tensor(n) for n in zip(*self.lengths))
        ends = {"cu_seqlens_q": queries, "cu_seqlens_k": keys}
        names = [*(["cu_seqlens_q"] if self.packed_queries() else []), *([] if self.page_size else ["cu_seqlens_k"])]
        found = {name: torch.cat([torch.zeros(1), ends[name].cumsum(0)]).int() for name in names}
        if self.page_size:
            counts = [-(-n // self.page_size) for _, n in self.lengths]
            table = torch.full((len(counts), max(counts) + 1), -(1 << 30), dtype=torch.int32)
            for row, pages in zip(table, self._pages(seed)[:-1].int().split(counts)):
                row[: len(pages)] = pages
            found |= {"block_table": table, "cache_seqlens": keys.int()}
        return found

    def _draw(self, tensor: str, shape: tuple[int, int, int, int], seed: int) -> torch.Tensor:
        batch, seq, heads, dim = shape
        stream = key(seed, self.name, tensor)
        result = torch.empty((batch * seq, heads, dim), dtype=DTYPES[self.dtype])
        step = max(1, _DRAWN_AT_ONCE // max(1, heads * dim))
        for row in range(0, batch * seq if heads * dim else 0, step):
            rows = min(step, batch * seq - row)
            x = torch.from_numpy(normal(stream, row * heads * dim, rows * heads * dim)).view(rows, heads, dim)
            place = torch.arange(row, row + rows, dtype=torch.float64).remainder(seq) / max(1, seq - 1)
            result[row : row + rows] = VALUES[self.values](tensor, x, place[:, None, None])
        return result.view(shape)

    def tags(self) -> list[str]:
        """Words to choose cases by: dtype, layout, head dims, mask, grouping, values and view where not the default."""
        words = [self.dtype, f"d{self.head_dim}"]
        words += ["causal"] if self.causal else []
        words += [] if self.heads_k == self.heads_q else ["mqa" if self.heads_k == 1 else "gqa"]
        words += ["scale"] if self.softmax_scale is not None else []
        words += ["window"] if tuple(self.window_size) != (-1, -1) else []
        words += [name for name in ("block_causal", "softcap", "alibi") if getattr(self, name)]
        words += ["sink"] if self.sink != "none" else []
        lengths = self.lengths or ((self.seqlen_q, self.seqlen_k),)
        words += ["decode"] if self.sizes()[1] == 1 else []
        words += ["empty_rows"] if self.causal and any(queries > keys for queries, keys in lengths) else []
        words += ["paged" if self.page_size else "packed"] if self.lengths else []
        words += ["split"] if self.num_splits > 1 else []
        words += [x for x in (self.layout, self.values, self.view) if x not in ("bshd", "normal", "contiguous")]
        return words

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not the default, and the name."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name == "name" or getattr(self, f.name) != f.default
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Case:
        """A case from `to_dict` or from a user's file; ValueError names the field, its value and what is accepted."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise ValueError(f"case {fields.get('name', '?')!r}: no field {name!r}; fields are {', '.join(known)}")
        if "name" not in fields:
            raise ValueError(f"a case must have a name, got only {', '.join(fields) or 'nothing'}")
        case = cls(**fields)
        case._check()
        return dataclasses.replace(case, lengths=tuple((queries, keys) for queries, keys in case.lengths))

    def _check(self) -> None:
        def refuse(field: str, accepted: str) -> None:
            raise ValueError(f"case {self.name!r}: {field} must be {accepted}, got {getattr(self, field)!r}")

        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.-]+", self.name, re.ASCII):
            refuse("name", "letters, digits, '_', '.' or '-'")
        numbers = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "head_dim_v")
        for field in (*numbers, "page_size", "num_splits"):
            value = getattr(self, field)
            if not (value is None and field == "head_dim_v") and (type(value) is not int or value < 0):
                refuse(field, "an integer >= 0")
        choices: dict[str, Iterable[str]] = {
            "dtype": DTYPES,
            "values": VALUES,
            "view": VIEWS,
            "layout": ("bshd", "bhsd"),
            "sink": SINKS,
        }
        for field, accepted in choices.items():
            if getattr(self, field) not in accepted:
                refuse(field, f"one of {', '.join(accepted)}")
        for field in ("causal", "alibi"):
            if type(getattr(self, field)) is not bool:
                refuse(field, "true or false")
        window = self.window_size
        if (
            not isinstance(window, (tuple, list))
            or len(window) != 2
            or any(type(w) is not int or w < -1 for w in window)
        ):
            refuse("window_size", "two integers >= -1")
        pairs = self.lengths if isinstance(self.lengths, (tuple, list)) else (None,)
        if any(
            not isinstance(n, (tuple, list)) or len(n) != 2 or any(type(x) is not int or x < 0 for x in n)
            for n in pairs
        ):
            refuse("lengths", "pairs (queries, keys) of integers >= 0")
        if self.lengths and (self.layout, self.view) != ("bshd", "contiguous"):
            refuse("lengths", "empty where layout or view are set")
        if self.page_size and not self.lengths:
            refuse("page_size", "0 without lengths")
        if type(self.block_causal) is not int or self.block_causal < 0:
            refuse("block_causal", "an integer >= 0")
        if type(self.softcap) not in (int, float) or self.softcap < 0:
            refuse("softcap", "a number >= 0")
        if self.softmax_scale is not None and type(self.softmax_scale) not in (int, float):
            refuse("softmax_scale", "a number")
        if self.heads_q != self.heads_k and (self.heads_k == 0 or self.heads_q % self.heads_k):
            refuse("heads_q", f"a multiple of heads_k = {self.heads_k}")
        if self.view == "qkv_packed" and len(set(self.shapes().values())) != 1:
            refuse("view", "one that fits: qkv_packed needs q, k and v of one shape")


def golden(case: Case, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of a case in fp64, or computed naively in another dtype: (out, lse) as the call returns them."""
    options = {**case.options(), **case.head_numbers(), "dtype": dtype}
    if not case.lengths:
        return reference.attention(*case.inputs(), **options)
    results = [reference.attention(*of, **options) for of in case.sequences()]
    if not case.packed_queries():
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])
    return torch.cat([out[0] for out, _ in results]), torch.cat([lse[0] for _, lse in results], -1)


# ------------------------------------------------------------------------------------------------ values and views


def _normal(tensor: str, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return x


def _large(tensor: str, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return x * (100.0 if tensor == "v" else 30.0)


def _equal_scores(tensor: str, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, 0.5) if tensor == "k" else x


def _zeros_q(tensor: str, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if tensor == "q" else x


def _rising(tensor: str, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Scores that grow along the keys, so that the running maximum rises in every tile."""
    return {"q": x.abs(), "k": x.abs() * (place * 3.9 + 0.1), "v": x}[tensor]


def _positive_v(tensor: str, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Sums that never cancel: what a narrow accumulator loses stays lost."""
    return x.abs() if tensor == "v" else x


# values(tensor name, float64 (rows, heads, dim), place of each row along the sequence from 0 to 1) -> the same shape
VALUES: dict[str, Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "normal": _normal,
    "large": _large,
    "equal_scores": _equal_scores,
    "zeros_q": _zeros_q,
    "rising": _rising,
    "positive_v": _positive_v,
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
    # masks and scores
    Case("window", window_size=(20, 7), seqlen_q=140, seqlen_k=170),
    Case("window_causal", window_size=(30, -1), causal=True, seqlen_q=60, seqlen_k=300),
    Case("window_one_query", window_size=(9, 0), causal=True, seqlen_q=1, seqlen_k=200, heads_q=8),
    Case("window_empty_rows", window_size=(3, 3), seqlen_q=200, seqlen_k=50),
    Case("window_future", window_size=(-1, 5), seqlen_q=40, seqlen_k=40),
    Case("block_causal", block_causal=48, seqlen_q=130, seqlen_k=150),
    Case("block_causal_window", block_causal=5, window_size=(40, -1), seqlen_q=33, seqlen_k=60),
    Case("softcap", softcap=5.0, causal=True, seqlen_q=40, seqlen_k=140),
    Case("alibi", alibi=True, causal=True, heads_q=4, seqlen_q=40, seqlen_k=140),
    Case("sink", sink="normal", causal=True, heads_q=4, seqlen_q=50, seqlen_k=40),
    Case("sink_extreme", sink="extreme", heads_q=4, seqlen_q=20, seqlen_k=140, dtype="fp16"),
    Case(
        "everything", alibi=True, sink="normal", softcap=20.0, window_size=(60, -1), causal=True, heads_q=4, seqlen_q=9
    ),
    # packed sequences, and caches in pages
    Case("packed", lengths=((40, 40), (0, 5), (1, 90), (130, 150))),
    Case("packed_causal", lengths=((33, 70), (20, 9), (0, 0), (64, 64)), causal=True, heads_q=6),
    Case("paged_decode", lengths=((1, 70), (1, 0), (1, 33)), page_size=16, heads_q=8, head_dim=128),
    Case("paged_split", lengths=((1, 300), (1, 17)), page_size=64, heads_q=8, num_splits=3, sink="normal"),
    Case("paged_few", lengths=((3, 100), (3, 50)), page_size=48, causal=True, heads_q=4, dtype="fp16"),
    Case("paged_page_1", lengths=((2, 30), (2, 7)), page_size=1, causal=True),
    Case("paged_page_1_heads", lengths=((1, 70), (1, 33)), page_size=1, heads_q=16, heads_k=8, alibi=True),
    Case("paged_chunks", lengths=((40, 200), (3, 64), (1, 31)), page_size=32, causal=True, window_size=(90, -1)),
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

# ------------------------------------------------------------------------------------------------------- choosing


def select(wanted: str, cases: Iterable[Case] = CASES) -> list[Case]:
    """Cases by what a user typed, in the order of the list.

    wanted: "all"; the path of a YAML file (`load`); or names, shell patterns and "tag:NAME", separated by commas.
    Raises ValueError when a part of it chooses nothing.
    """
    if wanted.endswith((".yaml", ".yml")):
        return load(Path(wanted))
    cases = list(cases)
    chosen: set[str] = set()
    for part in wanted.split(","):
        part = part.strip()
        found = {c.name for c in cases if _matches(c, part)}
        if not found:
            raise ValueError(f"no case matches {part!r}; `fa-multi cases` lists names and tags")
        chosen |= found
    return [c for c in cases if c.name in chosen]


def _matches(case: Case, part: str) -> bool:
    if part.startswith("tag:"):
        return part[4:] in case.tags()
    return part == "all" or fnmatch.fnmatchcase(case.name, part)


def load(path: Path) -> list[Case]:
    """Cases from a YAML file: a list of mappings with the fields of `Case`, or a mapping with such a list as `cases`.

    Raises ValueError, naming the file, for anything else.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read the case file {str(path)!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    rows = data.get("cases") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must hold a list of cases, each a mapping such as {{name: mine, seqlen_q: 128}}")
    try:
        loaded = [Case.from_dict(row) for row in rows]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    names = [c.name for c in loaded]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: two cases are named {twice!r}")
    return loaded
