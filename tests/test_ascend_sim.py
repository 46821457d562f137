"""Emitted kernels in the simulator, where the matrix does not reach: overlaps, late cores, junk around tensors."""

from __future__ import annotations

import functools

import pytest
import torch
from fa_multi.backends.ascend import compiler, planner
from fa_multi.backends.ascend.emit import emit
from fa_multi.backends.ascend.runtime import Call, ring_shapes
from fa_multi.backends.ascend.simulator import SimKernel, SimulationError, load

from fa_multi import reference
from fa_multi.masks import Mask
from fa_multi.plan import Plan
from fa_multi.programs import build
from fa_multi.roles import Roles, cut
from fa_multi.spec import AttentionSpec

pytestmark = pytest.mark.sim
DIM = 32
SPEC = AttentionSpec("float16", DIM, DIM, DIM**-0.5, Mask(causal=True), return_lse=True)
OVERLAPS = {"serial": (0, 1, 1), "ahead": (2, 4, 1), "far": (3, 8, 2)}  # skew, depth, signal interval


@functools.cache
def kernel(overlap: str, target: str = "pto", mutate: tuple[str, str] | None = None) -> tuple[Roles, SimKernel]:
    skew, depth, interval = OVERLAPS[overlap]
    plan = Plan(64, 128, DIM, DIM, dict.fromkeys("spo", depth), skew=skew, signal_interval=interval, cores=2)
    roles = cut(build(SPEC, plan), plan, planner.role_of, "global")
    text = emit(roles, target)
    if mutate:
        assert mutate[0] in text
        text = text.replace(*mutate, 1)
    return roles, load(compiler.lower(text, name=overlap), overlap)


def poisoned(*shape: int) -> torch.Tensor:
    """A tensor in the middle of NaN: spare rows behind each sequence, spare columns behind each row."""
    batch, seq, heads, dim = shape
    around = torch.full((batch, seq + 130, heads, dim + 5), float("nan"), dtype=torch.float16)
    return around[:, :seq, :, :dim]


def run(overlap: str, sizes: tuple[int, int, int, int, int], timeout: float = 10.0, **kwargs: object) -> None:
    batch, seq_q, seq_k, heads_q, heads_k = sizes
    options = {k: kwargs.pop(k) for k in ("target", "mutate") if k in kwargs}
    roles, compiled = kernel(overlap, **options)
    q = poisoned(batch, seq_q, heads_q, DIM)
    k, v = (poisoned(batch, seq_k, heads_k, DIM) for _ in range(2))
    for t in (q, k, v):
        t.normal_()
    out, lse = poisoned(batch, seq_q, heads_q, DIM), torch.full((batch, heads_q, seq_q), float("nan"))
    rings = [torch.full(shape, float("nan"), dtype=dtype) for shape, dtype in ring_shapes(roles)]
    call = Call(roles, (q, k, v, out, lse), {})
    compiled.run(roles.plan.cores, *call.arguments(compiled.params, rings), timeout=timeout, **kwargs)
    call.finish()
    want, want_lse = reference.attention(q, k, v, causal=True, softmax_scale=SPEC.softmax_scale)
    torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    around = out._base.clone()
    around[:, :seq_q, :, :DIM] = float("nan")
    assert around.isnan().all(), "the kernel wrote outside the output"


SIZES = [(2, 129, 200, 2, 1), (1, 300, 17, 1, 1), (1, 1, 1100, 3, 1)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_overlaps(overlap: str, sizes: tuple[int, int, int, int, int]) -> None:
    run(overlap, sizes)


@pytest.mark.parametrize("delay", [(0, 200), (200, 0)])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_one_side_is_late(overlap: str, delay: tuple[int, int]) -> None:
    run(overlap, (1, 65, 1100, 3, 1), delay_us=delay)


def test_ascendc_text_means_the_same() -> None:
    run("ahead", SIZES[0], target="ascendc")


def test_both_targets_lower() -> None:
    plan = planner.planned(SPEC, "sim")
    assert "CrossCoreWaitFlag" in compiler.lower(emit(plan, "ascendc"), target="ascendc")


def test_a_planted_missing_signal_deadlocks() -> None:
    with pytest.raises(SimulationError, match="timed out waiting for cross flag 0"):
        run("ahead", SIZES[0], mutate=('T.set_cross_flag("FIX", 0)', "pass"), timeout=1.0)


def test_a_planted_wrong_scale_shows() -> None:
    with pytest.raises(AssertionError):
        run(
            "ahead", SIZES[0], mutate=(f"T.tile.mul(s_ub, s_ub, {SPEC.softmax_scale!r})", "T.tile.mul(s_ub, s_ub, 0.2)")
        )
