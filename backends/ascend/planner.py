"""Tile sizes and overlap for A2 and A3, chosen so that everything fits on chip."""

from __future__ import annotations

import functools
from types import MappingProxyType

from fa_multi.check import SignalLimits, check
from fa_multi.plan import Plan
from fa_multi.programs import Spec, build
from fa_multi.roles import Roles, cut
from fa_multi.spec import Addressing, AttentionSpec
from fa_multi.tiles import Load, Mma, Op

from .limits import CROSS_FLAGS, FRACTAL, L0_SLICE, OUTSTANDING, LimitError
from .lowering import lower_roles

DTYPES = ("float16", "bfloat16")
MAX_HEAD_DIM = 256
CORES = {"a2": 24, "a3": 24, "sim": 4}  # AI cores that share the tasks; few in the simulator, so that each has several
BLOCK_N = 128
BLOCKS_M = (128, 64, 32)
SKEW = 2  # tiles that the cube runs ahead: what hides the softmax of one tile behind the products of the others
DEPTH = 4


def role_of(op: Op) -> str:
    """Products and what feeds them run on the cube, the rest on the two vector cores."""
    return "cube" if isinstance(op, (Load, Mma)) else "vector"


def padded(head_dim: int) -> int:
    """Columns on chip: whole fragments, and above 128 whole slices of the product's inner loop."""
    unit = FRACTAL if head_dim <= L0_SLICE else L0_SLICE
    return -(-head_dim // unit) * unit


def refusal(spec: Spec) -> str | None:
    """None, or in one line why there is no kernel for the spec."""
    if not isinstance(spec, AttentionSpec):
        return "joining partial results is not there yet on npu"
    if spec.dtype not in DTYPES:
        return f"q must be float16 or bfloat16 on npu, got {spec.dtype}: {spec.dtype} runs on the cpu lane"
    missing = _missing(spec)
    if missing:
        return f"{missing} not there yet on npu"
    widest = max(spec.head_dim, spec.head_dim_v)
    if widest > MAX_HEAD_DIM:
        return f"head dim {widest} is above {MAX_HEAD_DIM}, the most that the npu kernel holds"
    try:
        planned(spec, "a2")
    except LimitError as e:
        return f"there is no npu kernel: {e}"
    return None


def _missing(spec: AttentionSpec) -> str | None:
    """What the spec asks for that this backend cannot lower yet."""
    wanted = {
        "window_size is": spec.mask.window != (None, None),
        "block_causal is": spec.mask.block_causal > 0,
        "softcap is": spec.softcap > 0,
        "alibi_slopes are": spec.alibi,
        "sink is": spec.sink,
        "splitting the keys is": spec.split,
        "packed or paged tensors are": spec.addressing != Addressing(),
    }
    return next((name for name, asked in wanted.items() if asked), None)


@functools.lru_cache(maxsize=256)
def planned(spec: AttentionSpec, arch: str) -> Roles:
    """The roles of `spec` in the largest tiles that fit. Raises LimitError with the reason when none do."""
    if arch not in CORES:
        raise LimitError(f"unknown architecture {arch!r}; known: {', '.join(CORES)}")
    problem: LimitError | None = None
    for block_m in BLOCKS_M:
        plan = Plan(
            block_m,
            BLOCK_N,
            padded(spec.head_dim),
            padded(spec.head_dim_v),
            skew=SKEW,
            cores=CORES[arch],
            depth=MappingProxyType({"s": DEPTH, "p": DEPTH, "o": DEPTH}),
        )
        roles = cut(build(spec, plan), plan, role_of, "global")
        try:
            lower_roles(roles, "pto")
        except LimitError as e:
            problem = e
            continue
        check(roles, SignalLimits(CROSS_FLAGS, OUTSTANDING))
        return roles
    assert problem is not None
    raise problem
