"""Tile sizes and overlap, measured on an H200 for the role form (docs/architecture.md), chosen to fit for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from fa_multi.plan import Plan
from fa_multi.programs import CombineSpec, Spec
from fa_multi.spec import FEW_QUERIES, AttentionSpec
from fa_multi.tiles import Load, Op

from .. import Work
from .limits import SHARED_BYTES, SHARED_RESERVE
from .transfers import box_rows

GATHERER = "query loader"  # the role that loads query rows which no box holds
DTYPES = ("float16", "bfloat16")
MAX_HEAD_DIM = 256
PADDED = (32, 64, 96, 128, 192, 256)  # columns on chip: whole swizzle atoms of 32 or 64 elements
MULTIPROCESSORS = 132  # of an H100 or H200; others are near enough for a number of splits
MAX_SPLITS = 128
TILE_ROWS = 64  # of a tile of few queries; the products take no fewer
MAX_FOLD = 32  # a tile of keys is at least as wide
FEW_SEQUENCES = 8  # below that, folded heads make more than 16 parts
# Times, as rows of keys and values that a multiprocessor reads meanwhile: of a task's start and end, of a combination,
# and of each part that is combined.
TASK_KEYS, COMBINE_KEYS, PART_KEYS = 192, 256, 6
COMBINE_ROWS = 4  # a row per warp; where rows are few, all warps of a block take one
PERSISTENT = 132  # any number > 0: blocks share the tasks in a loop; how many blocks there are is a launch argument


@dataclass(frozen=True)
class CudaPlan(Plan):
    """late_rescale: rescale the accumulator at the end of a trip, once the product that read it is done, and not behind
    the next score product. pin: wait again, for a barrier already passed, between the softmax and the end of the output
    product, so that the compiler does not move that end in front of the softmax (it moves no code over a loop).
    read_once: no other task reads the keys, so they are the first to leave the L2. loaders: warps that load; with two,
    one takes the values: issuing many small copies takes time."""

    late_rescale: bool = True
    pin: bool = False
    read_once: bool = False
    loaders: int = 1

    __hash__ = Plan.__hash__

    def __str__(self) -> str:
        names = {"late rescale": self.late_rescale, "pinned": self.pin, "keys read once": self.read_once}
        loaders = [f"{self.loaders} loaders"] if self.loaders > 1 else []
        return ", ".join([super().__str__(), *(name for name, on in names.items() if on), *loaders])


def role_of(plan: CudaPlan, op: Op) -> str:
    """One warp or two load what TMA can copy, one gathers query rows that it cannot; the warpgroups compute."""
    if not isinstance(op, Load) or len(op.dst.shape) == 1:
        return "compute"
    if not box_rows(op.src, op.dst):
        return GATHERER
    return "value loader" if plan.loaders == 2 and op.src.tensor.name == "v" else "loader"


def refusal(spec: Spec) -> str | None:
    """None, or in one line why there is no kernel for the spec."""
    if isinstance(spec, AttentionSpec):
        if spec.dtype not in DTYPES:
            return f"q must be float16 or bfloat16 on cuda, got {spec.dtype}: {spec.dtype} runs on the cpu lane"
        for name, dim in (("q", spec.head_dim), ("v", spec.head_dim_v)):
            if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
                return f"{name} must have a head dim that is a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {dim}"
    return None


def padded(head_dim: int) -> int:
    """Columns on chip."""
    return next(p for p in PADDED if head_dim <= p)


def roles_plan(spec: AttentionSpec) -> CudaPlan:
    """The plan of the role form (Hopper)."""
    d, dv = padded(spec.head_dim), padded(spec.head_dim_v)
    if d != dv and (d % 64 or dv % 64):  # results leave through q's memory in panels of 64 columns
        d = dv = max(d, dv)
    if spec.addressing.pack_group:
        return few_rows_plan(d, dv, spec.addressing.fold_heads)
    bounded = bool(spec.mask.tags())  # fewer key tiles per query tile: more of them start and end
    if max(d, dv) <= 64:
        if bounded:
            return _hopper(d, dv, 128, 128, groups=2, ping_pong=False, late_rescale=False)
        return _hopper(d, dv, 192, 128, groups=3, ping_pong=False, stages=4)
    if max(d, dv) <= 128:
        return _hopper(d, dv, 128, 128, groups=2)
    if dv <= 128:
        return _hopper(d, dv, 128, 128 if d == 192 else 80, groups=2, queries=1)
    if d <= 192 and dv <= 192:
        return _hopper(d, dv, 128, 96, groups=2, queries=1)
    keys = 64 if bounded and spec.return_lse else 80  # 80 are faster, but with both a mask and an lse registers spill
    return _hopper(d, dv, 128, keys, groups=2, queries=1, late_rescale=False, pin=True)


def few_rows_plan(d: int, dv: int, fold_heads: int = 1) -> CudaPlan:
    """The plan for few queries, as in decode, where the loads are all that matters. The values of a tile are needed a
    trip later than its keys, so they have more slots; more than these are slower, most of all where pages are small
    (benchmarks/results/decode_tuning_h200.txt). The division that a depth of 3 costs does not show."""
    wide = fold_heads > 1 and max(d, dv) <= 128
    if max(d, dv) <= 64:
        slots = (3, 4) if wide else (8, 8)
    elif max(d, dv) <= 128:
        slots = (2, 2) if wide else (3, 4)
    else:
        slots = (2, 3)
    depth, keys = {"q": 2, "k": slots[0], "v": slots[1]}, 128 if wide else 64
    plan = _hopper(d, dv, TILE_ROWS, keys, groups=1, ping_pong=False)
    return replace(plan, depth=MappingProxyType(depth), read_once=True, loaders=2)


def _hopper(
    d: int, dv: int, m: int, n: int, *, groups: int, ping_pong: bool = True, stages: int = 2, queries: int = 2,
    late_rescale: bool = True, pin: bool = False,
) -> CudaPlan:  # fmt: skip
    # Ring positions run on over tasks, so a depth that is no power of two would cost a division in every trip.
    depth: Mapping[str, int] = MappingProxyType({"q": queries, "k": stages, "v": stages})
    return CudaPlan(m, n, d, dv, depth, 1, 1, groups, ping_pong, PERSISTENT, late_rescale, pin)


def grouped(spec: AttentionSpec, work: Work) -> AttentionSpec:
    """The spec for few queries, as if a single head were a group of heads, if the queries are few."""
    few = work.heads_q == work.heads_k and work.queries <= FEW_QUERIES
    return replace(spec, addressing=replace(spec.addressing, pack_group=True)) if few else spec


def folded(spec: AttentionSpec, work: Work) -> AttentionSpec | None:
    """The spec with all heads of a position in one tile, if they are as many as a tile takes."""
    heads = work.heads_k
    fits = work.queries * work.heads_q <= TILE_ROWS and MAX_FOLD % heads == 0
    if heads == 1 or not (work.foldable and fits):
        return None
    return replace(spec, addressing=replace(spec.addressing, pack_group=True, fold_heads=heads))


def prefers(folded: AttentionSpec, work: Work, boxes: bool) -> bool:
    """Is the folded form the faster one? `boxes`: has the other a role form too? Folding pays where it alone makes
    boxes of rows, with pages of a few positions; and where a row by itself is short, unless sequences are so few that
    each would be split into many parts."""
    return not boxes or (folded.head_dim <= 64 and work.batch >= FEW_SEQUENCES)


def choose_splits(spec: AttentionSpec, plan: Plan, work: Work) -> int:
    """The number of splits that takes the least time, in rows of keys and values read: tasks run in waves over the
    multiprocessors, each reads its share of the key tiles and has a start, and results that are split are combined."""
    tasks = work.tasks(spec, plan.block_m)
    tiles = -(-work.keys * spec.addressing.fold_heads // plan.block_n)

    def cost(splits: int) -> int:
        waves = -(-tasks * splits // MULTIPROCESSORS)
        combination = COMBINE_KEYS + PART_KEYS * splits if splits > 1 else 0
        return waves * (-(-tiles // splits) * plan.block_n + TASK_KEYS) + combination

    return min(range(1, max(2, min(tiles, MAX_SPLITS) + 1)), key=cost)


def even_blocks(units: int, most: int) -> int:
    """So many blocks, up to `most`, that each has as many units as another, if a few less than `most` do that: heads
    of a sequence, whose keys lie side by side, then stay together from turn to turn, and all end at once."""
    even = -(-units // -(-units // most))
    return even if even >= 0.95 * most else most


def portable_plan(spec: Spec, arch: str) -> Plan:
    """The plan of the portable form: the widest key tile that fits, with 64 rows for the four warps of a block."""
    if isinstance(spec, CombineSpec):
        return Plan(1 if spec.few_rows else COMBINE_ROWS, 1, padded(spec.head_dim), padded(spec.head_dim))
    d, dv, fold = padded(spec.head_dim), padded(spec.head_dim_v), spec.addressing.fold_heads
    for n in (64, 32, 16):
        if n % fold:
            continue
        fits = 2 * (64 * max(d, dv) + n * (d + dv)) + SHARED_RESERVE <= SHARED_BYTES[arch]
        if fits and (n <= 32 or max(d, dv) <= 128):  # registers: scores and accumulator of 16 rows per warp
            break
    return Plan(64, n, d, dv)
