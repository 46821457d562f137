"""Element-wise expressions, row reductions and masks as vector instructions.

A vector operand is written as text ("s_ub", "alpha_ub[j % 3, :]") together with the buffer it lies in. Expressions are
evaluated into their destination; where that would destroy an operand, into a scratch buffer first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa_multi.masks import Bound
from fa_multi.scalars import Scalar
from fa_multi.tiles import Arith, Cast, Expr, Func, Map, MaskTile, Number, Read, RowReduce, Tile, tiles_in

from .instructions import Access, Buffer, Instr, Node
from .limits import LimitError

if TYPE_CHECKING:
    from .lowering import _RoleLowering

MASKED = -(2.0**120)  # added to a masked score: its exp is exactly 0 for every maximum >= -2**100
_TILE_OPS = {"+": "add", "-": "sub", "*": "mul", "/": "div"}


@dataclass(frozen=True)
class Operand:
    """A buffer, or one row of a ring of row vectors, of `shape`."""

    text: str
    buffer: Buffer
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        n = 1
        for x in self.shape:
            n *= x
        return n


class VectorOps:
    """Vector instructions of one role; writes them into the role's current list."""

    def __init__(self, lowering: _RoleLowering, target: str):
        self.low, self.target = lowering, target
        plan = lowering.plan
        self.rows, self.cols = plan.block_m // 2, plan.block_n
        self.wide = max(plan.block_n, plan.head_dim_v)
        self.temps = 0
        # bytes that the compiler adds behind our buffers and uses for reductions and broadcasts
        self.hidden = self.whole(Buffer("tmp_ub", "UB behind", (self.rows, self.wide), "float32", 0))

    # ---- buffers ---------------------------------------------------------------------------------------------------

    def scratch(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        """Bytes for [rows, columns] values that live for one op only; all such buffers lie over the same bytes."""
        base = self.low.memory.buffer("scratch_ub", "UB", (self.rows, self.wide), "float32")
        if shape == base.shape and dtype == base.dtype:
            return base
        name = f"scratch{shape[1]}_{dtype}_ub"
        return self.low.memory.buffer(name, "UB", shape, dtype, over="scratch_ub")

    def temp(self) -> Operand:
        """A row vector for intermediate values."""
        self.temps += 1
        return self._vector(f"t{self.temps}_ub")

    def _vector(self, name: str) -> Operand:
        return self.whole(self.low.memory.buffer(name, "UB", (self.rows,), "float32"))

    @staticmethod
    def whole(buffer: Buffer) -> Operand:
        return Operand(buffer.name, buffer, buffer.shape)

    def operand(self, tile: Tile) -> Operand:
        """A tile as it is now: of a ring of row vectors, the row of the current trip."""
        buffer = self.low.tile(tile)
        kept = self.low.rings.get(tile.name)
        if kept:
            return Operand(f"{buffer.name}[{self.low.trip} % {kept}, :]", buffer, buffer.shape[1:])
        return self.whole(buffer)

    def emit(self, statement: str, dst: Operand, *sources: Operand) -> None:
        touched = [Access("V", s.buffer, False) for s in sources] + [Access("V", dst.buffer, True)]
        self.low.emit(statement, *touched)

    def _with_hidden(self, statement: str, dst: Operand, src: Operand) -> None:
        self.low.emit(statement, *(Access("V", x.buffer, x is not src) for x in (src, dst, self.hidden)))

    # ---- instructions ----------------------------------------------------------------------------------------------

    def binary(self, op: str, dst: Operand, a: Operand, b: Operand | float) -> None:
        """dst = a op b, where b may be a number, or a row vector under a tile."""
        name = _TILE_OPS.get(op, op)
        if not isinstance(b, Operand):
            number = -b if op == "-" else b  # the DSL has no scalar on the left, and subtracts by adding
            self.emit(f"T.tile.{'add' if op == '-' else name}({dst.text}, {a.text}, {number!r})", dst, a)
        elif len(b.shape) < len(dst.shape):
            self._row_broadcast(name, dst, a, b)
        else:
            self.emit(f"T.tile.{name}({dst.text}, {a.text}, {b.text})", dst, a, b)

    def _row_broadcast(self, name: str, dst: Operand, a: Operand, vector: Operand) -> None:
        """dst[r, :] = a[r, :] op vector[r]."""
        if self.target == "pto":
            lanes = self.whole(self.low.memory.buffer("lanes_ub", "UB", (self.rows, 8), "float32"))
            touched = [Access("V", x.buffer, x in (lanes, dst)) for x in (a, vector, lanes, dst)]
            self.low.emit(
                f"T.tile.row_expand_{name}_experiment({dst.text}, {a.text}, {vector.text}, {lanes.text})", *touched
            )
            return
        # ascendc takes the column count for the row count in that op, so there it is a loop over rows
        if vector.text != vector.buffer.name:
            copied = self._vector("row_ub")
            self.emit(f"T.copy({vector.text}, {copied.text})", copied, vector)
            vector = copied
        statement = f"T.tile.{name}({dst.text}[row, :], {a.text}[row, :], {vector.text}[row])"
        touched = [Access("V", x.buffer, False) for x in (a, vector)] + [Access("V", dst.buffer, True)]
        self.low.nodes.append(Instr(f"for row in T.serial({self.rows}): {statement}", tuple(touched)))

    def unary(self, name: str, dst: Operand, a: Operand) -> None:
        self.emit(f"T.tile.{name}({dst.text}, {a.text})", dst, a)

    def fill(self, dst: Operand, value: str) -> None:
        self.emit(f"T.tile.fill({dst.text}, {value})", dst)

    def copy(self, dst: Operand, src: Operand) -> None:
        if dst != src:
            self.emit(f"T.copy({src.text}, {dst.text})", dst, src)

    def axpy(self, dst: Operand, x: Operand, factor: float) -> None:
        """dst = factor * x + dst."""
        self.emit(f"T.tile.axpy({dst.text}, {x.text}, {factor!r})", dst, x, dst)

    # ---- expressions -----------------------------------------------------------------------------------------------

    def map(self, op: Map) -> None:
        self.temps = 0
        self.evaluate(op.value, self.operand(op.dst))

    def evaluate(self, e: Expr, dst: Operand) -> None:
        """dst = e, element by element."""
        if isinstance(e, Number):
            self.fill(dst, repr(e.value))
        elif isinstance(e, Read):
            self.copy(dst, self.operand(e.tile))
        elif isinstance(e, Func):
            self.evaluate(e.a, dst)
            self.unary({"exp": "exp", "log": "ln", "abs": "abs"}[e.name], dst, dst)
        elif isinstance(e, Arith):
            self._arith(e, dst)
        else:
            raise LimitError(f"no vector instruction for `{e}`")

    def _arith(self, e: Arith, dst: Operand) -> None:
        b = self._simple(e.b)
        if b is None:  # before dst changes: the right side may read it
            if self._rank(e.b) == 2:
                raise LimitError(f"`{e}`: the right side of an operator must be a tile, a number or a row expression")
            b = self.temp()
            self.evaluate(e.b, b)
        a = self._simple(e.a)
        if not isinstance(a, Operand) or len(a.shape) < len(dst.shape):
            if isinstance(b, Operand) and b.buffer.overlaps(dst.buffer):
                raise LimitError(f"`{e}`: the right side is where the result goes; swap the operands")
            self.evaluate(e.a, dst)
            a = dst
        self.binary(e.op, dst, a, b)

    def _simple(self, e: Expr) -> Operand | float | None:
        if isinstance(e, Number):
            return e.value
        return self.operand(e.tile) if isinstance(e, Read) else None

    @staticmethod
    def _rank(e: Expr) -> int:
        return max((len(t.shape) for t in tiles_in(e)), default=0)

    # ---- other ops -------------------------------------------------------------------------------------------------

    def reduce(self, op: RowReduce) -> None:
        self.temps = 0
        dst, src = self.operand(op.dst), self.operand(op.src)
        part = self.temp() if op.accumulate or dst.text != dst.buffer.name else dst
        self._with_hidden(f"T.reduce_{op.kind}({src.text}, {part.text}, dim=-1)", part, src)
        if op.accumulate:
            self.binary({"max": "max", "sum": "+"}[op.kind], dst, dst, part)
        else:
            self.copy(dst, part)

    def cast(self, op: Cast) -> None:
        dst, src = self.operand(op.dst), self.operand(op.src)
        self.emit(f'T.tile.cast({dst.text}, {src.text}, "CAST_RINT", {dst.size})', dst, src)

    # ---- masks -----------------------------------------------------------------------------------------------------

    def mask(self, op: MaskTile) -> None:
        """Add MASKED where the column is not visible. excess = column + 1 - limit of the row is positive exactly there
        (for a lower end: limit - column), so min(max(excess, 0), 1) is the mask."""
        self.temps = 0
        condition = self._masked_trips()
        outer, self.low.nodes = self.low.nodes, []
        tile = self.operand(op.tile)
        excess = self.whole(self.scratch(tile.shape, "float32"))
        limit = self._vector("limit_ub")
        for bounds, upper in ((op.interval.upper, True), (op.interval.lower, False)):
            if not bounds:
                continue
            self._limit(limit, bounds, upper, op)
            columns = self._vector_of("column1_ub" if upper else "column_ub", (1, self.cols))
            self._with_hidden(f"T.tile.broadcast({excess.text}, {columns.text}, axis=0)", excess, columns)
            self.binary("-", excess, excess, limit)
            if not upper:
                self.binary("*", excess, excess, -1.0)
            self.binary("max", excess, excess, 0.0)
            self.binary("min", excess, excess, 1.0)
            self.axpy(tile, excess, MASKED)
        inner, self.low.nodes = self.low.nodes, outer
        self.low.block(condition, inner)

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

    def _limit(self, limit: Operand, bounds: tuple[Bound, ...], upper: bool, op: MaskTile) -> None:
        """limit[r] = smallest upper (largest lower) end of row r, as a column of this tile."""
        combine = "min" if upper else "max"
        first = True
        for n, bound in enumerate(sorted(bounds, key=lambda b: -b.slope)):
            if bound.slope and bound.step != 1:
                raise LimitError(f"`{op}`: row ends in steps of {bound.step} have no vector form yet")
            value = self._clamped(bound, op, f"edge{n}")
            if bound.slope:
                index = self._vector("row_index_ub")
                target = limit if first else self.temp()
                self.emit(f"T.tile.add({target.text}, {index.text}, {value})", target, index)
                if not first:
                    self.binary(combine, limit, limit, target)
            elif first:
                self.fill(limit, value)
            else:
                self.emit(f"T.tile.{combine}({limit.text}, {limit.text}, {value})", limit, limit)
            first = False

    def _clamped(self, bound: Bound, op: MaskTile, name: str) -> str:
        """The end at this core's first row, clamped to where it still matters: floats are exact there."""
        end: Scalar = bound.at(op.row0) - op.col0
        from .lowering import text

        half = f" + vid * {self.rows}" if bound.slope else ""
        low, high = -self.rows - 1, self.cols + 1
        self.low.local(name, f"T.max(T.min({text(end)}{half}, {high}), {low})")
        return f'T.cast({name}, "float32")'

    def _vector_of(self, name: str, shape: tuple[int, ...]) -> Operand:
        return self.whole(self.low.memory.buffer(name, "UB", shape, "float32"))

    def constants(self) -> list[Node]:
        """Index vectors that masks need, made once per core."""
        outer, self.low.nodes = self.low.nodes, []
        for name, count, first in (
            ("row_index_ub", self.rows, 0),
            ("column_ub", self.cols, 0),
            ("column1_ub", self.cols, 1),
        ):
            if name not in self.low.memory.buffers:
                continue
            index = self.whole(self.low.memory.buffer(f"int{count}_ub", "UB", (count,), "int32"))
            dst = self.whole(self.low.memory.buffers[name])
            self.emit(f"T.tile.createvecindex({index.text}, {first})", index)
            self.emit(f"T.copy({index.text}, {dst.text if len(dst.shape) == 1 else dst.text + '[0, :]'})", dst, index)
        made, self.low.nodes = self.low.nodes, outer
        return made
