"""How far a result is from a reference: every number of the report, gathered a piece at a time.

Pieces are (heads, rows, cols) of one batch entry; attention outputs have cols = head_dim_v, LSE has cols = 1. Sums are
float64. The numbers are defined in docs/accuracy.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

ULP_BINS = ("0", "1", "2", "3-4", "5-8", "9-16", "17-64", ">64")
_ULP_EDGES = torch.tensor([0, 1, 2, 4, 8, 16, 64])
_INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
AXES = ("batch", "head", "query", "dim")
LISTED = 8  # positions named in a report
_AT_ONCE = 1 << 14  # elements: in cache, and too few for torch to hand to other threads and wait for them


def ulp_distance(x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Steps in x's dtype (float16, bfloat16 or float32) between x and `reference` rounded to it: int64, x's shape.

    Zeros of both signs are one value. Only finite values have a distance; the rest of the answer means nothing.
    """
    return (_ordered(x.contiguous()) - _ordered(reference.to(x.dtype).contiguous())).abs()


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, adjacent floats one apart."""
    bits = x.view(_INTEGERS[x.dtype]).to(torch.int64)
    lowest = torch.iinfo(_INTEGERS[x.dtype]).min
    return torch.where(bits < 0, lowest - bits, bits)


@dataclass
class Place:
    """One element: where it is, the result there and the reference there."""

    at: dict[str, int]
    result: float
    reference: float

    def to_dict(self) -> dict[str, Any]:
        return {"at": self.at, "result": self.result, "reference": self.reference}

    def __str__(self) -> str:
        where = ", ".join(f"{axis} {i}" for axis, i in self.at.items())
        return f"{self.result:.6g} for {self.reference:.6g} at {where}"


@dataclass
class Measures:
    """The distance of a result from a reference.

    elements; nan, pos_inf, neg_inf: counts in the result; special_differ: elements where exactly one of the two is NaN,
    +inf or -inf, or each is another of them; special_at: the first of them.
    Over elements finite in both: max_abs, worst (the elements with the largest errors, first is max_abs), rel_l2
    (||x - r|| / ||r||), cosine, rmse, bias (mean of x - r), error_balance (|share above r - share below r|), equal
    (share of identical values).
    Relative errors |x - r| / |r| over normal elements, |r| >= small_below: max_rel, mean_rel, normal. Small elements:
    small (count), small_wrong (share of them with an error above small_atol), small_max_abs.
    ulp: {"histogram": {bin: count}, "max", "mean"}, in steps of the result's dtype.
    """

    elements: int = 0
    finite: int = 0
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    special_differ: int = 0
    special_at: list[Place] = field(default_factory=list)
    max_abs: float = 0.0
    worst: list[Place] = field(default_factory=list)
    rel_l2: float = 0.0
    cosine: float = 1.0
    rmse: float = 0.0
    bias: float = 0.0
    error_balance: float = 0.0
    equal: float = 1.0
    max_rel: float = 0.0
    mean_rel: float = 0.0
    normal: int = 0
    small: int = 0
    small_wrong: float = 0.0
    small_max_abs: float = 0.0
    ulp: dict[str, Any] = field(default_factory=dict)
    reference_max: float = 0.0
    reference_rms: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        data = dict(vars(self))
        for name in ("special_at", "worst"):
            data[name] = [p.to_dict() for p in data[name]]
        return data


class Tally:
    """Gathers `Measures` and the error of every row.

    batch, heads, rows: of the whole tensor. dtype: of the result. small_below, small_atol: see `Measures`.
    row_square, row_max, row_top: (batch, heads, rows) float64: sum of squared errors, largest error, and largest
    magnitude of the reference, of each row.
    """

    def __init__(
        self, batch: int, heads: int, rows: int, dtype: torch.dtype, small_below: float, small_atol: float
    ) -> None:
        self.dtype, self.small_below, self.small_atol = dtype, small_below, small_atol
        self.row_square = torch.zeros(batch, heads, rows, dtype=torch.float64)
        self.row_max, self.row_top = torch.zeros_like(self.row_square), torch.zeros_like(self.row_square)
        self.m = Measures()
        self.bins = torch.zeros(len(ULP_BINS), dtype=torch.int64)
        self.sums = dict.fromkeys(("xx", "rr", "xr", "ee", "e", "rel", "ulp"), 0.0)
        self.counts = dict.fromkeys(("above", "below", "equal", "small_wrong"), 0)
        self.ulp_max = 0

    def add(self, x: torch.Tensor, reference: torch.Tensor, batch: int, head: int) -> None:
        """Take in the piece of batch entry `batch` that starts at head `head`.

        x : (heads, rows, cols) in the result's dtype. reference : the same shape, float64.
        """
        heads, rows, cols = x.shape
        step = max(1, _AT_ONCE // max(1, cols))
        together = max(1, step // max(1, rows))
        for h in range(0, heads, together):
            for row in range(0, rows, step):
                part = slice(h, h + together), slice(row, row + step)
                self._add(x[part], reference[part], (batch, head + h, row))

    def _add(self, x: torch.Tensor, reference: torch.Tensor, at: tuple[int, int, int]) -> None:
        x = x.contiguous()
        wide = x.double()
        error = wide - reference
        finite = error.isfinite()
        if bool(finite.all()):
            known = reference.contiguous()
        else:
            finite = wide.isfinite() & reference.isfinite()
            self._special(wide, reference, finite, at)
            error, wide, known = (torch.where(finite, t, 0.0) for t in (error, wide, reference))
        self.m.elements += x.numel()
        size = error.abs()
        batch, head, row = at
        span = (batch, slice(head, head + x.shape[0]), slice(row, row + x.shape[1]))
        self.row_square[span] = error.square().sum(-1)
        self.row_max[span] = size.amax(-1)
        self.row_top[span] = known.abs().amax(-1)
        self._moments(wide, known, error, int(finite.sum()))
        self._relative(size, known, finite)
        self._ulp(x, known, finite)
        self._worst(size, wide, known, at)

    def _ulp(self, x: torch.Tensor, known: torch.Tensor, finite: torch.Tensor) -> None:
        steps = ulp_distance(x, known)[finite]
        if len(steps):
            self.bins += torch.bincount(torch.bucketize(steps, _ULP_EDGES), minlength=len(ULP_BINS))
            self.sums["ulp"] += float(steps.sum(dtype=torch.float64))
            self.ulp_max = max(self.ulp_max, int(steps.max()))

    def _special(self, wide: torch.Tensor, ref: torch.Tensor, finite: torch.Tensor, at: tuple[int, int, int]) -> None:
        m = self.m
        m.nan += int(wide.isnan().sum())
        m.pos_inf += int((wide == math.inf).sum())
        m.neg_inf += int((wide == -math.inf).sum())
        differ = ~finite & ~((wide == ref) | (wide.isnan() & ref.isnan()))
        m.special_differ += int(differ.sum())
        for flat in differ.flatten().nonzero()[: LISTED - len(m.special_at)].flatten().tolist():
            m.special_at.append(_place(flat, wide, ref, at))

    def _moments(self, x: torch.Tensor, ref: torch.Tensor, error: torch.Tensor, finite: int) -> None:
        s = self.sums
        s["xx"] += float(x.square().sum())
        s["rr"] += float(ref.square().sum())
        s["xr"] += float((x * ref).sum())
        s["ee"] += float(error.square().sum())
        s["e"] += float(error.sum())
        above, below = int((error > 0).sum()), int((error < 0).sum())
        self.counts["above"] += above
        self.counts["below"] += below
        self.counts["equal"] += finite - above - below
        self.m.finite += finite
        self.m.reference_max = max(self.m.reference_max, float(ref.abs().max()))

    def _relative(self, size: torch.Tensor, ref: torch.Tensor, finite: torch.Tensor) -> None:
        m = self.m
        small = finite & (ref.abs() < self.small_below)
        normal = finite & ~small
        count = int(normal.sum())
        if count:
            relative = torch.where(normal, size / ref.abs(), 0.0)
            m.normal += count
            m.max_rel = max(m.max_rel, float(relative.max()))
            self.sums["rel"] += float(relative.sum())
        few = int(small.sum())
        if few:
            m.small += few
            errors = torch.where(small, size, 0.0)
            self.counts["small_wrong"] += int((errors > self.small_atol).sum())
            m.small_max_abs = max(m.small_max_abs, float(errors.max()))

    def _worst(self, size: torch.Tensor, x: torch.Tensor, ref: torch.Tensor, at: tuple[int, int, int]) -> None:
        floor = abs(self.m.worst[-1].result - self.m.worst[-1].reference) if len(self.m.worst) == LISTED else 0.0
        values, index = size.flatten().topk(min(LISTED, size.numel()))
        found = [_place(int(i), x, ref, at) for v, i in zip(values.tolist(), index.tolist()) if v > floor]
        if found:
            both = sorted(self.m.worst + found, key=lambda p: -abs(p.result - p.reference))
            self.m.worst = both[:LISTED]

    def result(self) -> Measures:
        """The measures of all pieces so far."""
        m, s, n = self.m, self.sums, max(1, self.m.finite)
        if m.worst:
            m.max_abs = abs(m.worst[0].result - m.worst[0].reference)
        m.rmse, m.bias = math.sqrt(s["ee"] / n), s["e"] / n
        m.reference_rms = math.sqrt(s["rr"] / n)
        m.rel_l2 = math.sqrt(s["ee"] / s["rr"]) if s["rr"] else (math.inf if s["ee"] else 0.0)
        norms = math.sqrt(s["xx"]) * math.sqrt(s["rr"])
        m.cosine = s["xr"] / norms if norms else (1.0 if s["xx"] == s["rr"] else 0.0)
        m.error_balance = abs(self.counts["above"] - self.counts["below"]) / n
        m.equal = self.counts["equal"] / n
        m.mean_rel = s["rel"] / max(1, m.normal)
        m.small_wrong = self.counts["small_wrong"] / max(1, m.small)
        m.ulp = {
            "histogram": dict(zip(ULP_BINS, self.bins.tolist())),
            "max": self.ulp_max,
            "mean": s["ulp"] / n,
        }
        return m


def _place(flat: int, x: torch.Tensor, ref: torch.Tensor, at: tuple[int, int, int]) -> Place:
    _, rows, cols = x.shape
    head, rest = divmod(flat, rows * cols)
    row, col = divmod(rest, cols)
    where = dict(zip(AXES, (at[0], at[1] + head, at[2] + row, col)))
    if cols == 1:
        del where["dim"]
    return Place(where, float(x.reshape(-1)[flat]), float(ref.reshape(-1)[flat]))
