"""Element-wise expressions and row reductions as vector instructions.

A vector operand is written as text ("s_ub", "alpha_ub[j % 3, :]") together with the buffer it lies in. Expressions are
evaluated into their destination; where that would destroy an operand, into a scratch buffer first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa_multi.tiles import Arith, Cast, Expr, Func, HeadValue, Map, Number, Position, Read, RowReduce, Tile

from .instructions import Access, Buffer, Instr
from .limits import LimitError
from .masking import Masking
from .positions import Positions

if TYPE_CHECKING:
    from .lowering import _RoleLowering

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
        self.positions = Positions(self)
        self.masking = Masking(self)

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
        return self.row_vector(f"t{self.temps}_ub")

    def row_vector(self, name: str) -> Operand:
        """The [rows] buffer of that name."""
        return self.whole(self.low.memory.buffer(name, "UB", (self.rows,), "float32"))

    @staticmethod
    def whole(buffer: Buffer) -> Operand:
        return Operand(buffer.name, buffer, buffer.shape)

    def operand(self, tile: Tile) -> Operand:
        """A tile as it is now: of a ring of row vectors, the row of the current trip, and after the loop any row."""
        buffer = self.low.tile(tile)
        kept = self.low.rings.get(tile.name)
        if kept:
            row = f"{self.low.trip} % {kept}" if self.low.trip else "0"
            return Operand(f"{buffer.name}[{row}, :]", buffer, buffer.shape[1:])
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
            copied = self.row_vector("row_ub")
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

    def broadcast_columns(self, dst: Operand, columns: Operand) -> None:
        """dst[r, c] = columns[0, c]."""
        self._with_hidden(f"T.tile.broadcast({dst.text}, {columns.text}, axis=0)", dst, columns)

    def spread(self, vector: Buffer) -> Buffer:
        """[rows, 8] scratch, each row of it 8 times the value of that row."""
        wide = self.whole(self.scratch((self.rows, 8), "float32"))
        self.fill(wide, "1.0")
        self.binary("*", wide, wide, self.whole(vector))
        return wide.buffer

    # ---- expressions -----------------------------------------------------------------------------------------------

    def map(self, op: Map) -> None:
        self.temps = 0
        self.evaluate(op.value, self.operand(op.dst))

    def evaluate(self, e: Expr, dst: Operand) -> None:
        """dst = e, element by element."""
        if isinstance(e, Number):
            self.fill(dst, repr(e.value))
        elif isinstance(e, Position) and e.axis == 1:
            self.positions.column_position(e, dst)
        elif isinstance(e, Func):
            self.evaluate(_turned(e.a) if e.name == "abs" else e.a, dst)
            self.unary({"exp": "exp", "log": "ln", "abs": "abs"}[e.name], dst, dst)
        elif isinstance(e, Arith):
            self._arith(e, dst)
        else:
            value = self._simple(e)
            if not isinstance(value, Operand) or value.shape != dst.shape:
                raise LimitError(f"no vector instruction for `{e}` alone")
            self.copy(dst, value)

    def _arith(self, e: Arith, dst: Operand) -> None:
        b = self._simple(e.b)
        if _rank(e.b) == 2 and _rank(e.a) < 2:
            self._left_of_tile(e, dst)
            return
        if b is None:  # before dst changes: the right side may read it
            b = self.temp() if len(dst.shape) == 1 or _rank(e.b) < 2 else self._beside(e, dst)
            self.evaluate(e.b, b)
        a = self._simple(e.a)
        if not isinstance(a, Operand) or len(a.shape) < len(dst.shape):
            if isinstance(b, Operand) and b.buffer.overlaps(dst.buffer):
                raise LimitError(f"`{e}`: the right side is where the result goes; swap the operands")
            self.evaluate(e.a, dst)
            a = dst
        self.binary(e.op, dst, a, b)

    def _left_of_tile(self, e: Arith, dst: Operand) -> None:
        """A number or a row expression on the left, a tile on the right: the DSL only has the other order."""
        left = self._simple(e.a)
        if left is None:
            left = self.temp()
            self.evaluate(e.a, left)
        self.evaluate(e.b, dst)
        if e.op == "/":
            dividend = self.whole(self.scratch(dst.shape, "float32"))
            if dividend.buffer.overlaps(dst.buffer) or isinstance(left, Operand):
                raise LimitError(f"no vector instruction for `{e}`")
            self.fill(dividend, repr(left))
            self.binary("/", dst, dividend, dst)
            return
        if e.op == "-":
            self.binary("*", dst, dst, -1.0)
        self.binary("+" if e.op == "-" else e.op, dst, dst, left)

    def _beside(self, e: Arith, dst: Operand) -> Operand:
        """Scratch for the right side of a tile expression; there is one."""
        beside = self.whole(self.scratch(dst.shape, "float32"))
        if beside.buffer.overlaps(dst.buffer):
            raise LimitError(f"`{e}`: too many tiles at once")
        return beside

    def _simple(self, e: Expr) -> Operand | float | None:
        """What an instruction takes as it is."""
        if isinstance(e, Number):
            return e.value
        if isinstance(e, HeadValue):
            return self.positions.head_value(e)
        if isinstance(e, Position) and e.axis == 0:
            return self.positions.row_position(e)
        return self.operand(e.tile) if isinstance(e, Read) else None

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


def _rank(e: Expr) -> int:
    """Axes of an expression's value: 0 for a number, 1 for one value a row, 2 for a tile."""
    if isinstance(e, Read):
        return len(e.tile.shape)
    if isinstance(e, Position):
        return 1 + e.axis
    if isinstance(e, Arith):
        return max(_rank(e.a), _rank(e.b))
    if isinstance(e, Func):
        return _rank(e.a)
    return int(isinstance(e, HeadValue))


def _turned(e: Expr) -> Expr:
    """The operand of an absolute value with the tile on the left of a difference, which saves changing its sign."""
    if isinstance(e, Arith) and e.op == "-" and _rank(e.a) < _rank(e.b):
        return Arith("-", e.b, e.a)
    return e
