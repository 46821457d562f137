"""The rules that turn measures into a verdict, with every threshold in one place. Sources: docs/accuracy.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from .metrics import Measures, Tally
from .tolerance import hold

# Ratios A / B that may not be exceeded, by guard level: largest relative error, mean relative error, RMSE. They are the
# levels of the dual-standard (benchmark) method of Ascend's msprobe, which files fused attention under L1.
LEVELS = {"L0": (10.0, 2.0, 2.0), "L1": (5.0, 1.5, 1.5), "L2": (2.0, 1.2, 1.2)}
RULES = ("special", "low_precision", "rows", "nats", "dual", "agree")
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
UNBOUNDED = 10000.0  # the ratio to an error of 0


@dataclass(frozen=True)
class Thresholds:
    """Every limit of the rules. See docs/accuracy.md for what each is for and where it comes from.

    rules: the rules that decide; the others are still evaluated and printed.
    level: guard level of the dual standard; sets the three ratios where they are not given.
    small_below, small_atol: per dtype, magnitude below which an element is small, and the error it may then have; for
        outputs both are times the RMS of v.
    small_count: fewer small elements than this are not judged by their ratio.
    naive_factor: how many times worse than the naive computation. row_factor: slack of that rule for one row.
    lse_nats: absolute error of LSE, plus lse_relative times the largest LSE.
    agree_steps: without a golden result, dtype steps of the largest magnitude by which A and B may differ.
    """

    rules: tuple[str, ...] = RULES
    level: str = "L1"
    max_rel_ratio: float | None = None
    mean_rel_ratio: float | None = None
    rmse_ratio: float | None = None
    small_wrong_ratio: float = 2.0
    small_count: int = 100
    small_below: Mapping[str, float] = field(default_factory=lambda: {"fp16": 2**-10, "bf16": 2**-10, "fp32": 2**-20})
    small_atol: Mapping[str, float] = field(default_factory=lambda: {"fp16": 2**-16, "bf16": 2**-16, "fp32": 2**-30})
    naive_factor: float = 2.0
    row_factor: float = 2.0
    lse_nats: float = 1e-3
    lse_relative: float = 2**-18
    agree_steps: float = 4.0

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {self.level!r}")
        unknown = [r for r in self.rules if r not in RULES]
        if unknown or not self.rules:
            raise ValueError(f"rules must be some of {', '.join(RULES)}, got {', '.join(unknown) or 'none'}")
        for name, default in zip(("max_rel_ratio", "mean_rel_ratio", "rmse_ratio"), LEVELS[self.level]):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    def ratios(self) -> dict[str, float]:
        """Limits of the dual standard by measure."""
        assert self.max_rel_ratio is not None
        assert self.mean_rel_ratio is not None
        assert self.rmse_ratio is not None
        return {
            "max_rel": self.max_rel_ratio,
            "mean_rel": self.mean_rel_ratio,
            "rmse": self.rmse_ratio,
            "small_wrong": self.small_wrong_ratio,
        }

    def small(self, dtype: torch.dtype, scale: float) -> tuple[float, float]:
        """(small_below, small_atol) for a dtype and values of this scale."""
        return self.small_below[_NAMES[dtype]] * scale, self.small_atol[_NAMES[dtype]] * scale

    def to_dict(self) -> dict[str, Any]:
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Thresholds:
        """Thresholds from a mapping of field names; ValueError names what is not acceptable."""
        known = {f.name: getattr(cls(), f.name) for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name not in known:
                raise ValueError(f"thresholds: no entry {name!r}; entries are {', '.join(known)}")
            values[name] = _read(name, value, known[name])
        return cls(**values)

    @classmethod
    def load(cls, path: Path | None, changes: Mapping[str, Any] | None = None) -> Thresholds:
        """Thresholds from a YAML file, a mapping of field names, and `changes` on top; without a file, defaults."""
        if path is None:
            return cls.from_dict(changes or {})
        try:
            data = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ValueError(f"cannot read the thresholds file {str(path)!r}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path} must hold a mapping such as {{level: L1, lse_nats: 0.001}}")
        try:
            return cls.from_dict({**data, **(changes or {})})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _read(name: str, value: Any, default: Any) -> Any:
    """`value` in the type of the default, numbers checked."""
    if isinstance(default, Mapping):
        if not isinstance(value, dict) or not set(value) <= set(default):
            raise ValueError(f"thresholds: {name} must map {', '.join(default)} to numbers, got {value!r}")
        return {**default, **{k: _read(name, v, default[k]) for k, v in value.items()}}
    if isinstance(default, tuple):
        return tuple(value) if isinstance(value, list) else (value,)
    if isinstance(default, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"thresholds: {name} must be a number >= 0, got {value!r}")
    return value


@dataclass(frozen=True)
class Outcome:
    """What one rule says of one tensor. side: "a", "b", or "ab" for a rule over both. text: one line, limits named."""

    rule: str
    side: str
    ok: bool
    text: str

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def ratio(a: float, b: float) -> float:
    """a / b; 1 for 0 / 0, and at most UNBOUNDED."""
    if b == 0:
        return 1.0 if a == 0 else UNBOUNDED
    return min(a / b, UNBOUNDED)


def special(side: str, m: Measures, other: str) -> Outcome:
    """NaN, +inf and -inf stand where they stand in the reference, and nowhere else."""
    if not m.special_differ:
        return Outcome("special", side, True, f"NaN and Inf stand where {other} has them")
    text = f"{m.special_differ} of {m.elements} elements are NaN or Inf where {other}'s are not the same"
    return Outcome("special", side, False, f"{text}; first {m.special_at[0]}")


def low_precision(side: str, m: Measures, naive: Measures, step: float, limits: Thresholds) -> Outcome:
    """At most `naive_factor` times the error of the naive computation in the input dtype, plus one rounding step."""
    verdict = hold(m.max_abs, m.rel_l2, naive.max_abs, naive.rel_l2, m.reference_max, step, limits.naive_factor)
    return Outcome("low_precision", side, verdict.ok, verdict.problem or str(verdict))


def rows(side: str, result: Tally, naive: Tally, step: float, limits: Thresholds) -> Outcome:
    """The same rule for every row by its own size, with `row_factor` of slack: what hides below the largest value."""
    limit = limits.row_factor * (limits.naive_factor * naive.row_max + step * result.row_top)
    over = torch.where(limit > 0, result.row_max / limit, (result.row_max > 0) * UNBOUNDED)
    if over.numel() == 0:
        return Outcome("rows", side, True, "no rows")
    flat = int(over.argmax())
    worst, (batch, head, row) = float(over.flatten()[flat]), _unravel(flat, over.shape)
    where = f"batch {batch}, head {head}, query {row}"
    text = f"worst row at {worst:.2f} of its limit {float(limit.flatten()[flat]):.2e} ({where})"
    return Outcome("rows", side, worst <= 1, text)


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    place = []
    for n in reversed(shape):
        flat, i = divmod(flat, n)
        place.append(i)
    return tuple(reversed(place))


def nats(side: str, m: Measures, limits: Thresholds) -> Outcome:
    """LSE is off by at most lse_nats + lse_relative max|lse|: its sums are fp32 whatever the input dtype."""
    limit = limits.lse_nats + limits.lse_relative * m.reference_max
    text = f"LSE off by {m.max_abs:.2e} nats (limit {limit:.2e})"
    return Outcome("nats", side, m.max_abs <= limit, text)


def dual(a: Measures, b: Measures, dtype: torch.dtype, limits: Thresholds) -> tuple[dict[str, float], Outcome]:
    """A's errors against golden over B's, measure by measure, and whether all stay within the level.

    A measure that is no larger than what rounding the golden result to the dtype may cause (`floors`) passes whatever
    B has: no device can be asked for less.
    """
    floor = floors(a, dtype)
    ratios, bad = {}, []
    for name, limit in limits.ratios().items():
        ratios[name] = ratio(getattr(a, name), getattr(b, name))
        if name == "small_wrong" and a.small < limits.small_count:
            continue
        if ratios[name] > limit and getattr(a, name) > floor[name]:
            bad.append(f"{name} {ratios[name]:.2f} > {limit:g}")
    ratios["error_balance"] = ratio(a.error_balance, b.error_balance)
    shown = ", ".join(f"{name} {r:.2f}" for name, r in ratios.items())
    text = f"A/B {'; '.join(bad)} at {limits.level}" if bad else f"A/B within {limits.level}: {shown}"
    return ratios, Outcome("dual", "ab", not bad, text)


def floors(m: Measures, dtype: torch.dtype) -> dict[str, float]:
    """What rounding explains: one step of the result's dtype at most, half a step in the mean; where the result is as
    wide as the sums that it comes from (float32), 32 times that."""
    step = torch.finfo(dtype).eps * (32 if dtype == torch.float32 else 1)
    return {"max_rel": step, "mean_rel": step / 2, "rmse": step / 2 * m.reference_rms, "small_wrong": 0.0}


def agree(ab: Measures, step: float, limits: Thresholds) -> Outcome:
    """Without a golden result: A and B differ by at most `agree_steps` steps of the largest magnitude of B."""
    limit = limits.agree_steps * step * ab.reference_max
    relative = limits.agree_steps * step
    ok = ab.max_abs <= limit and ab.rel_l2 <= relative
    text = f"A and B differ by {ab.max_abs:.2e} (limit {limit:.2e}), rel L2 {ab.rel_l2:.2e} (limit {relative:.2e})"
    return Outcome("agree", "ab", ok, text)
