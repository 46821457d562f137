"""Attention forward as one tile program: online softmax over key tiles (Dao et al., FlashAttention-2, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from ..masks import Interval
from ..plan import Plan
from ..scalars import Const, Scalar, Var, ceildiv, minimum
from ..spec import AttentionSpec
from ..tiles import (
    Access,
    Cast,
    Load,
    Loop,
    Map,
    MaskTile,
    Mma,
    Number,
    Op,
    Phase,
    Program,
    Read,
    RowReduce,
    Store,
    Tensor,
    Tile,
    exp,
    larger,
    log,
)

# The running maximum starts finite, so that no row ever computes inf - inf: a masked score is -inf and its exp is 0
# whatever the maximum. Scores below this are out of range (products of bf16 values near 1e15).
LOWEST_MAX = -(2.0**100)
# A row that saw a key has a sum of at least 1 (its maximum contributes exp(0)); one that saw none has 0, and 0 / this
# is 0. A NaN is not hidden: it is in the accumulator too.
SMALLEST_SUM = 2.0**-100

BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_K = map(Var, ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k"))
B, H, BLOCK, J = Var("b"), Var("h"), Var("i"), Var("j")


def forward(spec: AttentionSpec, plan: Plan) -> Program:
    """The program of `spec`, in the tiles of `plan`. Tensors: q, k, v, out, and lse if the spec asks for it."""
    m, n = plan.block_m, plan.block_n
    row0, rows, group, hk = Var("row0"), Var("rows"), Var("group"), Var("head_k")
    visible = spec.mask.interval(SEQLEN_Q, SEQLEN_K)
    lo, hi, full_lo, full_hi = Var("tile_lo"), Var("tile_hi"), Var("full_lo"), Var("full_hi")
    lets = (
        (row0, BLOCK * m),
        (rows, minimum(SEQLEN_Q - row0, m)),
        (group, HEADS_Q // HEADS_K),
        (hk, H // group),
        *visible.tile_lets(row0, rows, n),
    )
    trips = hi - lo if visible.lower else hi
    phases = [Phase(hi - full_hi, masked=True)]
    if visible.lower:
        phases += [Phase(hi - full_lo, masked=False), Phase(trips, masked=True)]
    else:
        phases += [Phase(trips, masked=False)]

    q_t, k_t, v_t, out_t, lse_t = tensors(spec)
    state, body = softmax_loop_body(spec, plan, k_t, v_t, MaskArgs(visible, row0, (hi - 1 - J) * n), hk)
    m_i, l_i, acc = state
    q = Tile("q", (m, plan.head_dim), spec.dtype)
    here = {"batch": B, "head": H, "row0": row0, "rows": rows}
    ops: list[Op] = [
        Load(q, Access(q_t, **here)),
        Map(m_i, Number(LOWEST_MAX)),
        Map(l_i, Number(0.0)),
        Map(acc, Number(0.0)),
        Loop(J, trips, body, tuple(phases)),
    ]
    out = Tile("out", acc.shape, spec.dtype)
    ops += [Map(acc, Read(acc) / larger(l_i, SMALLEST_SUM)), Cast(out, acc), Store(Access(out_t, **here), out)]
    if spec.return_lse:
        lse = Tile("lse", (m,), "float32")
        ops += [Map(lse, Read(m_i) * spec.softmax_scale + log(l_i)), Store(Access(lse_t, **here), lse)]
    used = (q_t, k_t, v_t, out_t) + ((lse_t,) if spec.return_lse else ())
    axes = ((B, BATCH), (H, HEADS_Q), (BLOCK, ceildiv(SEQLEN_Q, m)))
    return Program(spec.name(), axes, used, lets, tuple(ops))


def tensors(spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, out with axes (batch, seq, head, dim) and lse (batch, head, seq)."""
    dims = ("batch", "seq", "head", "dim")
    d, dv = Const(spec.head_dim), Const(spec.head_dim_v)
    return (
        Tensor("q", dims, (BATCH, SEQLEN_Q, HEADS_Q, d), spec.dtype),
        Tensor("k", dims, (BATCH, SEQLEN_K, HEADS_K, d), spec.dtype),
        Tensor("v", dims, (BATCH, SEQLEN_K, HEADS_K, dv), spec.dtype),
        Tensor("out", dims, (BATCH, SEQLEN_Q, HEADS_Q, dv), spec.dtype, output=True),
        Tensor("lse", ("batch", "head", "seq"), (BATCH, HEADS_Q, SEQLEN_Q), "float32", output=True),
    )


@dataclass(frozen=True)
class MaskArgs:
    """Where a tile of scores stands: the visible interval, its first row and its first column."""

    interval: Interval
    row0: Scalar
    col0: Scalar


def softmax_loop_body(
    spec: AttentionSpec, plan: Plan, k_t: Tensor, v_t: Tensor, mask: MaskArgs, head_k: Scalar
) -> tuple[tuple[Tile, Tile, Tile], tuple[Op, ...]]:
    """One key tile: scores, running maximum and sum, probabilities, output. Returns ((m, l, acc), ops)."""
    m, n, scale = plan.block_m, plan.block_n, spec.softmax_scale
    q, k = Tile("q", (m, plan.head_dim), spec.dtype), Tile("k", (n, plan.head_dim), spec.dtype)
    v, p = Tile("v", (n, plan.head_dim_v), spec.dtype), Tile("p", (m, n), spec.dtype)
    s, acc = Tile("s", (m, n), "float32"), Tile("acc", (m, plan.head_dim_v), "float32")
    m_i, m_prev, alpha, row_sum, l_i = (Tile(x, (m,), "float32") for x in ("m", "m_prev", "alpha", "row_sum", "l"))
    keys = {"batch": B, "head": head_k, "row0": mask.col0, "rows": minimum(SEQLEN_K - mask.col0, n)}
    body = (
        Load(k, Access(k_t, **keys)),
        Mma(s, q, k, transpose_b=True),
        MaskTile(s, mask.interval, mask.row0, mask.col0),
        Map(m_prev, Read(m_i)),
        RowReduce(m_i, s, "max", accumulate=True),
        Map(alpha, exp((Read(m_prev) - m_i) * scale)),
        Map(s, exp((Read(s) - m_i) * scale)),
        RowReduce(row_sum, s, "sum"),
        Map(l_i, Read(l_i) * alpha + row_sum),
        Cast(p, s),
        Map(acc, Read(acc) * alpha),
        Load(v, Access(v_t, **keys)),
        Mma(acc, p, v, accumulate=True),
    )
    return (m_i, l_i, acc), body
