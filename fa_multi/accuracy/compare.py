"""Comparing: results of one attention call against the fp64 golden result and against each other.

Pure functions over tensors. `compare_results` takes tensors in memory, `compare_captures` two captures; both go through
`compare_sources`, which reads and measures a few heads at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cases import Case
from ..philox import fingerprint
from . import standards
from .capture import outputs, run_problem
from .diagnose import explain
from .metrics import AXES, Measures, Place, Tally
from .problem import Problem
from .standards import Outcome, Thresholds
from .store import Capture

TENSORS = ("out", "lse", "mass")
MAX_BLOCKS = 64  # columns of the heat map

# source(tensor name, batch entry, query heads) -> that part of a result, (heads, rows, cols); LSE and mass: cols = 1
Source = Callable[[str, int, slice], torch.Tensor]


@dataclass
class TensorReport:
    """One tensor of a case: "out", "lse" or "mass".

    a, b: each against golden (against nothing, so None, without it). naive: the input-dtype computation against golden.
    ab: A against B. worst: largest errors, each {"side", "at", "a", "b", "golden"}. ratios: A's measures over B's.
    outcomes: what every rule says; `verdict` follows from those that decide. disagreement: one line where the dual
    standard and the low-precision rule differ on A. by_head, by_query_block, heat (heads x query blocks): RMS error,
    per side; block: query rows of a block.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    a: Measures | None = None
    b: Measures | None = None
    naive: Measures | None = None
    ab: Measures | None = None
    worst: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    verdict: str = "pass"
    disagreement: str | None = None
    block: int = 0
    by_head: dict[str, list[float]] = field(default_factory=dict)
    by_query_block: dict[str, list[float]] = field(default_factory=dict)
    heat: dict[str, list[list[float]]] = field(default_factory=dict)

    def main(self) -> Measures:
        """The measures that stand for the tensor: A against golden, else A against B."""
        chosen = self.a or self.ab
        assert chosen is not None
        return chosen

    def to_dict(self) -> dict[str, Any]:
        data = dict(vars(self))
        for name in ("a", "b", "naive", "ab"):
            data[name] = data[name] and data[name].to_dict()
        main = self.main()
        summary = {n: getattr(main, n) for n in ("max_abs", "rel_l2", "cosine", "rmse", "ulp")}
        return {**summary, **data, "outcomes": [o.to_dict() for o in self.outcomes], "shape": list(self.shape)}


@dataclass
class CaseReport:
    """A case: verdict "pass", "fail", "skip" (a device has no kernel for it) or "error" (nothing to compare).

    reason: why not "pass", one line. findings: what the errors look like, in words, per side that fails.
    edges: per side, error by distance to the mask edge (`diagnose.EdgeProfile`). a, b: the captures' records.
    """

    name: str
    verdict: str
    reason: str = ""
    tensors: dict[str, TensorReport] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    edges: dict[str, Any] = field(default_factory=dict)
    a: Mapping[str, Any] = field(default_factory=dict)
    b: Mapping[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return self.verdict in ("pass", "skip")

    def line(self) -> str:
        """The verdict in one line."""
        notes = [t.disagreement for t in self.tensors.values() if t.disagreement]
        parts = [f"{self.verdict.upper():5} {self.name}"]
        if "out" in self.tensors:
            m = self.tensors["out"].main()
            parts.append(f"max abs {m.max_abs:.2e}, rel L2 {m.rel_l2:.2e}")
        return ": ".join(parts + ([self.reason] if self.reason else [])) + "".join(f" [{n}]" for n in notes)

    def details(self) -> list[str]:
        """For a case that failed: the largest error with its place and values, then the findings."""
        if self.verdict != "fail" or "out" not in self.tensors:
            return list(self.findings)
        lines = []
        for name, tensor in self.tensors.items():
            if tensor.verdict == "fail" and tensor.worst:
                w = tensor.worst[0]
                values = ", ".join(f"{side} {w[side]:.6g}" for side in ("a", "b", "golden") if w[side] is not None)
                where = ", ".join(f"{axis} {i}" for axis, i in w["at"].items())
                lines.append(
                    f"largest error of {name} at {where}: {values.replace('a ', 'A ', 1).replace('b ', 'B ', 1)}"
                )
        return lines + self.findings

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "reason": self.reason,
            "tensors": {n: t.to_dict() for n, t in self.tensors.items()},
            "findings": self.findings,
            "edges": {side: profile.to_dict() for side, profile in self.edges.items()},
            "a": dict(self.a),
            "b": None if self.b is None else dict(self.b),
        }


def source_of(problem: Problem, results: Mapping[str, Any]) -> Source:
    """A source over tensors, in memory or opened in a capture (`Capture.open`): only what is asked for is read."""

    def read(name: str, batch: int, heads: slice) -> torch.Tensor:
        return problem.part(name, results[name], batch, heads)

    return read


def compare_results(
    problem: Problem,
    a: Mapping[str, torch.Tensor],
    b: Mapping[str, torch.Tensor] | None = None,
    limits: Thresholds | None = None,
    golden: bool = True,
) -> CaseReport:
    """Compare results in memory.

    a, b : "out" (the problem's layout, any of its dtypes), "lse" (batch, heads, seqlen_q) float32 and, where both have
        it, "mass" (batch, heads, seqlen_q). Without b only the golden result is compared with.
    golden : compute the fp64 result on the CPU; without it A is compared with B alone.
    Raises ValueError where shapes or dtypes of A and B differ.
    """
    names = [n for n in TENSORS if n in a and (b is None or n in b)]
    dtypes = {n: a[n].dtype for n in names}
    for n in names if b is not None else ():
        assert b is not None
        if a[n].shape != b[n].shape or a[n].dtype != b[n].dtype:
            raise ValueError(f"{n} must be alike in a and b, got {_kind(a[n])} and {_kind(b[n])}")
    sources = {"a": source_of(problem, a)} | ({"b": source_of(problem, b)} if b is not None else {})
    return compare_sources(problem, sources, dtypes, limits or Thresholds(), golden)


def _kind(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def compare_sources(
    problem: Problem, sources: Mapping[str, Source], dtypes: Mapping[str, torch.dtype], limits: Thresholds, golden: bool
) -> CaseReport:
    """Compare one result ("a") or two ("a", "b") with golden and with each other. dtypes: of the tensors to compare."""
    tallies = _measure(problem, sources, dtypes, limits, golden)
    report = CaseReport(problem.name, "pass")
    for name, dtype in dtypes.items():
        report.tensors[name] = _report(name, dtype, tallies, sources, limits)
    for name, tensor in report.tensors.items():
        if tensor.verdict != "pass":
            first = next(o for o in tensor.outcomes if not o.ok and o.rule in limits.rules)
            report.verdict = "fail"
            report.reason = report.reason or f"{name} {_of(first.side)}: {first.text}"
    if golden:
        for side, source in sources.items():
            _explain(problem, side, source, dtypes, report, tallies)
    return report


def _of(side: str) -> str:
    return "A against B" if side == "ab" else f"of {side.upper()}"


Tallies = dict[tuple[str, str], Tally]


def _measure(
    problem: Problem, sources: Mapping[str, Source], dtypes: Mapping[str, torch.dtype], limits: Thresholds, golden: bool
) -> Tallies:
    batch, heads, _, rows = problem.sizes
    pairs = [*sources, "naive"] if golden else []
    pairs += ["ab"] if "b" in sources else []
    scale = {"out": problem.scale()}
    tallies = {
        (name, pair): Tally(batch, heads, rows, dtype, *limits.small(dtype, scale.get(name, 1.0)))
        for name, dtype in dtypes.items()
        for pair in pairs
    }
    for b, heads_q, heads_k in problem.pieces():
        wide = problem.golden(b, heads_q, heads_k) if golden else {}
        low = problem.golden(b, heads_q, heads_k, problem.tensors["q"].dtype) if golden else {}
        for name, dtype in dtypes.items():
            parts = {side: source(name, b, heads_q) for side, source in sources.items()}
            if not parts["a"].numel():
                continue
            for side, part in parts.items():
                if golden:
                    tallies[name, side].add(part, wide[name], b, heads_q.start)
            if golden:
                tallies[name, "naive"].add(low[name].to(dtype), wide[name], b, heads_q.start)
            if "b" in parts:
                tallies[name, "ab"].add(parts["a"], parts["b"].double(), b, heads_q.start)
    return tallies


def _report(
    name: str, dtype: torch.dtype, tallies: Tallies, sources: Mapping[str, Source], limits: Thresholds
) -> TensorReport:
    own = {pair: tally for (tensor, pair), tally in tallies.items() if tensor == name}
    measures = {pair: tally.result() for pair, tally in own.items()}
    shape = tuple(next(iter(own.values())).row_square.shape)
    report = TensorReport(name, str(dtype).removeprefix("torch."), shape)
    report.a, report.b, report.naive, report.ab = (measures.get(pair) for pair in ("a", "b", "naive", "ab"))
    step = torch.finfo(dtype).eps
    for side in sources:
        if side in own:
            report.outcomes += _judge(name, side, own, step, limits)
    if "ab" in own and "naive" in own:
        assert report.a is not None
        assert report.b is not None
        report.ratios, outcome = standards.dual(report.a, report.b, dtype, limits)
        report.outcomes.append(outcome)
        report.disagreement = _disagreement(report.outcomes)
    elif "ab" in own:
        assert report.ab is not None
        report.outcomes += [standards.special("ab", report.ab, "B"), standards.agree(report.ab, step, limits)]
    if any(not o.ok and o.rule in limits.rules for o in report.outcomes):
        report.verdict = "fail"
    for pair in own:
        if pair != "naive":
            report.worst += [
                _values(pair, p, name, sources) for p in measures[pair].worst[:3] if measures[pair].max_abs
            ]
            _maps(report, pair, own[pair], 1 if name != "out" else max(1, _columns(sources["a"])))
    return report


def _judge(name: str, side: str, own: Mapping[str, Tally], step: float, limits: Thresholds) -> list[Outcome]:
    m, naive = own[side].m, own["naive"].m
    outcomes = [standards.special(side, m, "golden"), standards.low_precision(side, m, naive, step, limits)]
    if name == "out":
        outcomes.append(standards.rows(side, own[side], own["naive"], step, limits))
    if name == "lse":
        outcomes.append(standards.nats(side, m, limits))
    return outcomes


def _disagreement(outcomes: list[Outcome]) -> str | None:
    low = next(o for o in outcomes if o.rule == "low_precision" and o.side == "a")
    dual = next(o for o in outcomes if o.rule == "dual")
    if low.ok == dual.ok:
        return None
    if low.ok:
        return f"rules disagree: A is no worse than the naive computation, but worse than B ({dual.text})"
    return f"rules disagree: A is worse than the naive computation, but no worse than B ({low.text})"


def _columns(source: Source) -> int:
    return int(source("out", 0, slice(0, 1)).shape[-1])


def _values(pair: str, place: Place, name: str, sources: Mapping[str, Source]) -> dict[str, Any]:
    """A place with the values that A, B and golden have there."""
    batch, head, row = (place.at[axis] for axis in AXES[:3])
    values: dict[str, Any] = {"side": pair, "at": place.at, "a": None, "b": None}
    values["golden"] = None if pair == "ab" else place.reference
    for side, source in sources.items():
        values[side] = float(source(name, batch, slice(head, head + 1))[0, row, place.at.get("dim", 0)])
    return values


def _maps(report: TensorReport, pair: str, tally: Tally, cols: int) -> None:
    batch, heads, rows = tally.row_square.shape
    report.block = max(16, -(-rows // MAX_BLOCKS // 16) * 16)
    padded = torch.nn.functional.pad(tally.row_square, (0, -rows % report.block))
    blocks = padded.view(batch, heads, -1, report.block).sum(-1).sum(0)
    sizes = torch.full((blocks.shape[1],), float(report.block), dtype=torch.float64)
    sizes[-1:] -= -rows % report.block
    sizes *= batch * cols
    report.heat[pair] = (blocks / sizes).sqrt().tolist()
    report.by_head[pair] = (blocks.sum(1) / sizes.sum()).sqrt().tolist()
    report.by_query_block[pair] = (blocks.sum(0) / (sizes * heads)).sqrt().tolist()


def _explain(
    problem: Problem,
    side: str,
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    report: CaseReport,
    tallies: Tallies,
) -> None:
    blamed = {"a": ("a", "ab"), "b": ("b",)}[side]  # a ratio A / B that is too large speaks against A
    failed = any(not o.ok for t in report.tensors.values() for o in t.outcomes if o.side in blamed)
    own = {name: tallies[name, side] for name in dtypes}
    naive = {name: tallies[name, "naive"] for name in dtypes}
    findings, profile = explain(problem, source, own, naive, failed)
    report.findings += [f"{side.upper()}: {text}" for text in findings]
    if profile is not None:
        report.edges[side] = profile


# ----------------------------------------------------------------------------------------------------- two captures


def compare_captures(
    a: Capture,
    b: Capture,
    limits: Thresholds | None = None,
    golden: bool = True,
    names: list[str] | None = None,
) -> Iterator[CaseReport]:
    """Compare the cases of two captures, one by one, in A's order and then what only B has.

    The inputs are drawn again (or read from the captures, for a user's own), and their hashes must be those of both
    captures: a difference makes the case an "error", as does a case that only one capture has.
    """
    known = list(dict.fromkeys([*a.header["cases"], *b.header["cases"]]))
    for name in known if names is None else names:
        yield _compare_case(a, b, name, limits or Thresholds(), golden)


def _compare_case(a: Capture, b: Capture, name: str, limits: Thresholds, golden: bool) -> CaseReport:
    missing = [side for side, capture in (("A", a), ("B", b)) if name not in capture.names()]
    records = [c.record(name) if name in c.names() else {} for c in (a, b)]
    failed = next(
        (f"{side} failed: {r['error']}" for side, r in zip("AB", records) if r.get("status") == "failed"), None
    )
    skipped = next(
        (f"{side}: {r['error']}" for side, r in zip("AB", records) if r.get("status") == "unsupported"), None
    )
    if missing or failed or skipped:
        why = f"{' and '.join(missing)} has no such case" if missing else failed or skipped or ""
        return CaseReport(name, "error" if missing else "fail" if failed else "skip", why, a=records[0], b=records[1])
    try:
        problem = _problem(a, name, records)
        kinds = [r["outputs"] for r in records]
        differ = next((n for n in TENSORS if n in kinds[0] and n in kinds[1] and kinds[0][n] != kinds[1][n]), None)
        if differ:
            raise ValueError(f"{differ} is {kinds[0][differ]} in A and {kinds[1][differ]} in B")
    except ValueError as error:
        return CaseReport(name, "error", str(error), a=records[0], b=records[1])
    dtypes = {n: getattr(torch, kinds[0][n]["dtype"]) for n in TENSORS if n in kinds[0] and n in kinds[1]}
    with a.open(name) as in_a, b.open(name) as in_b:
        sources = {"a": source_of(problem, in_a), "b": source_of(problem, in_b)}
        report = compare_sources(problem, sources, dtypes, limits, golden)
    report.a, report.b = records
    return report


def _problem(a: Capture, name: str, records: list[dict[str, Any]]) -> Problem:
    """The problem both captures ran; ValueError where they ran different ones."""
    first, second = records
    for what in ("case", "options", "seed"):
        if first.get(what) != second.get(what):
            raise ValueError(f"{what} differs: {first.get(what)} in A, {second.get(what)} in B")
    if first["case"] is not None:
        problem = Problem.of(Case.from_dict(first["case"]), first["seed"])
    else:
        tensors = {n.removeprefix("inputs."): t for n, t in a.tensors(name).items() if n.startswith("inputs.")}
        problem = Problem(name, tensors, dict(first["options"]))
    now = {n: r["sha256"] for n, r in problem.inputs_record().items()}
    for side, record in zip("AB", records):
        for tensor, digest in now.items():
            if record["inputs"].get(tensor, {}).get("sha256") != digest:
                raise ValueError(f"input {tensor} of {side} is not the one that is compared with: its hash differs")
    return problem


# --------------------------------------------------------------------------------------------------------- one case


def run_case(
    case: Case, device: str, *, seed: int = 0, repeat: int = 1, limits: Thresholds | None = None
) -> tuple[CaseReport, int]:
    """Run a case on a device and compare it with golden; also, run it `repeat` times in all.

    Returns (report, number of runs whose out or lse differs from the first in any bit). A case that the device has no
    kernel for gives the verdict "skip", one that fails to run "fail".
    """
    record, tensors = run_problem(case.name, functools.partial(Problem.of, case, seed), device, mass=True)
    if record["status"] != "ok":
        verdict = "skip" if record["status"] == "unsupported" else "fail"
        return CaseReport(case.name, verdict, record["error"], a=record), 0
    problem = Problem.of(case, seed)
    report = compare_results(problem, tensors, limits=limits)
    report.a = record
    first = {n: fingerprint(tensors[n]) for n in ("out", "lse")}
    again = (outputs(problem, device, mass=False) for _ in range(repeat - 1))
    return report, sum(any(fingerprint(x[n]) != first[n] for n in first) for x in again)
