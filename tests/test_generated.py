"""Random calls against the oracle: every option combined with every other, with NaN wherever nothing should be read."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fa_multi
from tests.generator import Call, draw, make, verdicts

ENTRY = {"dense": fa_multi.attention, "varlen": fa_multi.attention_varlen, "paged": fa_multi.attention_paged}


def run(call: Call, device: str) -> None:
    inputs = make(call)
    out, lse = ENTRY[call.kind](*inputs.arguments, device=device, return_lse=True, **inputs.keywords)
    for verdict in verdicts(call, inputs, out.cpu(), lse.cpu()):
        assert verdict.ok, f"{call}: {verdict}"
    if call.kind == "varlen":
        end = int(inputs.keywords["cu_seqlens_q"][-1])
        assert bool((out[end:] == 0).all())
        assert bool((lse[:, end:] == -math.inf).all())


@given(st.integers(0, 1 << 60))
@settings(max_examples=2000, deadline=None)
def test_cpu(seed: int) -> None:
    run(draw(Random(seed)), "cpu")


@pytest.mark.sim
@pytest.mark.parametrize("kernel", range(8))
def test_npu_sim(kernel: int) -> None:
    for seed in range(4):
        run(draw(Random(seed), Random(kernel), longest=40), "npu-sim")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", range(50))
def test_gpu(kernel: int) -> None:
    for seed in range(40):
        run(draw(Random(1000 * kernel + seed), Random(kernel), longest=300), "cuda")
