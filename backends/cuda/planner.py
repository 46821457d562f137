"""Tile sizes and overlap, measured on an H200 for the role form (docs/architecture.md), chosen to fit for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from fa_multi.plan import Plan
from fa_multi.programs import CombineSpec, Spec
from fa_multi.spec import AttentionSpec
from fa_multi.tiles import Load, Op

from .limits import SHARED_BYTES, SHARED_RESERVE
from .transfers import box_rows

DTYPES = ("float16", "bfloat16")
MAX_HEAD_DIM = 256
PADDED = (32, 64, 96, 128, 192, 256)  # columns on chip: whole swizzle atoms of 32 or 64 elements
MULTIPROCESSORS = 132  # of an H100 or H200; others are near enough for a number of splits
MAX_SPLITS = 128
TASK_KEYS, COMBINE_KEYS = 192, 256  # time of a task's start and end, and of a combination, as keys read meanwhile
COMBINE_ROWS = 4  # a row per warp: there are few rows to combine, and all of them should be under way at once
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
    """One warp or two load what TMA can copy; the warpgroups compute."""
    if not (isinstance(op, Load) and box_rows(op.src, op.dst)):
        return "compute"
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
        return few_rows_plan(d, dv)
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


def few_rows_plan(d: int, dv: int) -> CudaPlan:
    """The plan for few queries, as in decode: the loads are all that matters, so as many bytes as fit are under way."""
    stages = 8 if max(d, dv) <= 64 else 4 if max(d, dv) <= 128 else 3
    return replace(_hopper(d, dv, 64, 64, groups=1, ping_pong=False, stages=stages), read_once=True, loaders=2)


def _hopper(
    d: int, dv: int, m: int, n: int, *, groups: int, ping_pong: bool = True, stages: int = 2, queries: int = 2,
    late_rescale: bool = True, pin: bool = False,
) -> CudaPlan:  # fmt: skip
    # Ring positions run on over tasks, so a depth that is no power of two would cost a division in every trip.
    depth: Mapping[str, int] = MappingProxyType({"q": queries, "k": stages, "v": stages})
    return CudaPlan(m, n, d, dv, depth, 1, 1, groups, ping_pong, PERSISTENT, late_rescale, pin)


def choose_splits(plan: Plan, rows: int, keys: int) -> int:
    """The number of splits that takes the least time, in keys read: tasks run in waves over the multiprocessors, each
    costs its share of the key tiles and a start, and results that are split must be combined."""
    tasks, tiles = max(1, rows // plan.block_m), -(-keys // plan.block_n)

    def cost(splits: int) -> int:
        waves = -(-tasks * splits // MULTIPROCESSORS)
        return waves * (-(-tiles // splits) * plan.block_n + TASK_KEYS) + (COMBINE_KEYS if splits > 1 else 0)

    return min(range(1, max(2, min(tiles, MAX_SPLITS) + 1)), key=cost)


def portable_plan(spec: Spec, arch: str) -> Plan:
    """The plan of the portable form: the widest key tile that fits, with 64 rows for the four warps of a block."""
    if isinstance(spec, CombineSpec):
        return Plan(COMBINE_ROWS, 1, padded(spec.head_dim), padded(spec.head_dim))
    d, dv = padded(spec.head_dim), padded(spec.head_dim_v)
    for n in (64, 32, 16):
        fits = 2 * (64 * max(d, dv) + n * (d + dv)) + SHARED_RESERVE <= SHARED_BYTES[arch]
        if fits and (n <= 32 or max(d, dv) <= 128):  # registers: scores and accumulator of 16 rows per warp
            break
    return Plan(64, n, d, dv)
