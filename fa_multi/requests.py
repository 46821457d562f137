"""Requests of the three entry points: dense, packed (varlen) and paged tensors, checked and made into the program's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import arguments as check
from .calls import Request, Tensors, as_it_is, unit_last
from .spec import FEW_QUERIES, Addressing, AttentionSpec


@dataclass(frozen=True)
class Options:
    """What the entry points have in common; as in `fa_multi.attention`."""

    causal: bool = False
    softmax_scale: float | None = None
    return_lse: bool = False
    window_size: Any = (-1, -1)
    block_causal: int = 0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None

    def spec(self, q: torch.Tensor, v: torch.Tensor, batch: int, heads: int, addressing: Addressing) -> AttentionSpec:
        """The spec, or the error that an option deserves."""
        check.check_flag("return_lse", self.return_lse)
        if self.alibi_slopes is not None:
            check.check_head_numbers("alibi_slopes", self.alibi_slopes, ((heads,), (batch, heads)), q)
        if self.sink is not None:
            check.check_head_numbers("sink", self.sink, ((heads,),), q)
        return AttentionSpec(
            check.DTYPES[q.dtype],
            q.shape[-1],
            v.shape[-1],
            check.make_scale(self.softmax_scale, q.shape[-1]),
            check.make_mask(self.causal, self.window_size, self.block_causal),
            self.return_lse,
            check.make_softcap(self.softcap),
            self.alibi_slopes is not None,
            self.sink is not None,
            addressing,
        )

    def numbers(self) -> list[torch.Tensor]:
        """The tensors among the options, in the order of the program's."""
        return [x for x in (self.alibi_slopes, self.sink) if x is not None]

    def values(self) -> tuple[Any, ...]:
        """The other options."""
        return (
            self.causal, self.softmax_scale, self.return_lse, self.window_size, self.block_causal, self.softcap,
        )  # fmt: skip


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, options: Options) -> Request:
    """The request of q, k, v with a batch axis, or the error its arguments deserve."""
    check.check_layout(layout)
    check.check_tensors({"q": 4, "k": 4, "v": 4}, q=q, k=k, v=v)
    check.check_dense(q, k, v, layout)
    bhsd = layout == "bhsd"
    heads, rows = (q.shape[1], q.shape[2]) if bhsd else (q.shape[2], q.shape[1])
    spec = options.spec(q, v, q.shape[0], heads, Addressing())

    def arrange(tensors: Tensors) -> list[torch.Tensor]:
        qkv = [unit_last(x) for x in tensors[:3]]
        return [x.transpose(1, 2) for x in qkv] if bhsd else qkv

    return Request(
        spec,
        _names(spec, Lengths()),
        _with_numbers(arrange, spec, 3, q.shape[0]),
        (lambda x: x.transpose(1, 2) if x.dim() == 4 else x) if bhsd else as_it_is,
        (*q.shape[:3], v.shape[3]),
        (q.shape[0], heads, rows),
        empty=q.numel() == 0 or k.numel() == 0,
    )


@dataclass(frozen=True)
class Lengths:
    """cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, as given (None where not)."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        return [x for x in self.named().values() if x is not None]

    def named(self) -> dict[str, torch.Tensor | None]:
        """In the order of the program's tensors."""
        return {name: getattr(self, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")}


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, max_seqlen_q: int, options: Options
) -> Request:
    """The request of packed q, k, v (total, heads, dim), or the error its arguments deserve."""
    check.check_tensors({"q": 3, "k": 3, "v": 3}, q=q, k=k, v=v)
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"v must have k's number of rows {k.shape[0]}, got {v.shape[0]}")
    check.check_heads(q, k, v, 1)
    batch = _batch_of(lengths.cu_seqlens_q, q)
    check.check_integers("cu_seqlens_q", lengths.cu_seqlens_q, (batch + 1,), q)
    check.check_integers("cu_seqlens_k", lengths.cu_seqlens_k, (batch + 1,), q)
    if lengths.seqused_k is not None:
        check.check_integers("seqused_k", lengths.seqused_k, (batch,), q)
    check.check_count("max_seqlen_q", max_seqlen_q, 0)
    addressing = Addressing("packed", "packed", key_lengths=lengths.seqused_k is not None)
    spec = options.spec(q, v, batch, q.shape[1], addressing)
    return _packed_request(spec, q, k, v, lengths, batch, max_seqlen_q, keys_packed=True)


def paged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, max_seqlen_q: int | None, options: Options
) -> Request:
    """The request of q against a key-value cache, paged or dense, or the error its arguments deserve."""
    packed = lengths.cu_seqlens_q is not None
    check.check_tensors({"q": 3 if packed else 4, "k_cache": 4, "v_cache": 4}, q=q, k_cache=k, v_cache=v)
    check.check_heads(q, k, v, -2, key="k_cache")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v_cache must have k_cache's pages {tuple(k.shape[:2])}, got {tuple(v.shape[:2])}")
    batch = _batch_of(lengths.cu_seqlens_q, q) if packed else q.shape[0]
    table, used = lengths.block_table, lengths.seqused_k
    if packed:
        check.check_integers("cu_seqlens_q", lengths.cu_seqlens_q, (batch + 1,), q)
    if table is not None:
        if not isinstance(table, torch.Tensor) or table.dim() != 2:
            raise ValueError("block_table must be an int32 tensor of shape (batch, pages per sequence)")
        check.check_integers("block_table", table, (batch, table.shape[1]), q)
        check.check_count("k_cache page size", k.shape[1], 1)
    elif k.shape[0] != batch:
        raise ValueError(f"k_cache must have batch size {batch} where no block_table is given, got {k.shape[0]}")
    if used is not None:
        check.check_integers("cache_seqlens", used, (batch,), q)
    elif table is not None:
        raise ValueError("cache_seqlens must be given with a block_table")
    heads, rows = q.shape[-2], q.shape[0 if packed else 1]
    if packed:
        rows = rows if max_seqlen_q is None else check.check_count("max_seqlen_q", max_seqlen_q, 0)
    addressing = Addressing(
        "packed" if packed else "dense",
        "paged" if table is not None else "dense",
        k.shape[1] if table is not None else 0,
        key_lengths=used is not None,
        pack_group=heads != k.shape[2] and rows <= FEW_QUERIES,
    )
    spec = options.spec(q, v, batch, heads, addressing)
    if packed:
        return _packed_request(spec, q, k, v, lengths, batch, rows, keys_packed=False)

    def arrange(tensors: Tensors) -> list[torch.Tensor]:
        return [*(unit_last(x) for x in tensors[:3]), *(x.contiguous() for x in tensors[3:])]

    return Request(
        spec,
        _names(spec, lengths),
        _with_numbers(arrange, spec, 3 + len(lengths.tensors()), batch),
        as_it_is,
        (*q.shape[:3], v.shape[3]),
        (batch, heads, rows),
        empty=q.numel() == 0 or k.numel() == 0 or (table is not None and table.numel() == 0),
    )


def readdressed(request: Request, spec: AttentionSpec) -> Request:
    """The request in the addressing of `spec`, which computes the same."""
    if spec.addressing.fold_heads == 1:
        return replace(request, spec=spec)

    def arrange(tensors: Tensors) -> list[torch.Tensor]:
        q, k, v, *rest = request.arrange(tensors)
        return [q, *(x.view(x.shape[0], -1, 1, x.shape[3]) for x in (k, v)), *rest]

    return replace(request, spec=spec, arrange=arrange)


def foldable(x: torch.Tensor) -> bool:
    """Do the heads of consecutive positions of a cache lie one after the other?"""
    return x.stride(-1) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2] * x.stride(2))


def _packed_request(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    batch: int,
    max_seqlen_q: int,
    keys_packed: bool,
) -> Request:
    def arrange(tensors: Tensors) -> list[torch.Tensor]:
        q, k, v = (unit_last(x) for x in tensors[:3])
        keys = [k.unsqueeze(0), v.unsqueeze(0)] if keys_packed else [k, v]
        return [q.unsqueeze(0), *keys, *(x.contiguous() for x in tensors[3:])]

    return Request(
        spec,
        _names(spec, lengths),
        _with_numbers(arrange, spec, 3 + len(lengths.tensors()), batch),
        lambda x: x.unsqueeze(0),
        (q.shape[0], q.shape[1], v.shape[-1]),
        (q.shape[1], q.shape[0]),
        empty=q.numel() == 0 or k.numel() == 0 or batch == 0 or max_seqlen_q == 0,
        sizes={"batch": batch, "max_seqlen_q": max_seqlen_q},
    )


def _batch_of(cu_seqlens_q: Any, q: torch.Tensor) -> int:
    if not isinstance(cu_seqlens_q, torch.Tensor):
        raise TypeError(f"cu_seqlens_q must be a torch.Tensor of int32, got {type(cu_seqlens_q).__name__}")
    if cu_seqlens_q.dim() != 1 or len(cu_seqlens_q) == 0:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {tuple(cu_seqlens_q.shape)}")
    return len(cu_seqlens_q) - 1


def _names(spec: AttentionSpec, lengths: Lengths) -> tuple[str, ...]:
    """The input tensors of a request, in the order of the program's."""
    given = (name for name, x in lengths.named().items() if x is not None)
    numbers = (("alibi_slopes",) if spec.alibi else ()) + (("sink",) if spec.sink else ())
    return ("q", "k", "v", *given, *numbers)


def _with_numbers(
    arrange: Callable[[Tensors], list[torch.Tensor]], spec: AttentionSpec, count: int, batch: int
) -> Callable[[Tensors], list[torch.Tensor]]:
    """`arrange` for the first `count` tensors, then slopes as (batch, heads) and the sink, both float32."""
    if not (spec.alibi or spec.sink):
        return arrange

    def both(tensors: Tensors) -> list[torch.Tensor]:
        numbers = [x.float().contiguous() for x in tensors[count:]]
        if spec.alibi:
            numbers[0] = numbers[0].expand(batch, numbers[0].shape[-1]).contiguous()
        return [*arrange(tensors[:count]), *numbers]

    return both
