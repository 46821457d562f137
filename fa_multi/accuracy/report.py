"""Reports of a comparison: tables for a terminal, JSON for machines, and one self-contained HTML page with plots."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from rich.console import Console
from rich.table import Table

from .compare import CaseReport, TensorReport
from .metrics import Measures
from .standards import Thresholds
from .store import Capture

STYLES = {"pass": "green", "fail": "bold red", "skip": "dim", "error": "bold red"}
MEASURES = (
    ("max_abs", "max abs error"),
    ("rel_l2", "relative L2 error"),
    ("cosine", "cosine"),
    ("rmse", "RMSE"),
    ("bias", "bias (mean signed error)"),
    ("error_balance", "error balance"),
    ("max_rel", "max relative error"),
    ("mean_rel", "mean relative error"),
    ("small", "small elements"),
    ("small_wrong", "share of them wrong"),
    ("small_max_abs", "their max abs error"),
    ("equal", "share identical"),
    ("nan", "NaN"),
    ("pos_inf", "+Inf"),
    ("neg_inf", "-Inf"),
    ("special_differ", "NaN or Inf that differ"),
)


@dataclass
class Comparison:
    """Two captures and what comparing them gave. `golden`: whether golden results were computed."""

    a: Capture
    b: Capture
    limits: Thresholds
    golden: bool
    cases: list[CaseReport] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Cases by verdict, the ones that occur."""
        found = Counter(c.verdict for c in self.cases)
        return {v: found[v] for v in STYLES if found[v]}

    @property
    def verdict(self) -> str:
        """ "pass" if every case passed or was skipped, else "fail"."""
        return "pass" if all(c.ok for c in self.cases) else "fail"

    def device(self, side: str) -> str:
        """The device of side "a" or "b", in words."""
        record = next((r for c in self.cases if (r := getattr(c, side)) and r.get("environment")), None)
        name = (record or {}).get("environment", {}).get("device_name")
        lane = str(getattr(self, side).header["device"])
        return f"{lane} ({name})" if name else lane

    def to_dict(self) -> dict[str, Any]:
        """JSON values; numbers that are not finite are the strings "nan", "inf", "-inf"."""
        data = {
            "format": 1,
            "verdict": self.verdict,
            "counts": self.counts(),
            "golden": self.golden,
            "thresholds": self.limits.to_dict(),
            "a": {"path": self.a.path.name, "header": self.a.header},
            "b": {"path": self.b.path.name, "header": self.b.header},
            "cases": [c.to_dict() for c in self.cases],
        }
        plain: dict[str, Any] = _plain(data)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def choose(captures: tuple[Capture, Capture], pattern: str | None) -> list[str]:
    """Names of cases that either capture has, those that `pattern` (names or shell patterns, with commas) chooses."""
    known = list(dict.fromkeys(n for c in captures for n in c.header["cases"]))
    if pattern is None or pattern == "all":
        return known
    parts = [p.strip() for p in pattern.split(",")]
    for part in parts:
        if not fnmatch.filter(known, part):
            raise ValueError(f"--cases {part!r} matches no case of the captures; they have {', '.join(known[:8])}, ...")
    return [n for n in known if any(fnmatch.fnmatchcase(n, p) for p in parts)]


# ------------------------------------------------------------------------------------------------------------ terminal


def print_tables(comparison: Comparison, console: Console) -> None:
    """The limits, a row of numbers for every case that was compared, and the verdict."""
    console.print()
    console.print(f"A: {comparison.device('a')}\nB: {comparison.device('b')}", highlight=False, markup=False)
    console.print(limits_line(comparison.limits, comparison.golden), style="dim", highlight=False, markup=False)
    columns = _columns(comparison.golden, wide=console.width >= 118)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("case", no_wrap=True, min_width=10)
    for name in ("verdict", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    for case in comparison.cases:
        if "out" in case.tensors:
            cells = numbers(case, comparison.golden)
            table.add_row(case.name, f"[{STYLES[case.verdict]}]{case.verdict}[/]", *(cells[n] for n in columns))
    if table.row_count:
        console.print(table)
    counts = ", ".join(f"{n} {verdict}" for verdict, n in comparison.counts().items()) or "no cases"
    style = STYLES[comparison.verdict]
    console.print(f"[{style}]{comparison.verdict.upper()}[/]: {counts}", highlight=False)


def limits_line(limits: Thresholds, golden: bool) -> str:
    """The limits that decided, in a line."""
    if not golden:
        return f"without golden: A and B may differ by {limits.agree_steps:g} steps of the dtype"
    ratios = ", ".join(f"{n} {x:g}" for n, x in limits.ratios().items())
    return (
        f"dual standard {limits.level}: A/B at most {ratios}; "
        f"low-precision rule: {limits.naive_factor:g} x naive + 1 step; "
        f"LSE: {limits.lse_nats:g} nats; small: |golden| < {_small(limits)}"
    )


def _small(limits: Thresholds) -> str:
    return ", ".join(f"{x:.3g} {n}" for n, x in limits.small_below.items())


def _columns(golden: bool, wide: bool = True) -> list[str]:
    """Columns of the table; on a narrow terminal those of A and the ratio."""
    if not golden:
        return ["max abs A-B", "rel L2", "<= 1 ulp", "A = B", "LSE nats"]
    both = [
        "max abs A",
        "max abs B",
        "rel L2 A",
        "rel L2 B",
        "RMSE A/B",
        "<= 1 ulp A",
        "A = B",
        "LSE nats A",
        "LSE nats B",
    ]
    return both if wide else ["max abs A", "rel L2 A", "RMSE A/B", "<= 1 ulp A", "LSE nats A"]


def numbers(case: CaseReport, golden: bool) -> dict[str, str]:
    """The cells of a case's row by column."""
    out, lse = case.tensors["out"], case.tensors.get("lse")
    equal = "" if out.ab is None else f"{out.ab.equal:.1%}"
    close = f"{within(out.main(), 1):.1%}"
    if not golden:
        found = [_of(out, "ab"), _of(out, "ab", "rel_l2"), close, equal, _of(lse, "ab")]
    else:
        ratio = f"{out.ratios['rmse']:.2f}" if out.ratios else ""
        found = [_of(out, "a"), _of(out, "b"), _of(out, "a", "rel_l2"), _of(out, "b", "rel_l2"), ratio, close, equal,
                 _of(lse, "a"), _of(lse, "b")]  # fmt: skip
    return dict(zip(_columns(golden), found))


def _of(tensor: TensorReport | None, side: str, name: str = "max_abs") -> str:
    m = None if tensor is None else getattr(tensor, side)
    return "" if m is None else f"{getattr(m, name):.1e}"


def within(m: Measures, steps: int) -> float:
    """Share of finite elements at most 0, 1 or 2 steps of the dtype away."""
    counts = list(m.ulp["histogram"].values())
    return sum(counts[: steps + 1]) / max(1, m.finite)


# ---------------------------------------------------------------------------------------------------------------- HTML


def html(comparison: Comparison) -> str:
    """The report as one HTML page with everything in it: plots are data URIs, and nothing is fetched or run."""
    import jinja2

    from . import plots

    text = resources.files(__package__).joinpath("templates/report.html.j2").read_text()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": _number, "where": _where}
    compared = [c for c in comparison.cases if "out" in c.tensors]
    return environment.from_string(text).render(
        c=comparison,
        devices={"A": comparison.device("a"), "B": comparison.device("b")},
        limits=limits_line(comparison.limits, comparison.golden),
        thresholds=comparison.limits.to_dict(),
        overview=plots.overview(compared) if compared else None,
        figures={c.name: plots.case_figure(c) for c in compared},
        columns=_columns(comparison.golden),
        cells={c.name: numbers(c, comparison.golden) for c in compared},
        measures=MEASURES,
        disagreements={c.name: [t.disagreement for t in c.tensors.values() if t.disagreement] for c in compared},
    )


def _number(value: Any, digits: int = 4) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.{digits}g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.2e}"
    return str(value)


def _where(at: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {i}" for axis, i in at.items())
