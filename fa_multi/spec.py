"""What is computed: everything about an attention call that does not change with its sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from .masks import Mask


@dataclass(frozen=True)
class AttentionSpec:
    """Attention forward, out = softmax(scale * q k^T + mask) v, per head.

    dtype: "float16", "bfloat16" or "float32", of q, k, v and out; sums are fp32 (fp32 inputs too).
    head_dim, head_dim_v: columns of q and k, and of v and out.
    softmax_scale: multiplies the scores, > 0.
    mask: visible keys per query.
    return_lse: also write the log-sum-exp of the scaled scores (float32, natural log).
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    mask: Mask = field(default_factory=Mask)
    return_lse: bool = False

    def name(self) -> str:
        """Short identifier, used for kernels and files."""
        dims = f"d{self.head_dim}" + (f"_{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        return "_".join(["attention", self.dtype, dims, *self.mask.tags(), *(["lse"] if self.return_lse else [])])
