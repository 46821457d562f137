"""Tile sizes and overlap for A2 and A3, chosen so that everything fits on chip."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from fa_multi.check import SignalLimits, check
from fa_multi.plan import Plan
from fa_multi.programs import CombineSpec, Spec, build
from fa_multi.roles import Roles, cut
from fa_multi.spec import AttentionSpec
from fa_multi.tiles import Load, Mma, Op

from .. import Work
from .limits import CROSS_FLAGS, FRACTAL, L0_SLICE, MAX_ROWS, OUTSTANDING, LimitError
from .lowering import lower_roles

DTYPES = ("float16", "bfloat16")
MAX_HEAD_DIM = 256
CORES = {"a2": 24, "a3": 24, "sim": 4}  # AI cores that share the tasks; few in the simulator, so that each has several
BLOCK_N = 128
BLOCKS_M = (128, 64, 32)
GROUP_BLOCKS_M = (64, 32)  # few rows, that are the heads of a group: larger tiles would be mostly empty
SPLIT_TILES = 4  # fewer key tiles than this are not worth a task of their own
SKEW = 2  # tiles that the cube runs ahead: what hides the softmax of one tile behind the products of the others
DEPTH = 4


def role_of(op: Op) -> str:
    """Products and what feeds them run on the cube, the rest on the two vector cores."""
    return "cube" if isinstance(op, (Load, Mma)) else "vector"


def vector_only(op: Op) -> str:
    """For programs without products."""
    return "vector"


def padded(head_dim: int) -> int:
    """Columns on chip: whole fragments, and above 128 whole slices of the product's inner loop."""
    unit = FRACTAL if head_dim <= L0_SLICE else L0_SLICE
    return -(-head_dim // unit) * unit


def refusal(spec: Spec) -> str | None:
    """None, or in one line why there is no kernel for the spec."""
    if isinstance(spec, AttentionSpec) and spec.dtype not in DTYPES:
        return f"q must be float16 or bfloat16 on npu, got {spec.dtype}: {spec.dtype} runs on the cpu lane"
    widest = max(spec.head_dim, spec.head_dim_v) if isinstance(spec, AttentionSpec) else spec.head_dim
    if widest > MAX_HEAD_DIM:
        return f"head dim {widest} is above {MAX_HEAD_DIM}, the most that the npu kernel holds"
    if isinstance(spec, AttentionSpec) and spec.mask.block_causal > MAX_ROWS:
        return f"block_causal = {spec.mask.block_causal} is above {MAX_ROWS}, what the npu kernel counts to"
    try:
        planned(spec, "a2")
    except LimitError as e:
        return f"there is no npu kernel: {e}"
    return None


def choose_splits(spec: AttentionSpec, arch: str, work: Work) -> int:
    """As many splits as give every core a task, if each has keys enough."""
    tasks = max(1, work.tasks(spec, planned(spec, arch).plan.block_m))
    return max(1, min(CORES[arch] // tasks, -(-work.keys // BLOCK_N) // SPLIT_TILES))


@functools.lru_cache(maxsize=256)
def planned(spec: Spec, arch: str) -> Roles:
    """The roles of `spec` in the largest tiles that fit. Raises LimitError with the reason when none do."""
    if arch not in CORES:
        raise LimitError(f"unknown architecture {arch!r}; known: {', '.join(CORES)}")
    spec = _without_idle_window(spec)
    problem: LimitError | None = None
    for plan in _candidates(spec, CORES[arch]):
        roles = cut(build(spec, plan), plan, vector_only if isinstance(spec, CombineSpec) else role_of, "global")
        try:
            lower_roles(roles, "pto")
        except LimitError as e:
            problem = e
            continue
        check(roles, SignalLimits(CROSS_FLAGS, OUTSTANDING))
        return roles
    assert problem is not None
    raise problem


def _without_idle_window(spec: Spec) -> Spec:
    """A side of the window that no sequence can reach is no limit, and need not fit the kernel's 32 bits."""
    if not isinstance(spec, AttentionSpec):
        return spec
    left, right = (None if side is None or side > MAX_ROWS else side for side in spec.mask.window)
    return replace(spec, mask=replace(spec.mask, window=(left, right)))


def _candidates(spec: Spec, cores: int) -> Iterator[Plan]:
    """Plans, the best first."""
    if isinstance(spec, CombineSpec):
        for block_m in BLOCKS_M:
            yield Plan(block_m, FRACTAL, padded(spec.head_dim), padded(spec.head_dim), cores=cores)
        return
    depth = MappingProxyType({"s": DEPTH, "p": DEPTH, "o": DEPTH})
    for block_m in GROUP_BLOCKS_M if spec.addressing.pack_group else BLOCKS_M:
        yield Plan(
            block_m, BLOCK_N, padded(spec.head_dim), padded(spec.head_dim_v), skew=SKEW, cores=cores, depth=depth
        )
