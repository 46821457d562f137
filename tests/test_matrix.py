"""The matrix on every lane, against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch

import fa_multi
from fa_multi.accuracy.problem import Problem
from tests.matrix import CASES, DTYPES, Case, verdicts

LANES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("npu-sim", id="npu-sim", marks=pytest.mark.sim),
    pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
    pytest.param("npu", id="npu", marks=pytest.mark.npu),
]


SLOW_TO_COMPILE = ("npu-sim",)  # ten seconds a kernel, and return_lse makes another one
TUNED = ("cuda",)  # return_lse may pick other tiles, so out may be rounded differently


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_case(case: Case, lane: str) -> None:
    problem = Problem.of(case, 0)
    q, k, v = case.inputs()
    options = problem.arguments()
    reason = fa_multi.supports(q, k, v, device=lane, return_lse=True, **options)
    if reason is not None:
        assert reason == EXPECTED_REFUSALS[lane](case), f"{lane} refuses {case.name}: {reason}"
        with pytest.raises((ValueError, TypeError)):
            problem.call(lane, return_lse=True)
        return
    assert EXPECTED_REFUSALS[lane](case) is None, f"{lane} should refuse {case.name}"
    out, lse = problem.call(lane, return_lse=True)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert out.dtype == DTYPES[case.dtype]
    assert out.is_contiguous()
    for name, verdict in zip(("out", "lse"), verdicts(case, out, lse)):
        assert verdict.ok, f"{name}: {verdict}"
    if lane not in SLOW_TO_COMPILE or case.name in ("causal", "d32"):
        alone = problem.call(lane, return_lse=False)
        if lane in TUNED:
            assert verdicts(case, alone, lse)[0].ok
        else:
            assert torch.equal(out, alone), "out depends on return_lse"


def _cuda_refusal(case: Case) -> str | None:
    return (
        "q must be float16 or bfloat16 on cuda, got float32: float32 runs on the cpu lane"
        if case.dtype == "fp32"
        else None
    )


def _ascend_refusal(case: Case) -> str | None:
    return (
        "q must be float16 or bfloat16 on npu, got float32: float32 runs on the cpu lane"
        if case.dtype == "fp32"
        else None
    )


EXPECTED_REFUSALS = {
    "cpu": lambda case: None,
    "cuda": _cuda_refusal,
    "npu-sim": _ascend_refusal,
    "npu": _ascend_refusal,
}


def test_matrix_names_are_unique() -> None:
    assert len({c.name for c in CASES}) == len(CASES)
