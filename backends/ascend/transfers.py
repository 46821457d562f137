"""Loads and stores: between device memory and the buffers of a core.

Where rows of a tile lie in pieces, one piece per page of keys or per position of a group of heads, the pieces are
copied one by one. A matrix tile in L1 is laid out in blocks of 16 columns, each all rows high. The `pto` copy clears
what its tile has behind the rows it copied, and at a row offset that runs on into the next block of columns; so there
the pieces are copied block by block, from the first to the last, and the last one runs into spare bytes. The
`ascendc` copy clears only at row 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_multi.scalars import Const
from fa_multi.tiles import Access as TensorAccess
from fa_multi.tiles import Load, Store

from .instructions import Access, Buffer, Instr, Loop, Node
from .limits import FRACTAL
from .views import View, factor, text

if TYPE_CHECKING:
    from .lowering import _RoleLowering

VECTOR_CORES = 2


class Transfers:
    """Copies of one role; writes them into the role's current list."""

    def __init__(self, lowering: _RoleLowering, target: str):
        self.low, self.target = lowering, target

    # ---- whole tiles -----------------------------------------------------------------------------------------------

    def load(self, op: Load) -> None:
        if self.low.cube:
            self._load_cube(op)
            return
        dst, half = self.low.tile(op.dst), op.dst.shape[0] // VECTOR_CORES
        self._half(op.src, half)
        view = self.low.views[op.src.tensor.name]
        if view.form == "flat":
            copy = f"T.copy({self._flat(op.src, view, half)}, {dst.name})"
        else:
            region = view.region(self._places(op.src), "r", "n", "0", str(view.columns))
            copy = f"T.copy({region}, {dst.name}[0:n, 0:{view.columns}])"
        # a count of 0 would mean all; what lies behind the rows never meets them and is not stored
        self.low.block("n > 0", [Instr(copy, (Access("MTE2", dst, True),))])

    def _load_cube(self, op: Load) -> None:
        dst, a = self.low.tile(op.dst), op.src
        view = self.low.views[a.tensor.name]
        self.low.local("n", text(a.rows))
        self.low.local("r", text(a.row0 if a.group is not None else a.begin + a.row0))
        if a.group is not None or a.table is not None:
            self._load_pieces(a, view, dst)
            return
        region = view.region(self._places(a), "r", "n", "0", str(view.columns))
        self.low.emit(f"T.copy({region}, {dst.name}[0:n, 0:{view.columns}])", Access("MTE2", dst, True))

    def store(self, op: Store) -> None:
        src, half = self.low.tile(op.src), op.src.shape[0] // VECTOR_CORES
        a, view = op.dst, self.low.views[op.dst.tensor.name]
        self._half(a, half)
        if view.form == "flat":
            copy = f"T.copy({src.name}, {self._flat(a, view, half)})"
            self.low.block("n > 0", [Instr(copy, (Access("MTE3", src, False),))])
            return
        if len(src.shape) == 1:  # each value to a row of its own: spread to 32 bytes, where a copy may start
            src = self.low.vector.spread(src)
        read = Access("MTE3", src, False)
        if a.group is None:
            region = view.region(self._places(a), "r", "n", "0", str(view.columns))
            nodes: list[Node] = [Instr(f"T.copy({src.name}[0:n, 0:{view.columns}], {region})", (read,))]
        else:
            nodes = self._pieces(a)
            body = self._piece(a, "g")
            rows = f"{src.name}[piece_lo:piece_lo + piece_n, 0:{view.columns}]"
            body.append(Instr(f"T.copy({rows}, {self._piece_region(a, view, '0', str(view.columns))})", (read,)))
            nodes.append(Loop("g", "piece_count", body))
        self.low.block("n > 0", nodes)

    def _half(self, a: TensorAccess, half: int) -> None:
        """n: rows that this vector core has; r: the first of them, along the sequence (with a group: in the task)."""
        self.low.local("n", f"T.max(T.min({text(a.rows)} - vid * {half}, {half}), 0)")
        self.low.local("r", f"{text(a.row0 if a.group is not None else a.begin + a.row0)} + vid * {half}")

    def _places(self, a: TensorAccess) -> dict[str, str]:
        places = {"batch": factor(a.batch), "head": factor(a.head)}
        return places if a.split is None else {**places, "split": factor(a.split)}

    def _flat(self, a: TensorAccess, view: View, half: int) -> str:
        """n consecutive values."""
        index, places = "0", self._places(a)
        for axis, size in zip(view.tensor.dims, view.tensor.shape):
            index = f"({index}) * {factor(size)} + {places.get(axis, 'r')}" if index != "0" else places[axis]
        at = self.low.local("at", f"{index} + n - 1")
        return f"{view.argument}[{at}, 1 - n:1 - n + {half}]"

    # ---- pieces ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _size(a: TensorAccess) -> str:
        """Rows of a whole piece."""
        return str(a.page_size) if a.group is None else factor(a.group)

    def _named(self, name: str, value: str) -> Instr:
        self.low.locals[name] = "int32"
        return Instr(f"{name} = {value}")

    def _pieces(self, a: TensorAccess) -> list[Node]:
        """The pieces that rows [r, r + n) touch: piece_first and the piece_count from it on."""
        size = self._size(a)
        return [
            self._named("piece_first", f"r // {size}"),
            self._named("piece_count", f"(r + n - 1) // {size} - piece_first + 1"),
        ]

    def _piece(self, a: TensorAccess, number: str) -> list[Node]:
        """Of one piece: rows [piece_lo, piece_lo + piece_n) of the tile are those from piece_row on in the piece."""
        size = self._size(a)
        nodes: list[Node] = [
            self._named("piece", f"piece_first + {number}" if number != "0" else "piece_first"),
            self._named("piece_lo", f"T.max(piece * {size} - r, 0)"),
            self._named("piece_n", f"T.min(piece * {size} + {size} - r, n) - piece_lo"),
            self._named("piece_row", f"r + piece_lo - piece * {size}"),
        ]
        if a.table is not None:
            nodes.append(self._named("page", f"{a.table.name}[{text(a.batch)}, piece]"))
        return nodes

    def _piece_region(self, a: TensorAccess, view: View, first: str, columns: str) -> str:
        if a.table is not None:
            places, row = {"page": "page", "head": factor(a.head)}, "piece_row"
            return view.region(places, row, "piece_n", first, columns)
        position = f"({text(a.begin)} + piece)" if a.begin != Const(0) else "piece"
        places = {**self._places(a), "seq": position}
        return view.region(places, f"{factor(a.head)} + piece_row", "piece_n", first, columns)

    def in_pieces(self, a: TensorAccess, height: int) -> bool:
        """Whether a tile of that height may meet more than one piece."""
        return a.group is not None or (a.table is not None and a.page_size % height != 0)

    def blocks(self, dst: Buffer) -> Buffer:
        """A matrix tile in L1 as its blocks of columns one below the other, and one spare block."""
        shape = ((dst.shape[1] // FRACTAL + 1) * dst.shape[0], FRACTAL)
        return self.low.memory.buffer(f"{dst.name}_blocks", dst.memory, shape, dst.dtype, over=dst.name)

    def _load_pieces(self, a: TensorAccess, view: View, dst: Buffer) -> None:
        write = Access("MTE2", dst, True)
        self.low.nodes += [*self._pieces(a), *self._piece(a, "0")]
        whole = self._piece_region(a, view, "0", str(view.columns))
        self.low.emit(f"T.copy({whole}, {dst.name}[0:piece_n, 0:{view.columns}])", write)
        if not self.in_pieces(a, dst.shape[0]):
            return
        if self.target == "ascendc":
            rows = f"{dst.name}[piece_lo:piece_lo + piece_n, 0:{view.columns}]"
            rest = [*self._piece(a, "(g + 1)"), Instr(f"T.copy({whole}, {rows})", (write,))]
            self.low.block("piece_count > 1", [Loop("g", "piece_count - 1", rest)])
            return
        self.low.block("piece_count > 1", [self._by_columns(a, view, dst)])

    def _by_columns(self, a: TensorAccess, view: View, dst: Buffer) -> Node:
        """All pieces, the first one again, block of columns by block of columns."""
        height = dst.shape[0]
        count = -(-view.columns // FRACTAL)
        blocks = self.blocks(dst)
        width = str(FRACTAL)
        body = self._piece(a, "g")
        if view.columns % FRACTAL:
            body.append(self._named("width", f"T.min({view.columns} - c * {FRACTAL}, {FRACTAL})"))
            width = "width"
        body.append(self._named("at", f"c * {height} + piece_lo"))
        region = self._piece_region(a, view, f"c * {FRACTAL}", width)
        copy = f"T.copy({region}, {blocks.name}[at:at + {height}, 0:{FRACTAL}])"
        body.append(Instr(copy, (Access("MTE2", dst, True),)))
        return Loop("c", str(count), [Loop("g", "piece_count", body)])
