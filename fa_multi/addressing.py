"""Where queries, keys and results lie: a spec's tensors, and the task scalars and accesses that reach into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .scalars import Const, Element, Scalar, Var, ceildiv, maximum, minimum
from .spec import AttentionSpec
from .tiles import Access, Tensor

BATCH, HEADS_Q, HEADS_K = map(Var, ("batch", "heads_q", "heads_k"))
SPLITS, SPLIT_TILES = Var("splits"), Var("split_tiles")  # tasks that share the keys, and the fewest tiles of one
SEQLEN_Q, SEQLEN_K = Var("seqlen_q"), Var("seqlen_k")  # of dense tensors
MAX_SEQLEN_Q, TOTAL_Q, TOTAL_K = Var("max_seqlen_q"), Var("total_q"), Var("total_k")  # of packed tensors
PAGES, TABLE_WIDTH = Var("pages"), Var("table_width")

B, H, BLOCK, SPLIT = Var("b"), Var("h"), Var("i"), Var("split")
ROW0, ROWS, GROUP, HEAD_K = Var("row0"), Var("rows"), Var("group"), Var("head_k")

Lets = tuple[tuple[Var, Scalar], ...]


@dataclass(frozen=True)
class Layout:
    """The geometry of one spec. len_q, len_k: lengths of the task's batch entry. group: heads that share a tile's rows,
    or None. axes, lets, ragged: as in `Program`, without the key tiles."""

    spec: AttentionSpec
    block_m: int
    axes: Lets
    lets: Lets
    len_q: Scalar
    len_k: Scalar
    group: Scalar | None
    ragged: tuple[Var, Scalar] | None

    def rows(self, tensor: Tensor) -> Access:
        """The task's block of query rows, in q, out or lse."""
        packed = self.spec.addressing.queries == "packed"
        where: dict[str, Any] = {"begin": Var("begin_q")} if packed else {}
        head = H if self.group is None else H * GROUP
        split = SPLIT if "split" in tensor.dims else None
        return Access(tensor, Const(0) if packed else B, head, ROW0, ROWS, group=self.group, split=split, **where)

    def keys(self, tensor: Tensor, row0: Scalar, rows: Scalar) -> Access:
        """Positions [row0, row0 + rows) of k or v."""
        a = self.spec.addressing
        if a.fold_heads > 1:
            row0, rows = row0 * a.fold_heads, rows * a.fold_heads
        if a.keys == "paged":
            return Access(tensor, B, HEAD_K, row0, rows, table=BLOCK_TABLE, page_size=a.page_size * a.fold_heads)
        if a.keys == "packed":
            return Access(tensor, Const(0), HEAD_K, row0, rows, begin=Var("begin_k"))
        return Access(tensor, B, HEAD_K, row0, rows)


def _vector(name: str, length: Scalar) -> Tensor:
    return Tensor(name, ("entry",), (length,), "int32")


CU_SEQLENS_Q, CU_SEQLENS_K = _vector("cu_seqlens_q", BATCH + 1), _vector("cu_seqlens_k", BATCH + 1)
SEQUSED_K = _vector("seqused_k", BATCH)
BLOCK_TABLE = Tensor("block_table", ("batch", "entry"), (BATCH, TABLE_WIDTH), "int32")
ALIBI_SLOPES = Tensor("alibi_slopes", ("batch", "head"), (BATCH, HEADS_Q), "float32")
SINK = Tensor("sink", ("head",), (HEADS_Q,), "float32")


def layout(spec: AttentionSpec, block_m: int) -> Layout:
    """The geometry of `spec` for blocks of `block_m` rows."""
    a = spec.addressing
    lets: list[tuple[Var, Scalar]] = [(GROUP, HEADS_Q // HEADS_K)]
    len_q: Scalar = SEQLEN_Q
    extent: Scalar = SEQLEN_Q
    if a.queries == "packed":
        lets += [(Var("begin_q"), Element("cu_seqlens_q", (B,)))]
        len_q, extent = Var("len_q"), MAX_SEQLEN_Q
        lets += [(Var("len_q"), Element("cu_seqlens_q", (B + 1,)) - Var("begin_q"))]
    len_k, key_lets = _key_length(spec)
    lets += key_lets
    group = GROUP if a.pack_group else None
    count = len_q if group is None else len_q * GROUP
    lets += [(ROW0, BLOCK * block_m), (ROWS, minimum(count - ROW0, block_m))]
    lets += [(HEAD_K, H if a.pack_group else H // GROUP)]
    heads = HEADS_K if a.pack_group else HEADS_Q
    blocks = extent if group is None else extent * (HEADS_Q // HEADS_K)
    axes = [(B, BATCH), (H, heads), (BLOCK, ceildiv(blocks, block_m))]
    axes += [(SPLIT, SPLITS)] if spec.split else []
    ragged = (BLOCK, ceildiv(count, block_m)) if a.queries == "packed" else None
    return Layout(spec, block_m, tuple(axes), tuple(lets), len_q, len_k, group, ragged)


def _key_length(spec: AttentionSpec) -> tuple[Scalar, list[tuple[Var, Scalar]]]:
    """Keys of the task's batch entry. A length from a tensor never reaches past what is there."""
    a = spec.addressing
    there: Scalar = SEQLEN_K if a.fold_heads == 1 else SEQLEN_K // a.fold_heads
    lets: list[tuple[Var, Scalar]] = []
    if a.keys == "packed":
        lets = [(Var("begin_k"), Element("cu_seqlens_k", (B,)))]
        there = Element("cu_seqlens_k", (B + 1,)) - Var("begin_k")
    elif a.keys == "paged":
        there = TABLE_WIDTH * a.page_size
    if a.key_lengths:
        there = maximum(minimum(Element("seqused_k", (B,)), there), 0)
    if isinstance(there, Var):
        return there, lets
    return Var("len_k"), [*lets, (Var("len_k"), there)]


def tensors(spec: AttentionSpec) -> dict[str, Tensor]:
    """Every tensor of the spec by name, in argument order: q, k, v, lengths and tables, slopes, sink, out, lse.

    q, out: (batch, seq, head, dim), packed ones with batch 1. k, v: the same, or pages (page, slot, head, dim); folded
    heads lie along seq or slot.
    lse: (batch, head, seq). Partial results of a split are fp32, with a leading axis "split".
    """
    a, d, dv = spec.addressing, Const(spec.head_dim), Const(spec.head_dim_v)
    seq = ("batch", "seq", "head", "dim")
    batch_q, len_q = (Const(1), TOTAL_Q) if a.queries == "packed" else (BATCH, SEQLEN_Q)
    keys: tuple[Scalar, ...]
    if a.keys == "paged":
        key_dims, keys = ("page", "slot", "head", "dim"), (PAGES, Const(a.page_size * a.fold_heads), HEADS_K)
    elif a.keys == "packed":
        key_dims, keys = seq, (Const(1), TOTAL_K, HEADS_K)
    else:
        key_dims, keys = seq, (BATCH, SEQLEN_K, HEADS_K)
    out_dims: tuple[str, ...]
    lse_dims: tuple[str, ...]
    out_shape: tuple[Scalar, ...]
    lse_shape: tuple[Scalar, ...]
    out_dims, out_shape = seq, (batch_q, len_q, HEADS_Q, dv)
    lse_dims, lse_shape = ("batch", "head", "seq"), (batch_q, HEADS_Q, len_q)
    if spec.split:
        out_dims, out_shape = ("split", *seq), (SPLITS, *out_shape)
        lse_dims, lse_shape = ("split", *lse_dims), (SPLITS, *lse_shape)
    used = [
        Tensor("q", seq, (batch_q, len_q, HEADS_Q, d), spec.dtype),
        Tensor("k", key_dims, (*keys, d), spec.dtype),
        Tensor("v", key_dims, (*keys, dv), spec.dtype),
        *([CU_SEQLENS_Q] if a.queries == "packed" else []),
        *([CU_SEQLENS_K] if a.keys == "packed" else []),
        *([SEQUSED_K] if a.key_lengths else []),
        *([BLOCK_TABLE] if a.keys == "paged" else []),
        *([ALIBI_SLOPES] if spec.alibi else []),
        *([SINK] if spec.sink and not spec.split else []),
        Tensor("out", out_dims, out_shape, "float32" if spec.split else spec.dtype, output=True),
        *([Tensor("lse", lse_dims, lse_shape, "float32", output=True)] if spec.return_lse or spec.split else []),
    ]
    return {t.name: t for t in used}
