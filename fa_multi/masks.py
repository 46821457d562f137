"""A mask is an interval of visible keys per query row: row r sees keys [first(r), last(r)), both non-decreasing in r.

Intervals intersect, and everything a kernel must know about a mask follows from the two ends: which tiles a block of
rows visits, which of them need no element-wise mask, and which rows see nothing (docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from .scalars import Const, IntLike, Scalar, Var, ceildiv, maximum, minimum, scalar


@dataclass(frozen=True)
class Bound:
    """One end of an interval: `slope * row + offset`, slope 0 or 1."""

    slope: int
    offset: Scalar

    def at(self, row: IntLike) -> Scalar:
        return scalar(row) * self.slope + self.offset if self.slope else self.offset


@dataclass(frozen=True)
class Interval:
    """Keys visible to row r: from the largest of `lower` to before the smallest of `upper`."""

    lower: tuple[Bound, ...] = ()
    upper: tuple[Bound, ...] = ()

    def __and__(self, other: Interval) -> Interval:
        return Interval(self.lower + other.lower, self.upper + other.upper)

    def first(self, row: IntLike) -> Scalar:
        """First visible key of `row`, not below 0."""
        return maximum(0, *(b.at(row) for b in self.lower)) if self.lower else Const(0)

    def last(self, row: IntLike) -> Scalar:
        """One past the last visible key of `row`, not below 0."""
        return maximum(minimum(*(b.at(row) for b in self.upper)), 0)

    def tile_lets(self, row0: Scalar, rows: Scalar, block_n: int) -> tuple[tuple[Var, Scalar], ...]:
        """Task scalars for the rows [row0, row0 + rows): key tiles [tile_lo, tile_hi) of width `block_n` are visited,
        and [full_lo, full_hi) of them are visible to every one of these rows, so they need no element-wise mask.
        tile_lo and full_lo exist only where the interval has a lower end (else both are 0)."""
        lo, hi, full_lo = Var("tile_lo"), Var("tile_hi"), Var("full_lo")
        first_row, last_row = row0, row0 + rows - 1
        top = ceildiv(self.last(last_row), block_n)
        full = self.last(first_row) // block_n
        if not self.lower:
            return ((hi, top), (Var("full_hi"), full))
        return (
            (lo, self.first(first_row) // block_n),
            (hi, maximum(top, lo)),
            (full_lo, minimum(ceildiv(self.first(last_row), block_n), hi)),
            (Var("full_hi"), maximum(full, full_lo)),
        )


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see, as the user states it. Positions align bottom-right: query i of Sq stands at key
    position i + Skv - Sq, as in FlashAttention since 2.1."""

    causal: bool = False

    def interval(self, seqlen_q: Scalar, seqlen_k: Scalar) -> Interval:
        """The visible interval for run-time lengths."""
        visible = Interval(upper=(Bound(0, seqlen_k),))
        if self.causal:
            visible &= Interval(upper=(Bound(1, seqlen_k - seqlen_q + 1),))
        return visible

    def tags(self) -> list[str]:
        """Words for names of kernels and test cases."""
        return ["causal"] if self.causal else []
