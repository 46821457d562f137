"""Random attention calls: shapes, masks and extras, drawn by hypothesis here and from plain seeds on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from fa_multi import reference
from fa_multi.accuracy import Verdict, judge

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Call:
    """One call: sequences of (queries, keys) lengths, heads, dims, options. Dense calls have one pair of lengths."""

    kind: str
    lengths: tuple[tuple[int, int], ...]
    heads_k: int
    group: int
    head_dim: int
    head_dim_v: int
    dtype: str
    seed: int
    page_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    splits: dict[str, int] = field(default_factory=dict)


def draw(
    random: Random,
    kernel: Random | None = None,
    kinds: tuple[str, ...] = ("dense", "varlen", "paged"),
    longest: int = 90,
) -> Call:
    """A call; small sizes, with the awkward ones likely. What needs a kernel of its own is drawn from `kernel`, so that
    many calls can share a few kernels."""
    kernel = kernel or random
    kind = kernel.choice(kinds)

    def length() -> int:
        return random.choice([0, 1, 2, 15, 16, 17, random.randint(1, longest), random.randint(1, longest)])

    count = random.randint(1, 3)
    few = kernel.random() < 0.7  # queries against a cache: so few that the heads of a group share a tile
    if kind == "dense":
        lengths = ((max(length(), 1), max(length(), 1)),) * count
    elif kind == "varlen":
        lengths = tuple((length(), length()) for _ in range(count))
    else:
        queries = random.choice([1, 1, 2, 5] if few else [33, 40])
        lengths = tuple((queries, length()) for _ in range(count))
    group = kernel.choice([1, 1, 2, 3, 5, 8])
    heads_k = random.choice([1, 2])
    d = kernel.choice([8, 16, 32, 64, 72])
    splits = {}
    if kind == "paged":
        splits = random.choice([{"num_splits": 3}, {"num_splits": 40}, {"fixed_split_size": 64}])
        splits = kernel.choice([{}, {"num_splits": 1}, splits])
    d_v, dtype, seed = kernel.choice([d, d, 40]), kernel.choice(list(DTYPES)), random.getrandbits(30)
    page_size = kernel.choice([1, 16, 32, 48, 64, 128])
    if page_size == 1 and group in (2, 5, 8):  # so many heads that those of one position make a box of rows
        heads_k = 8
    options = _options(random, kernel, heads_k * group)
    return Call(kind, lengths, heads_k, group, d, d_v, dtype, seed, page_size, options, splits)


def _options(random: Random, kernel: Random, heads: int) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": kernel.random() < 0.5}
    if kernel.random() < 0.35:
        options["window_size"] = tuple(kernel.choice([-1, 0, 1, 7, 40]) for _ in range(2))
    if kernel.random() < 0.15:
        options["block_causal"] = kernel.choice([1, 3, 16])
    if kernel.random() < 0.2:
        options["softcap"] = kernel.choice([1.0, 20.0])
    if kernel.random() < 0.2:
        options["alibi_slopes"] = [random.random() for _ in range(heads)]
    if kernel.random() < 0.25:
        options["sink"] = [random.choice([-math.inf, math.inf, -30.0, 0.0, 3.0, 30.0]) for _ in range(heads)]
    if kernel.random() < 0.2:
        options["softmax_scale"] = kernel.choice([0.01, 1.0])
    return options


@dataclass
class Inputs:
    """Tensors of a call, poisoned with NaN wherever they may hold anything. `sequences`: what the oracle gets."""

    arguments: tuple[torch.Tensor, ...]
    keywords: dict[str, Any]
    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def make(call: Call) -> Inputs:
    """The inputs of a call, on the CPU."""
    generator = torch.Generator().manual_seed(call.seed)
    dtype, heads_q = DTYPES[call.dtype], call.heads_k * call.group

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    sequences = [
        (
            normal(1, sq, heads_q, call.head_dim),
            normal(1, sk, call.heads_k, call.head_dim),
            normal(1, sk, call.heads_k, call.head_dim_v),
        )
        for sq, sk in call.lengths
    ]
    keywords = {n: torch.tensor(x) if n in ("alibi_slopes", "sink") else x for n, x in call.options.items()}
    if call.kind == "dense":
        return Inputs(tuple(torch.cat(x) for x in zip(*sequences)), keywords, sequences)
    if call.kind == "varlen":
        arguments, more = _packed(sequences, normal)
    else:
        arguments, more = _paged(sequences, call.page_size, generator)
    return Inputs(arguments, {**keywords, **more, **call.splits}, sequences)


def _cumulated(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _packed(sequences: list[Any], normal: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Packed, with a few spare rows of NaN behind the last sequence."""
    arguments = []
    for x in zip(*sequences):
        spare = torch.full_like(normal(3, *x[0].shape[2:]), math.nan)
        arguments.append(torch.cat([*(part[0] for part in x), spare]))
    queries = [q.shape[1] for q, _, _ in sequences]
    keys = [k.shape[1] for _, k, _ in sequences]
    return tuple(arguments), {
        "cu_seqlens_q": _cumulated(queries),
        "cu_seqlens_k": _cumulated(keys),
        "max_seqlen_q": max(queries) + 5,
        "max_seqlen_k": max(keys) + 5,
    }


def _paged(
    sequences: list[Any], size: int, generator: torch.Generator
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Pages in shuffled order, NaN in unused slots and pages, wild ids in the unused tail of the table."""
    width = max(-(-k.shape[1] // size) for _, k, _ in sequences) + 1
    pages = len(sequences) * width + 2
    order = torch.randperm(pages, generator=generator)
    table = torch.full((len(sequences), width), 1 << 30, dtype=torch.int32)
    caches = [torch.full((pages, size, *x.shape[2:]), math.nan, dtype=x.dtype) for x in sequences[0][1:]]
    at = 0
    for b, (_, *kv) in enumerate(sequences):
        used = -(-kv[0].shape[1] // size)
        table[b, :used] = order[at : at + used].int()
        at += used
        for cache, x in zip(caches, kv):
            for t in range(x.shape[1]):
                cache[table[b, t // size], t % size] = x[0, t]
    queries = torch.cat([q for q, _, _ in sequences])
    lengths = torch.tensor([k.shape[1] for _, k, _ in sequences], dtype=torch.int32)
    return (queries, *caches), {"block_table": table, "cache_seqlens": lengths}


def verdicts(call: Call, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> list[Verdict]:
    """The tolerance rule for out and lse of every sequence."""
    results = []
    options = {n: inputs.keywords[n] for n in call.options}
    at = 0
    for b, (q, k, v) in enumerate(inputs.sequences):
        if call.kind == "varlen":
            rows = slice(at, at + q.shape[1])
            at += q.shape[1]
            parts = (out[rows][None], lse[:, rows][None])
        else:
            parts = (out[b : b + 1], lse[b : b + 1])
        if q.shape[1] == 0:
            continue
        golden = reference.attention(q, k, v, **options)
        naive = reference.attention(q, k, v, dtype=q.dtype, **options)
        results += [judge(x, g, n) for x, g, n in zip(parts, golden, naive)]
    return results
