"""Random calls against the oracle: every option combined with every other, with NaN wherever nothing should be read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from fa_multi.backends import Work
from fa_multi.backends.cpu import CpuBackend
from fa_multi.backends.cuda import planner
from hypothesis import given, settings
from hypothesis import strategies as st

import fa_multi
from fa_multi import calls
from fa_multi.spec import AttentionSpec
from tests.calls import paged
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


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Lets the CPU lane run the program in which all key heads share a tile, which the CUDA lane chooses, wherever that
    is possible; the list says of each new call whether it was."""
    chosen: list[bool] = []

    def divide(self: CpuBackend, spec: AttentionSpec, work: Work, splits: int, arch: str | None = None) -> Any:
        better = planner.folded(spec, work)
        chosen.append(better is not None)
        return better or spec, splits or 1

    monkeypatch.setattr(CpuBackend, "divide", divide)
    calls._calls.clear()  # prepared without folding
    yield chosen
    calls._calls.clear()


def test_folded_heads(folded: list[bool]) -> None:
    for seed in range(120):
        run(draw(Random(seed), kinds=("paged",)), "cpu")
    assert sum(folded) > 20


def test_heads_are_folded_where_they_lie_side_by_side_alone(folded: list[bool]) -> None:
    q, k, v, keywords = paged(size=4)
    want = fa_multi.attention_paged(q, k, v, **keywords)
    caches = {
        "keys and values in turn": torch.stack([k, v], 2).unbind(2),
        "keys and values of a head in turn": torch.stack([k, v], 3).unbind(3),
        "heads first": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)],
        "room behind a head": [torch.nn.functional.pad(x, (0, 8))[..., : x.shape[-1]] for x in (k, v)],
    }
    for k, v in caches.values():
        torch.testing.assert_close(fa_multi.attention_paged(q, k, v, **keywords), want)
    assert folded == [True, False, True, False, True]
    q, k, v, keywords = paged(size=1)
    want = fa_multi.attention_paged(q, k, v, **keywords)
    alone = [x.as_strided(x.shape, (x.stride(0), 8, *x.stride()[2:])) for x in (k, v)]  # an unused stride
    torch.testing.assert_close(fa_multi.attention_paged(q, *alone, **keywords), want)
    assert folded[5:] == [True, True]


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
