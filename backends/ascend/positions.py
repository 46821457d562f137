"""Vectors of row and column numbers, and numbers per head: what masks and biases are made of.

Whole positions can exceed what fp32 counts exactly, so a vector only ever counts inside a tile, from 0, and the rest is
int32 arithmetic of the scalar unit. What depends on the task alone is made once, at its start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fa_multi.scalars import Scalar
from fa_multi.tiles import HeadValue, Position

from .instructions import Access, Instr, Loop, Node
from .views import factor, text

if TYPE_CHECKING:
    from .vector import Operand, VectorOps


class Positions:
    """Made on first use, kept by name."""

    def __init__(self, vector: VectorOps):
        self.vector, self.low = vector, vector.low
        self.rows, self.cols = vector.rows, vector.cols

    # ---- rows and columns of a tile --------------------------------------------------------------------------------

    def columns(self, first: int) -> Operand:
        """[1, columns]: first, first + 1, ..."""
        name = "column_ub" if not first else f"column{first}_ub"
        return self.vector.whole(self.low.memory.buffer(name, "UB", (1, self.cols), "float32"))

    def index(self) -> Operand:
        """[rows]: 0, 1, ..."""
        return self.vector.row_vector("row_index_ub")

    def constants(self) -> list[Node]:
        """The vectors that never change, made once per core."""
        outer, self.low.nodes = self.low.nodes, []
        for name, count, first in (
            ("row_index_ub", self.rows, 0),
            ("column_ub", self.cols, 0),
            ("column1_ub", self.cols, 1),
        ):
            if name not in self.low.memory.buffers:
                continue
            index = self.vector.whole(self.low.memory.buffer(f"int{count}_ub", "UB", (count,), "int32"))
            dst = self.vector.whole(self.low.memory.buffers[name])
            self.vector.emit(f"T.tile.createvecindex({index.text}, {first})", index)
            place = dst.text if len(dst.shape) == 1 else dst.text + "[0, :]"
            self.vector.emit(f"T.copy({index.text}, {place})", dst, index)
        made, self.low.nodes = self.low.nodes, outer
        return made

    # ---- rows of the task ------------------------------------------------------------------------------------------

    def first_row(self, row0: Scalar, group: Scalar | None) -> str:
        """Scalar: the query row that this core's first tile row belongs to."""
        if group is None:
            return f"{text(row0)} + vid * {self.rows}"
        self.query_rows(row0, group)
        return "first_row"

    def query_rows(self, row0: Scalar, group: Scalar | None) -> Operand:
        """[rows]: the query row of each tile row, counted from `first_row`."""
        if group is None:
            return self.index()
        dst = self.vector.row_vector("query_row_ub")
        if "first_row" not in self.low.locals:
            self._head(lambda: self._group_rows(dst, row0, group))
        return dst

    def _group_rows(self, dst: Operand, row0: Scalar, group: Scalar) -> None:
        size = factor(group)
        self.low.local("first_row", f"({text(row0)} + vid * {self.rows}) // {size}")
        rest = self.low.local("first_head", f"{text(row0)} + vid * {self.rows} - first_row * {size}")
        divisor = self.vector.row_vector("divisor_ub")
        self.vector.fill(divisor, f'T.cast({size}, "float32")')
        self.vector.emit(f'T.tile.add({dst.text}, {self.index().text}, T.cast({rest}, "float32"))', dst, self.index())
        self.floor_divide(dst, divisor)

    def floor_divide(self, dst: Operand, divisor: Operand | float) -> None:
        """dst = floor(dst / divisor), for whole numbers: half a unit more keeps the quotient away from whole numbers,
        by more than the division is off."""
        self.vector.binary("+", dst, dst, 0.5)
        if isinstance(divisor, float):
            self.vector.binary("*", dst, dst, 1.0 / divisor)
        else:
            self.vector.binary("/", dst, dst, divisor)
        whole = self.vector.whole(self.low.memory.buffer("whole_ub", "UB", dst.shape, "int32"))
        self.vector.emit(f'T.tile.cast({whole.text}, {dst.text}, "CAST_FLOOR", {dst.size})', whole, dst)
        self.vector.emit(f'T.tile.cast({dst.text}, {whole.text}, "CAST_RINT", {dst.size})', dst, whole)

    # ---- operands of expressions -----------------------------------------------------------------------------------

    def row_position(self, e: Position) -> Operand:
        """[rows]: `offset` + the row, which no trip of a loop changes."""
        name = f"position{sum(isinstance(known, Position) for known in self.low.kept)}_ub"
        known = self.low.kept.setdefault(e, name)
        dst = self.vector.row_vector(known)
        if known == name:
            self._head(lambda: self._row_position(dst, e))
        return dst

    def _row_position(self, dst: Operand, e: Position) -> None:
        rows = self.query_rows(e.row0, e.group)
        first = self.first_row(e.row0, e.group) if e.group is not None else f"vid * {self.rows}"
        at = self.low.local("row_at", f"{text(e.offset)} + {first}")
        self.vector.emit(f'T.tile.add({dst.text}, {rows.text}, T.cast({at}, "float32"))', dst, rows)

    def column_position(self, e: Position, dst: Operand) -> None:
        """dst[r, c] = `offset` + c."""
        at = self.low.local("column_at", text(e.offset))
        self.vector.broadcast_columns(dst, self.columns(0))
        self.vector.emit(f'T.tile.add({dst.text}, {dst.text}, T.cast({at}, "float32"))', dst, dst)

    def head_value(self, e: HeadValue) -> Operand:
        """[rows]: the number of each row's head."""
        name = f"{e.tensor.name}_ub"
        dst = self.vector.row_vector(name)
        if e not in self.low.kept:
            self.low.kept[e] = name
            self._head(lambda: self._head_value(dst, e))
        return dst

    def _head_value(self, dst: Operand, e: HeadValue) -> None:
        view = self.low.views[e.tensor.name]
        *outer, head = (text(i) for i in e.index)
        self.low.locals |= {"head": "int32", "number": "float32"}
        load = Instr(f"number = {view.argument}[{', '.join([*outer, 'head'])}]")
        if e.group is None:
            self.low.nodes += [Instr(f"head = {head}"), load]
            self.vector.fill(dst, "number")
            return
        place = f"({text(e.row0)} + vid * {self.rows} + row) % {factor(e.group)}"
        write = Instr(f"{dst.text}[row] = number", (Access("S", dst.buffer, True),))
        self.low.nodes.append(Loop("row", str(self.rows), [Instr(f"head = {head} + {place}"), load, write]))

    def _head(self, make: Callable[[], None]) -> None:
        """Put what `make` emits at the start of the task."""
        outer, self.low.nodes = self.low.nodes, []
        make()
        made, self.low.nodes = self.low.nodes, outer
        self.low.head += made
