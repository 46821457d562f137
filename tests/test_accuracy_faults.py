"""Faults of the kinds that kernels really have, planted in the CPU lane: the comparison must fail and name them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from fa_multi.backends import cpu
from fa_multi.backends.cpu import interpreter

from fa_multi.accuracy.capture import outputs
from fa_multi.accuracy.compare import CaseReport, compare_results
from fa_multi.accuracy.problem import Problem
from fa_multi.cases import Case
from fa_multi.masks import Interval
from fa_multi.scalars import Var
from fa_multi.tiles import Cast, Load, Loop, Map, MaskTile, Mma, Op, Program, Read, Tile

Rewrite = Callable[[Op], Iterable[Op]]


def rewritten(ops: Iterable[Op], rewrite: Rewrite) -> tuple[Op, ...]:
    result: list[Op] = []
    for op in ops:
        if isinstance(op, Loop):
            op = dataclasses.replace(op, body=rewritten(op.body, rewrite))
        result += rewrite(op)
    return tuple(result)


def each_op(rewrite: Rewrite) -> Callable[[Program], Program]:
    return lambda program: dataclasses.replace(program, body=rewritten(program.body, rewrite))


def moved_mask(upper: int = 0, lower: int = 0) -> Callable[[Program], Program]:
    """The ends of the mask (not of the keys) moved by some keys."""

    def move(bounds, by):
        return tuple(dataclasses.replace(b, offset=b.offset + by) if b.slope else b for b in bounds)

    def rewrite(op: Op) -> Iterable[Op]:
        if isinstance(op, MaskTile):
            moved = Interval(move(op.interval.lower, lower), move(op.interval.upper, upper))
            op = dataclasses.replace(op, interval=moved)
        return [op]

    return each_op(rewrite)


def without_rescale(op: Op) -> Iterable[Op]:
    dropped = isinstance(op, Map) and op.dst.name == "acc" and {t.name for t in op.reads} == {"acc", "alpha"}
    return [] if dropped else [op]


def base_2_lse(op: Op) -> Iterable[Op]:
    if isinstance(op, Map) and op.dst.name == "lse":
        op = Map(op.dst, op.value * math.log2(math.e))
    return [op]


def interleaved_heads(op: Op) -> Iterable[Op]:
    """Key head h % heads_k instead of h // group."""
    if isinstance(op, Load) and op.src.tensor.name in ("k", "v"):
        h, n = Var("h"), Var("heads_k")
        op = dataclasses.replace(op, src=dataclasses.replace(op.src, head=h - h // n * n))
    return [op]


def rounded_partials(op: Op) -> Iterable[Op]:
    """The sum over tiles rounded to bf16 after every tile, as when partial results are added up in a bf16 buffer."""
    if isinstance(op, Mma) and op.accumulate:
        rounded = Tile("rounded", op.dst.shape, "bfloat16")
        return [op, Cast(rounded, op.dst), Map(op.dst, Read(rounded) * 1.0)]
    return [op]


def without_last_tile(program: Program) -> Program:
    lets = tuple((v, value - 1 if v.name == "tile_hi" else value) for v, value in program.lets)
    return dataclasses.replace(program, lets=lets)


def unchanged(program: Program) -> Program:
    return program


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, torch.Tensor]]:
    """run(problem, transform): out, lse and mass of the CPU lane executing the transformed program in 64-key tiles."""
    monkeypatch.setattr(cpu, "BLOCK_M", 64)
    monkeypatch.setattr(cpu, "BLOCK_N", 64)

    def run(problem: Problem, transform: Callable[[Program], Program] = unchanged) -> dict[str, torch.Tensor]:
        execute = interpreter.execute
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "execute", lambda program, *rest: execute(transform(program), *rest))
            return outputs(problem, "cpu", mass=True)

    return run


def problem(name: str = "fault", **fields: object) -> Problem:
    return Problem.of(Case(name, **{"seqlen_q": 200, "seqlen_k": 200, **fields}), seed=0)


def failing(report: CaseReport) -> str:
    assert report.verdict == "fail", report.line()
    assert report.findings, report.line()
    return " | ".join(report.findings)


HEALTHY = {
    "causal": {"causal": True},
    "gqa": {"heads_q": 8, "heads_k": 2},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32", "causal": True},
    "rising": {"values": "rising"},
    "empty_rows": {"causal": True, "seqlen_q": 200, "seqlen_k": 90},
}


@pytest.mark.parametrize("fields", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_kernel_passes_without_findings(planted, fields) -> None:
    p = problem(**fields)
    report = compare_results(p, planted(p), planted(p))
    assert (report.verdict, report.findings) == ("pass", [])
    assert report.edges["a"].upper.found == []


def test_rounding_is_not_taken_for_a_key(planted) -> None:
    """One row of many keys: what one key weighs is below what rounding does, so no change of it is beyond doubt."""
    p = problem(seqlen_q=1, seqlen_k=5000, heads_q=1, heads_k=1, softmax_scale=0.4)
    report = compare_results(p, planted(p))
    assert max(map(abs, report.edges["a"].upper.change)) > 0.3
    assert report.edges["a"].upper.found == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_hidden_key_let_in(planted, dtype) -> None:
    p = problem(causal=True, dtype=dtype)
    report = compare_results(p, planted(p, moved_mask(upper=1)), planted(p))
    found = failing(report)
    assert "the first hidden key (distance 1) is let in" in found
    assert "distance 0" not in found
    assert report.edges["a"].upper.found == [(1, 1)]
    assert report.edges["b"].upper.found == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_last_visible_key_left_out(planted, dtype) -> None:
    p = problem(causal=True, dtype=dtype)
    found = failing(compare_results(p, planted(p, moved_mask(upper=-1)), planted(p)))
    assert "the last visible key (distance 0) is left out" in found
    assert "distance 1)" not in found


def test_a_missing_rescale(planted) -> None:
    p = problem(values="rising", seqlen_k=500)
    found = failing(compare_results(p, planted(p, each_op(without_rescale)), planted(p)))
    assert "softmax mass is wrong" in found
    assert "a rescale of the accumulator is missing" in found


def test_sums_of_probabilities_in_fp16(planted, monkeypatch: pytest.MonkeyPatch) -> None:
    def mma(task: interpreter._Task, op: Mma) -> None:
        if not op.accumulate:
            return interpreter._Task.mma(task, op)
        a, b = task.tiles[op.a].half(), task.tiles[op.b].half()
        acc = task.tiles[op.dst].half()
        for i in range(a.shape[-1]):
            acc = acc + a[..., i : i + 1] * b[:, i : i + 1]
        task.tiles[op.dst] = acc.float()

    p = problem(dtype="fp16", seqlen_q=64, seqlen_k=3000, values="positive_v", heads_q=1, heads_k=1)
    clean = planted(p)
    monkeypatch.setitem(interpreter._OPS, Mma, mma)
    report = compare_results(p, planted(p), clean)
    found = failing(report)
    assert "too few bits" in found
    low = [o for o in report.tensors["out"].outcomes if o.rule == "low_precision"]
    assert [(o.side, o.ok) for o in low] == [("a", False), ("b", True)]


def test_lse_in_base_2(planted) -> None:
    p = problem(causal=True)
    report = compare_results(p, planted(p, each_op(base_2_lse)), planted(p))
    assert "LSE is in base 2" in failing(report)
    assert report.tensors["out"].verdict == "pass"
    assert report.tensors["lse"].verdict == "fail"


def test_swapped_key_heads(planted) -> None:
    p = problem(heads_q=8, heads_k=2)
    found = failing(compare_results(p, planted(p, each_op(interleaved_heads)), planted(p)))
    assert "query head 1 was computed with key head 1 instead of 0" in found


def test_swapped_output_heads(planted) -> None:
    p = problem(heads_q=4, heads_k=2)
    a = planted(p)
    a["out"] = a["out"][:, :, [0, 2, 1, 3]].contiguous()
    found = failing(compare_results(p, a, planted(p)))
    assert "query head 1 holds the result of query head 2" in found
    assert "query head 0" not in found


def test_a_dropped_last_tile(planted) -> None:
    p = problem(seqlen_k=500)
    found = failing(compare_results(p, planted(p, without_last_tile), planted(p)))
    assert "keys 448 to 499 are left out" in found


def test_partial_sums_rounded_to_bf16(planted) -> None:
    """The naive bf16 computation is worse than this, so only the comparison with B can tell; the report says so."""
    p = problem(seqlen_k=2000)
    report = compare_results(p, planted(p, each_op(rounded_partials)), planted(p))
    assert "too few bits" in failing(report)
    assert report.tensors["out"].ratios["rmse"] > 1.5
    assert "rules disagree: A is no worse than the naive computation, but worse than B" in report.line()


def test_partial_sums_rounded_to_bf16_in_fp32(planted) -> None:
    p = problem(seqlen_k=2000, dtype="fp32")
    report = compare_results(p, planted(p, each_op(rounded_partials)))
    assert "too few bits" in failing(report) or "as rounding is" in failing(report)


def test_one_wrong_element_among_ten_million() -> None:
    case = Case("needle", seqlen_q=39063, seqlen_k=16, heads_q=4, heads_k=4, head_dim=64)
    p = Problem.of(case, seed=0)
    assert p.tensors["q"].numel() > 10**7
    a = outputs(p, "cpu", mass=False)
    b = {n: t.clone() for n, t in a.items()}
    right = float(a["out"][0, 31234, 2, 17])
    a["out"][0, 31234, 2, 17] += 0.25
    report = compare_results(p, a, b)
    found = failing(report)
    assert "one element of out is wrong by itself" in found
    assert "batch 0, head 2, query 31234, dim 17" in found
    worst = report.tensors["out"].worst[0]
    assert worst["at"] == {"batch": 0, "head": 2, "query": 31234, "dim": 17}
    assert worst["b"] == right
    assert worst["a"] == float(a["out"][0, 31234, 2, 17])
    assert abs(worst["golden"] - right) < 0.01
    assert report.tensors["out"].ab.equal == 1 - 1 / a["out"].numel()


def test_a_nan_where_golden_has_none(planted) -> None:
    p = problem(causal=True, seqlen_q=100, seqlen_k=60)
    a = planted(p)
    a["out"][0, :40] = math.nan
    report = compare_results(p, a, planted(p))
    assert "in rows that see no key" in failing(report)
    assert report.tensors["out"].a.nan == report.tensors["out"].a.special_differ == 40 * 2 * 64
