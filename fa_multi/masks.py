"""A mask is an interval of visible keys per query row: row r sees keys [first(r), last(r)), both non-decreasing in r.

Intervals intersect, and everything a kernel must know about a mask follows from the two ends: which tiles a block of
rows visits, which of them need no element-wise mask, and which rows see nothing (docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from .scalars import Const, IntLike, Scalar, Var, ceildiv, maximum, minimum, scalar


@dataclass(frozen=True)
class Bound:
    """One end of an interval: `slope * row + offset`, slope 0 or 1; with `step` > 1 rounded down to a multiple of it,
    and not below 0."""

    slope: int
    offset: Scalar
    step: int = 1

    def at(self, row: IntLike) -> Scalar:
        value = scalar(row) * self.slope + self.offset if self.slope else self.offset
        return value if self.step == 1 else maximum(value, 0) // self.step * self.step


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

    def tile_lets(
        self, first_row: Scalar, last_row: Scalar, block_n: int, prefix: str = ""
    ) -> tuple[tuple[Var, Scalar], ...]:
        """Task scalars for the rows first_row .. last_row: key tiles [tile_lo, tile_hi) of width `block_n` are visited,
        and [full_lo, full_hi) of them are visible to every one of these rows, so they need no element-wise mask.
        tile_lo and full_lo exist only where the interval has a lower end (else both are 0)."""
        lo, hi, full_lo, full_hi = (Var(prefix + name) for name in ("tile_lo", "tile_hi", "full_lo", "full_hi"))
        top = ceildiv(self.last(last_row), block_n)
        full = self.last(first_row) // block_n
        if not self.lower:
            return ((hi, top), (full_hi, full))
        return (
            (lo, self.first(first_row) // block_n),
            (hi, maximum(top, lo)),
            (full_lo, minimum(ceildiv(self.first(last_row), block_n), hi)),
            (full_hi, maximum(full, full_lo)),
        )


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see, as the user states it. Positions align bottom-right: query i of Sq stands at key
    position p = i + Skv - Sq, as in FlashAttention since 2.1. What is given applies together.

    causal: keys up to p.
    window: (left, right), keys from p - left to p + right, both inclusive; None is no limit on that side.
    block_causal: if > 0, the keys of p's own block of that many keys and all before it.
    """

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    block_causal: int = 0

    def interval(self, seqlen_q: Scalar, seqlen_k: Scalar) -> Interval:
        """The visible interval for run-time lengths."""
        past, (left, right) = seqlen_k - seqlen_q, self.window
        lower = [Bound(1, past - left)] if left is not None else []
        upper = [Bound(0, seqlen_k)]
        if self.causal:
            upper.append(Bound(1, past + 1))
        if right is not None and not self.causal:
            upper.append(Bound(1, past + right + 1))
        if self.block_causal:
            upper.append(Bound(1, past + self.block_causal, self.block_causal))
        return Interval(tuple(lower), tuple(upper))

    def tags(self) -> list[str]:
        """Words for names of kernels and test cases."""
        window = "_".join("x" if w is None else str(w) for w in self.window)
        return [
            *(["causal"] if self.causal else []),
            *([f"window_{window}"] if self.window != (None, None) else []),
            *([f"block_causal_{self.block_causal}"] if self.block_causal else []),
        ]
