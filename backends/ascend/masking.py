"""Masks as arithmetic: the simulator and one target have no usable compare and select.

`excess` = column + 1 - end of the row (for a lower end: end - column) is positive exactly where a column is hidden, so
min(max(excess, 0), 1) is the mask, and MASKED times it is added to the scores. Keys beyond a sequence's length are
never loaded, so what they hold does not matter. A NaN or infinity in a key *inside* the sequence shows in every row of
its tile, hidden from that row or not. (In a value it shows on every lane: 0 x NaN is NaN.)

Ends are counted from the first column of the tile and clamped to where they still matter, so that floats are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_multi.masks import Bound
from fa_multi.tiles import MaskTile

from .views import text

if TYPE_CHECKING:
    from .vector import Operand, VectorOps

MASKED = -(2.0**120)  # added to a masked score: its exp is exactly 0 for every maximum >= -2**100


class Masking:
    """MaskTile as vector instructions."""

    def __init__(self, vector: VectorOps):
        self.vector, self.low, self.positions = vector, vector.low, vector.positions
        self.rows, self.cols = vector.rows, vector.cols

    def mask(self, op: MaskTile) -> None:
        """Add MASKED where the column is not visible, in the phases of the loop that are masked."""
        condition = self._masked_trips()
        outer, self.low.nodes = self.low.nodes, []
        self._apply(op)
        inner, self.low.nodes = self.low.nodes, outer
        self.low.block(condition, inner)

    def _apply(self, op: MaskTile) -> None:
        v = self.vector
        tile = v.operand(op.tile)
        excess = v.whole(v.scratch(tile.shape, "float32"))
        end = v.row_vector("limit_ub")
        self.low.local("col0", text(op.col0))
        for bounds, upper in ((op.interval.upper, True), (op.interval.lower, False)):
            if not bounds:
                continue
            self._end(end, bounds, upper, op)
            v.broadcast_columns(excess, self.positions.columns(1 if upper else 0))
            v.binary("-", excess, excess, end)
            if not upper:
                v.binary("*", excess, excess, -1.0)
            v.binary("max", excess, excess, 0.0)
            v.binary("min", excess, excess, 1.0)
            v.axpy(tile, excess, MASKED)

    def _masked_trips(self) -> str:
        """Text of: the current trip is in a masked phase."""
        phases = self.low.phases
        parts, start = [], ""
        for n, phase in enumerate(phases):
            stop = f"stop{n}"
            if phase.masked:
                begin = [f"{self.low.trip} >= {start}"] if start else []
                end = [f"{self.low.trip} < {stop}"] if n + 1 < len(phases) else []
                parts.append(" and ".join(begin + end) or "trips > 0")
            start = stop
        return " or ".join(f"({p})" for p in parts) if len(parts) > 1 else parts[0]

    def _end(self, end: Operand, bounds: tuple[Bound, ...], upper: bool, op: MaskTile) -> None:
        """end[r] = smallest upper (largest lower) end of row r, as a column of this tile."""
        v, combine = self.vector, "min" if upper else "max"
        first = True
        for n, bound in enumerate(sorted(bounds, key=lambda b: -b.slope)):
            if bound.slope:
                target = end if first else v.row_vector("limit1_ub")
                self._sloped(target, bound, op, f"edge{n}")
                if not first:
                    v.binary(combine, end, end, target)
            else:
                value = self._clamped(f"edge{n}", f"{text(bound.at(op.row0))} - col0")
                if first:
                    v.fill(end, value)
                else:
                    v.emit(f"T.tile.{combine}({end.text}, {end.text}, {value})", end, end)
            first = False

    def _sloped(self, dst: Operand, bound: Bound, op: MaskTile, name: str) -> None:
        """dst[r] = the end of row r: row + offset, rounded down to a multiple of the step."""
        v = self.vector
        rows = self.positions.query_rows(op.row0, op.group)
        at = f"{self.positions.first_row(op.row0, op.group)} + {text(bound.offset)}"
        if bound.step == 1:
            value = self._clamped(name, f"{at} - col0")
            v.emit(f"T.tile.add({dst.text}, {rows.text}, {value})", dst, rows)
            return
        at = self.low.local(f"{name}_at", at)
        low = self.low.local(f"{name}_low", f"T.max({at}, 0) // {bound.step} * {bound.step}")
        rest, step = f"T.max({at} - {low}, -{self.rows})", bound.step
        if bound.step > self.rows:  # at most one step lies inside the tile: count in `rows` up to it instead
            rest, step = f"T.max({at} - {low} - {bound.step} + {self.rows}, 0)", self.rows
        rest = self.low.local(f"{name}_rest", rest)
        v.emit(f'T.tile.add({dst.text}, {rows.text}, T.cast({rest}, "float32"))', dst, rows)
        v.binary("max", dst, dst, 0.0)
        self.positions.floor_divide(dst, float(step))
        base = self._clamped(name, f"{low} - col0")
        top = self._clamped(f"{name}_top", f"{low} + {bound.step} - col0")
        stride = f"{top} - {base}" if bound.step > self.rows else repr(float(bound.step))
        v.emit(f"T.tile.mul({dst.text}, {dst.text}, {stride})", dst, dst)
        v.emit(f"T.tile.add({dst.text}, {dst.text}, {base})", dst, dst)

    def _clamped(self, name: str, value: str) -> str:
        """An end at this core's first row, clamped to where it still matters: floats are exact there."""
        low, high = -3 * self.rows - 1, self.cols + 1
        self.low.local(name, f"T.max(T.min({value}, {high}), {low})")
        return f'T.cast({name}, "float32")'
