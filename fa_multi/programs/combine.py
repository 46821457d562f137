"""Joining partial results, each normalized and with its log-sum-exp, into one: the second half of split-KV attention,
and `merge_states`. The weights are exp(lse), online, so any number of parts is joined in one pass."""

from __future__ import annotations

from dataclasses import dataclass

from ..addressing import BATCH, HEADS_Q, SINK, SPLITS, B, H
from ..plan import Plan
from ..scalars import Const, Scalar, Var, ceildiv, minimum
from ..tiles import (
    Access,
    Cast,
    HeadValue,
    Load,
    Loop,
    Map,
    Number,
    Op,
    Phase,
    Program,
    Read,
    Store,
    Tensor,
    Tile,
    exp,
    larger,
    log,
    smaller,
)
from .forward import LOWEST_MAX, SMALLEST_SUM

SEQLEN = Var("seqlen_q")
BLOCK, PART, ROW0, ROWS = Var("i"), Var("j"), Var("row0"), Var("rows")


@dataclass(frozen=True)
class CombineSpec:
    """out = sum of exp(lse_j - lse) * partial_j, lse = log of the sum of exp(lse_j), over parts j.

    dtype: of out. head_dim: columns. sink: add one more logit per head to the denominator. return_lse: write lse.
    few_rows: there are few queries, and so many parts that reading them one after the other is what takes time.
    """

    dtype: str
    head_dim: int
    sink: bool = False
    return_lse: bool = True
    few_rows: bool = False

    def name(self) -> str:
        """Short identifier, used for kernels and files."""
        flags = [name for name in ("sink", "few_rows") if getattr(self, name)] + (["lse"] if self.return_lse else [])
        return "_".join(["combine", self.dtype, f"d{self.head_dim}", *flags])


def combine_tensors(spec: CombineSpec) -> dict[str, Tensor]:
    """partial (split, batch, seq, head, dim) and partial_lse (split, batch, head, seq), float32; sink; out; lse."""
    seq = ("batch", "seq", "head", "dim")
    shape: tuple[Scalar, ...] = (BATCH, SEQLEN, HEADS_Q, Const(spec.head_dim))
    used = [
        Tensor("partial", ("split", *seq), (SPLITS, *shape), "float32"),
        Tensor("partial_lse", ("split", "batch", "head", "seq"), (SPLITS, BATCH, HEADS_Q, SEQLEN), "float32"),
        *([SINK] if spec.sink else []),
        Tensor("out", seq, shape, spec.dtype, output=True),
        *(
            [Tensor("lse", ("batch", "head", "seq"), (BATCH, HEADS_Q, SEQLEN), "float32", output=True)]
            if spec.return_lse
            else []
        ),
    ]
    return {t.name: t for t in used}


def combine(spec: CombineSpec, plan: Plan) -> Program:
    """The program of `spec` for blocks of plan.block_m rows."""
    rows, args = plan.block_m, combine_tensors(spec)

    def here(name: str, split: Scalar | None = None) -> Access:
        return Access(args[name], B, H, ROW0, ROWS, split=split)

    part, acc = Tile("part", (rows, plan.head_dim_v), "float32"), Tile("acc", (rows, plan.head_dim_v), "float32")
    lse_j, m, m_prev, alpha, weight, total, lse = (
        Tile(name, (rows,), "float32") for name in ("lse_j", "m", "m_prev", "alpha", "weight", "l", "lse")
    )
    body = (
        Load(lse_j, here("partial_lse", PART)),
        Load(part, here("partial", PART)),
        Map(m_prev, Read(m)),
        Map(m, larger(m, smaller(lse_j, -LOWEST_MAX))),
        Map(alpha, exp(Read(m_prev) - m)),
        Map(weight, exp(smaller(lse_j, -LOWEST_MAX) - m)),
        Map(total, Read(total) * alpha + weight),
        Map(acc, Read(acc) * alpha + Read(part) * weight),
    )
    ops: list[Op] = [
        Map(m, Number(LOWEST_MAX)),
        Map(total, Number(0.0)),
        Map(acc, Number(0.0)),
        Loop(PART, SPLITS, body, (Phase(SPLITS, masked=False),)),
    ]
    if spec.sink:
        sink = HeadValue(SINK, (H,))
        ops += [
            Map(m_prev, Read(m)),
            Map(m, larger(m, smaller(sink, -LOWEST_MAX))),
            Map(alpha, exp(Read(m_prev) - m)),
            Map(total, Read(total) * alpha + exp(smaller(sink, -LOWEST_MAX) - m)),
            Map(acc, Read(acc) * alpha),
        ]
    ops += [Map(acc, Read(acc) / larger(total, SMALLEST_SUM))]
    out = acc if spec.dtype == "float32" else Tile("out", acc.shape, spec.dtype)
    ops += [] if out == acc else [Cast(out, acc)]
    ops += [Store(here("out"), out)]
    if spec.return_lse:
        value = Read(m) + log(total)
        ops += [Map(lse, larger(value, HeadValue(SINK, (H,))) if spec.sink else value), Store(here("lse"), lse)]
    axes = ((B, BATCH), (H, HEADS_Q), (BLOCK, ceildiv(SEQLEN, rows)))
    lets = ((ROW0, BLOCK * rows), (ROWS, minimum(SEQLEN - ROW0, rows)))
    return Program(spec.name(), axes, tuple(args.values()), lets, tuple(ops))
