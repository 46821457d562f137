"""What is computed: everything about an attention call that does not change with its sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from .masks import Mask

FEW_QUERIES = 32  # up to so many per sequence, heads share a tile's rows; beyond, the tile is full enough


@dataclass(frozen=True)
class Addressing:
    """Where the queries and keys of a batch entry lie.

    queries: "dense" (batch, seq, heads, dim), or "packed" (total, heads, dim) with cu_seqlens_q.
    keys: "dense", "packed" with cu_seqlens_k, or "paged": (pages, page_size, heads, dim) with a block_table.
    key_lengths: lengths come from a tensor seqused_k (batch,), and keys beyond them are not looked at.
    pack_group: the query heads of one key head share a tile, rows running over heads first (for few queries).
    fold_heads: n > 1: the n key heads of a position share a key tile too, rows running over heads first, as they lie in
        memory, and each query head sees its own head's rows. The tensors k and v are then given with one head of n
        times as many rows, and pack_group holds.
    """

    queries: str = "dense"
    keys: str = "dense"
    page_size: int = 0
    key_lengths: bool = False
    pack_group: bool = False
    fold_heads: int = 1

    def tags(self) -> list[str]:
        """Words for names of kernels."""
        keys = f"paged_{self.page_size}" if self.keys == "paged" else f"{self.keys}_keys"
        return [
            *(["packed"] if self.queries == "packed" else []),
            *([keys] if self.keys != "dense" and (self.queries, self.keys) != ("packed", "packed") else []),
            *(["lengths"] if self.key_lengths else []),
            *(["group"] if self.pack_group else []),
            *([f"fold_{self.fold_heads}"] if self.fold_heads > 1 else []),
        ]


@dataclass(frozen=True)
class AttentionSpec:
    """Attention forward, out = softmax(scale * q k^T + mask) v, per head.

    dtype: "float16", "bfloat16" or "float32", of q, k, v and out; sums are fp32 (fp32 inputs too).
    head_dim, head_dim_v: columns of q and k, and of v and out.
    softmax_scale: multiplies the scores, > 0.
    mask: visible keys per query.
    return_lse: also write the log-sum-exp of the scaled scores (float32, natural log).
    softcap: if > 0, scores become softcap * tanh(score / softcap).
    alibi: scores get -slope * |p - j| added, slopes per batch entry and head from the tensor alibi_slopes (float32).
    sink: one more logit per query head, in the denominator only, from the tensor sink (float32).
    addressing: where q, k and v lie.
    split: the keys are divided among tasks, which write fp32 partial results for `programs/combine.py` to join.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    mask: Mask = field(default_factory=Mask)
    return_lse: bool = False
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    addressing: Addressing = field(default_factory=Addressing)
    split: bool = False

    def name(self) -> str:
        """Short identifier, used for kernels and files."""
        dims = f"d{self.head_dim}" + (f"_{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        flags = [name for name in ("alibi", "sink", "split") if getattr(self, name)]
        flags += ["softcap"] if self.softcap else []
        flags += ["lse"] if self.return_lse and not self.split else []
        return "_".join(["attention", self.dtype, dims, *self.mask.tags(), *self.addressing.tags(), *flags])
