"""Attention forward as one tile program: online softmax over key tiles (Dao et al., FlashAttention-2, algorithm 1)."""

from __future__ import annotations

import math

from ..addressing import (
    ALIBI_SLOPES,
    BATCH,
    GROUP,
    ROW0,
    ROWS,
    SINK,
    SPLIT,
    SPLIT_TILES,
    SPLITS,
    B,
    H,
    Layout,
    layout,
    tensors,
)
from ..masks import Interval
from ..plan import Plan
from ..scalars import Const, Element, Scalar, Var, ceildiv, maximum, minimum
from ..spec import AttentionSpec
from ..tiles import (
    Cast,
    Expr,
    Fill,
    HeadValue,
    KeyHead,
    Load,
    Loop,
    Map,
    MaskHeads,
    MaskTile,
    Mma,
    Number,
    Op,
    Phase,
    Position,
    Program,
    Read,
    RowReduce,
    Store,
    Tensor,
    Tile,
    absolute,
    exp,
    larger,
    log,
    smaller,
)

# The running maximum starts finite, so that no row ever computes inf - inf: a masked score is -inf and its exp is 0
# whatever the maximum. Scores below this are out of range (products of bf16 values near 1e15).
LOWEST_MAX = -(2.0**100)
# A row that saw a key has a sum of at least 1 (its maximum contributes exp(0)); one that saw none has 0, and 0 / this
# is 0. A NaN is not hidden: it is in the accumulator too.
SMALLEST_SUM = 2.0**-100

J = Var("j")
TILE_LO, TILE_HI, FULL_LO, FULL_HI = map(Var, ("tile_lo", "tile_hi", "full_lo", "full_hi"))


def forward(spec: AttentionSpec, plan: Plan) -> Program:
    """The program of `spec`, in the tiles of `plan`. Its tensors are those of `addressing.tensors`."""
    where, args = layout(spec, plan.block_m), tensors(spec)
    visible = spec.mask.interval(where.len_q, where.len_k)
    tile_lets = _tile_lets(where, visible, plan.block_n // spec.addressing.fold_heads)
    trips = TILE_HI - TILE_LO if visible.lower or spec.split else TILE_HI
    tiles = _Tiles(spec, plan)
    ops: list[Op] = [
        Load(tiles.q, where.rows(args["q"])),
        *([] if tiles.fold == 1 else [Map(tiles.head, KeyHead(ROW0, GROUP, tiles.fold))]),
        Map(tiles.m, Number(LOWEST_MAX)),
        Map(tiles.l, Number(0.0)),
        Map(tiles.acc, Number(0.0)),
        # from the last key tile to the first, so that what is past the keys is in the first trip
        Loop(J, trips, _loop_body(tiles, where, visible, args), _phases(bool(visible.lower), trips), True),
    ]
    if spec.sink and not spec.split:
        ops += _fold_sink(tiles, where)
    ops += [Map(tiles.acc, Read(tiles.acc) / larger(tiles.l, SMALLEST_SUM))]
    ops += [] if tiles.out == tiles.acc else [Cast(tiles.out, tiles.acc)]
    ops += [Store(where.rows(args["out"]), tiles.out)]
    if "lse" in args:
        ops += [Map(tiles.lse, _lse(tiles, where)), Store(where.rows(args["lse"]), tiles.lse)]
    fills = _fills(args) if spec.addressing.queries == "packed" else ()
    lets = (*where.lets, *tile_lets)
    return Program(spec.name(), where.axes, tuple(args.values()), lets, tuple(ops), fills, where.ragged)


def _fills(args: dict[str, Tensor]) -> tuple[Fill, ...]:
    """Rows past the last of the packed sequences see no key."""
    end = Element("cu_seqlens_q", (BATCH,))
    nothing = {"out": 0.0, "lse": -math.inf}
    return tuple(Fill(args[name], end, value) for name, value in nothing.items() if name in args)


class _Tiles:
    """The tiles of the program, and the unit of its scores: `scale` takes them to natural ones."""

    def __init__(self, spec: AttentionSpec, plan: Plan) -> None:
        m, n, d, dv = plan.block_m, plan.block_n, plan.head_dim, plan.head_dim_v
        self.spec, self.fold = spec, spec.addressing.fold_heads
        self.keys = n // self.fold  # positions of a key tile
        self.q, self.k = Tile("q", (m, d), spec.dtype), Tile("k", (n, d), spec.dtype)
        self.v, self.p = Tile("v", (n, dv), spec.dtype), Tile("p", (m, n), spec.dtype)
        self.s, self.acc = Tile("s", (m, n), "float32"), Tile("acc", (m, dv), "float32")
        self.out = self.acc if spec.split else Tile("out", (m, dv), spec.dtype)
        self.m, self.m_prev, self.alpha, self.row_sum, self.l, self.m_sink, self.lse, self.head = (
            Tile(name, (m,), "float32") for name in ("m", "m_prev", "alpha", "row_sum", "l", "m_sink", "lse", "head")
        )
        self.scale = 1.0 if spec.softcap or spec.alibi else spec.softmax_scale


def _tile_lets(where: Layout, visible: Interval, block_n: int) -> tuple[tuple[Var, Scalar], ...]:
    """The key tiles a task visits; with `split`, its share of them."""
    first: Scalar = ROW0
    last: Scalar = ROW0 + ROWS - 1
    if where.group is not None:
        first, last = first // GROUP, last // GROUP
    if not where.spec.split:
        return visible.tile_lets(first, last, block_n)
    lets = visible.tile_lets(first, last, block_n, prefix="all_")
    hi, full_hi = Var("all_tile_hi"), Var("all_full_hi")
    lo: Scalar = Var("all_tile_lo") if visible.lower else Const(0)
    share = Var("share")
    mine: list[tuple[Var, Scalar]] = [
        (share, maximum(ceildiv(hi - lo, SPLITS), SPLIT_TILES)),
        (TILE_LO, minimum(lo + SPLIT * share, hi)),
        (TILE_HI, minimum(TILE_LO + share, hi)),
    ]
    if visible.lower:
        mine.append((FULL_LO, minimum(maximum(Var("all_full_lo"), TILE_LO), TILE_HI)))
    mine.append((FULL_HI, maximum(minimum(full_hi, TILE_HI), FULL_LO if visible.lower else TILE_LO)))
    return (*lets, *mine)


def _phases(bounded_below: bool, trips: Scalar) -> tuple[Phase, ...]:
    """Tiles go from the last to the first: masked at the upper end, unmasked, masked at the lower end."""
    masked_first = Phase(TILE_HI - FULL_HI, masked=True)
    if not bounded_below:
        return (masked_first, Phase(trips, masked=False))
    return (masked_first, Phase(TILE_HI - FULL_LO, masked=False), Phase(trips, masked=True))


def _loop_body(t: _Tiles, where: Layout, visible: Interval, args: dict[str, Tensor]) -> tuple[Op, ...]:
    """One key tile: scores, running maximum and sum, probabilities, output."""
    col0 = (TILE_HI - 1 - J) * t.keys
    count = minimum(where.len_k - col0, t.keys)
    return (
        Load(t.k, where.keys(args["k"], col0, count)),
        Mma(t.s, t.q, t.k, transpose_b=True),
        *_score_ops(t, where, col0),
        *([] if t.fold == 1 else [MaskHeads(t.s, t.head, t.fold)]),
        MaskTile(t.s, visible, ROW0, col0, where.group, t.fold),
        Map(t.m_prev, Read(t.m)),
        RowReduce(t.m, t.s, "max", accumulate=True),
        Map(t.alpha, exp(_scaled(Read(t.m_prev) - t.m, t.scale))),
        Map(t.s, exp(_scaled(Read(t.s) - t.m, t.scale))),
        RowReduce(t.row_sum, t.s, "sum"),
        Map(t.l, Read(t.l) * t.alpha + t.row_sum),
        Cast(t.p, t.s),
        Map(t.acc, Read(t.acc) * t.alpha),
        Load(t.v, where.keys(args["v"], col0, count)),
        Mma(t.acc, t.p, t.v, accumulate=True),
    )


def _scaled(e: Expr, scale: float) -> Expr:
    return e if scale == 1.0 else e * scale


def _score_ops(t: _Tiles, where: Layout, col0: Scalar) -> list[Op]:
    """Soft cap, then ALiBi bias, in natural units: what changes a score before the mask."""
    spec = t.spec
    ops: list[Op] = []
    if spec.softcap:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates by itself and needs no function but exp
        doubled = exp(Read(t.s) * (2 * spec.softmax_scale / spec.softcap))
        ops.append(Map(t.s, Number(spec.softcap) - Number(2 * spec.softcap) / (doubled + 1.0)))
    if spec.alibi:
        past = where.len_k - where.len_q
        row = Position(0, past if where.group is not None else ROW0 + past, ROW0, where.group)
        head = H if where.group is None else H * GROUP
        slope = HeadValue(ALIBI_SLOPES, (B, head), ROW0, where.group)
        score = Read(t.s) if spec.softcap else Read(t.s) * spec.softmax_scale
        key = Position(1, col0) if t.fold == 1 else Position(1, col0, group=Const(t.fold))
        ops.append(Map(t.s, score - absolute(row - key) * slope))
    return ops


def _fold_sink(t: _Tiles, where: Layout) -> list[Op]:
    """One more logit in the denominator, folded in once and with the true maximum, so that neither a sink far above the
    scores nor one far below them loses anything. It is clipped for the exponent alone: +inf then leaves out = 0."""
    sink = _sink(where)
    return [
        Map(t.m_sink, larger(_scaled(Read(t.m), t.scale), smaller(sink, -LOWEST_MAX))),
        Map(t.alpha, exp(_scaled(Read(t.m), t.scale) - t.m_sink)),
        Map(t.l, Read(t.l) * t.alpha + exp(smaller(sink, -LOWEST_MAX) - t.m_sink)),
        Map(t.acc, Read(t.acc) * t.alpha),
    ]


def _sink(where: Layout) -> Expr:
    head = H if where.group is None else H * GROUP
    return HeadValue(SINK, (head,), ROW0, where.group)


def _lse(t: _Tiles, where: Layout) -> Expr:
    """Log-sum-exp in natural units; log(0) = -inf says that a row saw nothing."""
    if t.spec.sink and not t.spec.split:  # at least the sink, which also says +inf where that is what it was
        return larger(Read(t.m_sink) + log(t.l), _sink(where))
    return _scaled(Read(t.m), t.scale) + log(t.l)
