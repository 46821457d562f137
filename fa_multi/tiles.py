"""The tile program: what a kernel computes, in tiles, with sequential meaning and no device in it.

A `Program` runs once per task (one block of query rows of one head of one batch entry). Its ops read and write named
on-chip `Tile`s; only `Load` and `Store` touch `Tensor`s. The CPU lane executes these ops as they stand, which defines
what they mean; the CUDA and Ascend backends cut the same object into roles (`roles.py`) and print it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Union

from .masks import Interval
from .scalars import Const, Scalar, Var

ZERO = Const(0)

# --------------------------------------------------------------------------------------------- tiles and tensors


@dataclass(frozen=True)
class Tile:
    """An on-chip array. `shape` is (rows,) or (rows, cols), static; `dtype` is a torch dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return self.name

    @property
    def bytes(self) -> int:
        size = {"float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class Tensor:
    """An argument in device memory. `dims` name the axes in the order of the indices of an `Access`; sizes are scalars,
    strides are free (unit stride along the last axis), so one program serves every layout."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[Scalar, ...]
    dtype: str
    output: bool = False


@dataclass(frozen=True)
class Access:
    """A block of rows of a tensor, [row0, row0 + rows) of one batch entry and head. The tile's rows past `rows` read as
    zero and are not written, whatever the tensor holds there.

    begin: where row 0 lies along the sequence axis (packed sequences).
    group: if given, rows run over that many heads first: row r is position r // group of head `head` + r % group.
    table: if given, the tensor is a pool of pages: row r is slot r % page_size of page table[batch, r // page_size].
    split: index along the "split" axis of partial results.
    """

    tensor: Tensor
    batch: Scalar
    head: Scalar
    row0: Scalar
    rows: Scalar
    begin: Scalar = ZERO
    group: Scalar | None = None
    table: Tensor | None = None
    page_size: int = 0
    split: Scalar | None = None

    def __str__(self) -> str:
        row = f"{self.begin + self.row0} : +{self.rows}"
        places = {"batch": str(self.batch), "head": str(self.head), "seq": row, "dim": ":", "split": str(self.split)}
        if self.group is not None:
            places["seq"], places["head"] = f"({row}) / {self.group}", f"{self.head} + row % {self.group}"
        if self.table is not None:
            places |= {"page": f"{self.table.name}[{self.batch}, ({row}) / {self.page_size}]"}
            places |= {"slot": f"row % {self.page_size}"}
        return f"{self.tensor.name}[{', '.join(places[d] for d in self.tensor.dims)}]"


# --------------------------------------------------------------------------------------------- element-wise expressions


class Expr:
    """An element-wise expression. A 1-D tile inside an expression for a 2-D tile is broadcast along its rows."""

    def __add__(self, other: Operand) -> Expr:
        return Arith("+", self, expr(other))

    def __sub__(self, other: Operand) -> Expr:
        return Arith("-", self, expr(other))

    def __mul__(self, other: Operand) -> Expr:
        return Arith("*", self, expr(other))

    def __truediv__(self, other: Operand) -> Expr:
        return Arith("/", self, expr(other))


@dataclass(frozen=True)
class Number(Expr):
    value: float

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True)
class Read(Expr):
    tile: Tile

    def __str__(self) -> str:
        return self.tile.name


@dataclass(frozen=True)
class HeadValue(Expr):
    """An element of a float32 tensor, one number per task: `tensor[index]`. With `group` rows run over heads first, and
    row r of the block at `row0` reads head `index[-1]` + (row0 + r) % group."""

    tensor: Tensor
    index: tuple[Scalar, ...]
    row0: Scalar = ZERO
    group: Scalar | None = None

    def __str__(self) -> str:
        last = "" if self.group is None else f" + row % {self.group}"
        return f"{self.tensor.name}[{', '.join(map(str, self.index))}{last}]"


@dataclass(frozen=True)
class Position(Expr):
    """`offset` + the index along axis 0 or 1 of a 2-D tile, as a number; with `group`, offset + (row0 + index) //
    group, where several heads of a position follow each other along the axis."""

    axis: int
    offset: Scalar
    row0: Scalar = ZERO
    group: Scalar | None = None

    def __str__(self) -> str:
        index = "rc"[self.axis]
        index = index if self.group is None else f"({self.row0} + {index}) / {self.group}"
        return f"({self.offset} + {index})"


@dataclass(frozen=True)
class KeyHead(Expr):
    """Which of `heads` key heads row r of the block at `row0` belongs to, as a number: rows run over a group of query
    heads first, an equal share of it for each key head."""

    row0: Scalar
    group: Scalar
    heads: int

    def __str__(self) -> str:
        return f"({self.row0} + r) % {self.group} / ({self.group} / {self.heads})"


@dataclass(frozen=True)
class Arith(Expr):
    """`op` is +, -, *, /, max or min."""

    op: str
    a: Expr
    b: Expr

    def __str__(self) -> str:
        a, b = str(self.a), str(self.b)
        if self.op in ("max", "min"):
            return f"{self.op}({a}, {b})"
        a = f"({a})" if self.op in "*/" and isinstance(self.a, Arith) and self.a.op in "+-" else a
        inner = self.b.op if isinstance(self.b, Arith) else ""
        b = f"({b})" if inner in ("+", "-", "*", "/") and not (self.op == "+" and inner != "-") else b
        return f"{a} {self.op} {b}"


@dataclass(frozen=True)
class Func(Expr):
    """`exp` or `log` (natural), or `abs`."""

    name: str
    a: Expr

    def __str__(self) -> str:
        return f"{self.name}({self.a})"


Operand = Union[Expr, Tile, float, int]


def expr(x: Operand) -> Expr:
    """`x` as an expression."""
    if isinstance(x, Tile):
        return Read(x)
    return x if isinstance(x, Expr) else Number(float(x))


def exp(x: Operand) -> Expr:
    return Func("exp", expr(x))


def log(x: Operand) -> Expr:
    return Func("log", expr(x))


def absolute(x: Operand) -> Expr:
    return Func("abs", expr(x))


def larger(x: Operand, y: Operand) -> Expr:
    return Arith("max", expr(x), expr(y))


def smaller(x: Operand, y: Operand) -> Expr:
    return Arith("min", expr(x), expr(y))


def tiles_in(e: Expr) -> tuple[Tile, ...]:
    """Tiles the expression reads, in order of appearance."""
    if isinstance(e, Read):
        return (e.tile,)
    if isinstance(e, Arith):
        return tiles_in(e.a) + tiles_in(e.b)
    if isinstance(e, Func):
        return tiles_in(e.a)
    return ()


def offsets_in(e: Expr) -> tuple[Scalar, ...]:
    """Scalars that shift the positions an expression counts."""
    if isinstance(e, Position):
        return (e.offset, e.row0)
    if isinstance(e, KeyHead):
        return (e.row0,)
    if isinstance(e, Arith):
        return offsets_in(e.a) + offsets_in(e.b)
    return offsets_in(e.a) if isinstance(e, Func) else ()


# --------------------------------------------------------------------------------------------- ops


class Op:
    """One step. `reads` and `writes` list tiles; an op that updates a tile in place has it in both."""

    reads: tuple[Tile, ...] = ()
    writes: tuple[Tile, ...] = ()


@dataclass(frozen=True)
class Load(Op):
    """dst = rows of a tensor; rows past the valid ones, and columns past the tensor's, become zero."""

    dst: Tile
    src: Access

    @property
    def writes(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.dst,)

    def __str__(self) -> str:
        return f"{self.dst} = load {self.src}"


@dataclass(frozen=True)
class Store(Op):
    """Valid rows and columns of src go to a tensor of the same dtype."""

    dst: Access
    src: Tile

    @property
    def reads(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.src,)

    def __str__(self) -> str:
        return f"store {self.src} -> {self.dst}"


@dataclass(frozen=True)
class Mma(Op):
    """dst = a @ b (b transposed if `transpose_b`), fp32; `accumulate` adds to dst."""

    dst: Tile
    a: Tile
    b: Tile
    transpose_b: bool = False
    accumulate: bool = False

    @property
    def reads(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.a, self.b, self.dst) if self.accumulate else (self.a, self.b)

    @property
    def writes(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.dst,)

    def __str__(self) -> str:
        return f"{self.dst} {'+=' if self.accumulate else '='} {self.a} @ {self.b}{'.T' if self.transpose_b else ''}"


@dataclass(frozen=True)
class RowReduce(Op):
    """dst[r] = max or sum of src[r, :]; `accumulate` includes the old dst[r]."""

    dst: Tile
    src: Tile
    kind: str
    accumulate: bool = False

    @property
    def reads(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.src, self.dst) if self.accumulate else (self.src,)

    @property
    def writes(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.dst,)

    def __str__(self) -> str:
        args = f"{self.dst}, {self.src}" if self.accumulate else f"{self.src}"
        return f"{self.dst} = row_{self.kind}({args})"


@dataclass(frozen=True)
class Map(Op):
    """dst = expression, element by element; dst may appear in it."""

    dst: Tile
    value: Expr

    @property
    def reads(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(tiles_in(self.value)))

    @property
    def writes(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.dst,)

    def __str__(self) -> str:
        return f"{self.dst} = {self.value}"


@dataclass(frozen=True)
class Cast(Op):
    """dst = src rounded to dst's dtype, to nearest even."""

    dst: Tile
    src: Tile

    @property
    def reads(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.src,)

    @property
    def writes(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.dst,)

    def __str__(self) -> str:
        return f"{self.dst} = {self.dst.dtype}({self.src})"


@dataclass(frozen=True)
class MaskTile(Op):
    """tile[r, c] = -inf unless key col0 + c is visible to query row0 + r, or (row0 + r) // group where rows run over a
    group of heads first; likewise key col0 + c // fold. A select: what was there does not matter."""

    tile: Tile
    interval: Interval
    row0: Scalar
    col0: Scalar
    group: Scalar | None = None
    fold: int = 1

    @property
    def reads(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.tile,)

    @property
    def writes(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.tile,)

    def __str__(self) -> str:
        low = [f"{b.at(Var('row'))}" for b in self.interval.lower]
        high = [f"{b.at(Var('row'))}" for b in self.interval.upper]
        ends = [f"col >= max({', '.join(low)})" if len(low) > 1 else f"col >= {low[0]}"] if low else []
        ends += [f"col < min({', '.join(high)})" if len(high) > 1 else f"col < {high[0]}"] if high else []
        row = f"{self.row0} + r" if self.group is None else f"({self.row0} + r) / {self.group}"
        column = "c" if self.fold == 1 else f"c / {self.fold}"
        return f"mask {self.tile} to {' and '.join(ends)}   # row = {row}, col = {self.col0} + {column}"


@dataclass(frozen=True)
class MaskHeads(Op):
    """tile[r, c] = -inf unless c % heads == head[r]: columns run over key heads first, and a row sees its own. A
    select. Unlike a `MaskTile` it applies in every trip."""

    tile: Tile
    head: Tile
    heads: int

    @property
    def reads(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.tile, self.head)

    @property
    def writes(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.tile,)

    def __str__(self) -> str:
        return f"mask {self.tile} to c % {self.heads} == {self.head}"


@dataclass(frozen=True)
class Phase:
    """Trips up to `stop` (from where the phase before ended); `masked` says whether their `MaskTile` ops apply."""

    stop: Scalar
    masked: bool


@dataclass(frozen=True)
class Loop(Op):
    """body for trip var = 0 .. trips - 1, in order. Outside the masked phases a `MaskTile` in the body is the identity,
    so a backend may leave it out there. `full_after_first`: loads behind the first trip have all rows of their tile."""

    var: Var
    trips: Scalar
    body: tuple[Op, ...]
    phases: tuple[Phase, ...]
    full_after_first: bool = False


# --------------------------------------------------------------------------------------------- the program


@dataclass(frozen=True)
class Fill:
    """The rows of an output from `begin` on, along its axis "seq", belong to no task and hold `value`."""

    tensor: Tensor
    begin: Scalar
    value: float

    def __str__(self) -> str:
        places = (f"{self.begin} :" if d == "seq" else ":" for d in self.tensor.dims)
        return f"fill {self.tensor.name}[{', '.join(places)}] with {self.value:g}"


@dataclass(frozen=True)
class Program:
    """`body` runs for every point of `axes` (name, extent); `lets` are task scalars, each may use those before it.
    A task whose `rows` (a let) is not positive has nothing to do. `ragged`: an axis and, in terms of the lets, how far
    it has tasks with rows; `axes` has the upper bound. `fills` are done once, at any time."""

    name: str
    axes: tuple[tuple[Var, Scalar], ...]
    tensors: tuple[Tensor, ...]
    lets: tuple[tuple[Var, Scalar], ...]
    body: tuple[Op, ...]
    fills: tuple[Fill, ...] = ()
    ragged: tuple[Var, Scalar] | None = None

    def sizes(self) -> tuple[str, ...]:
        """Run-time sizes the program needs, in a fixed order."""
        names: dict[str, None] = {}
        for tensor in self.tensors:
            for dim in tensor.shape:
                names.update(dict.fromkeys(sorted(dim.free())))
        for _, extent in self.axes:
            names.update(dict.fromkeys(sorted(extent.free())))
        bound = {v.name for v, _ in self.axes} | {v.name for v, _ in self.lets}
        for _, value in self.lets:
            names.update(dict.fromkeys(sorted(value.free() - bound)))
        return tuple(names)

    def tiles(self) -> tuple[Tile, ...]:
        """Every tile, in order of first use."""
        return tuple(dict.fromkeys(t for op in walk(self.body) for t in (*op.writes, *op.reads)))

    def __str__(self) -> str:
        lines = [f"program {self.name}"]
        for t in self.tensors:
            dims = ", ".join(f"{d}={s}" for d, s in zip(t.dims, t.shape))
            lines.append(f"  {'out' if t.output else 'in '} {t.name}[{dims}] {t.dtype}")
        lines += [f"  {fill}" for fill in self.fills]
        lines += [f"  task {v} in {n}" for v, n in self.axes]
        lines += [f"  let {v} = {s}" for v, s in self.lets]
        tiles = (f"{t}[{', '.join(map(str, t.shape))}] {t.dtype}" for t in self.tiles())
        lines += textwrap.wrap("tiles " + "; ".join(tiles), 110, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines + format_ops(self.body, "  "))


def walk(ops: Iterable[Op]) -> Iterator[Op]:
    """Every op, loops' bodies included (and not the loops themselves)."""
    for op in ops:
        if isinstance(op, Loop):
            yield from walk(op.body)
        else:
            yield op


def format_ops(ops: Iterable[Op], indent: str) -> list[str]:
    """Readable lines for a list of ops."""
    lines = []
    for op in ops:
        if isinstance(op, Loop):
            masks = ", ".join(f"{'masked' if p.masked else 'unmasked'} to {p.stop}" for p in op.phases)
            lines.append(f"{indent}for {op.var} in 0 .. {op.trips}   # {masks}")
            lines += format_ops(op.body, indent + "  ")
        else:
            lines.append(f"{indent}{op}")
    return lines
