"""Loads and stores: how a kernel reaches rows in device memory.

TMA copies boxes of consecutive rows and clips them at the tensor's own end alone. A box may therefore reach past the
rows of an access, into a neighbour's or into a cache's unused bytes; what that does to a tile is said here too.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Union

from fa_multi.scalars import Const, minimum
from fa_multi.tiles import Access, Fill, Load, Mma, Program, Store, Tile, walk

from .emit_ops import index, parallel
from .printing import Lines, Names, bracketed, scalar_text, tensor_name

WARP, VECTOR = 32, 8  # threads, and elements of 16 bits that a thread moves at once
GATHERED = 8  # of those moves, under way together
SWIZZLE_ROWS = 8  # a box of so many rows keeps the pattern of a swizzled tile


def is_plain(access: Access, tile: Tile, program: Program) -> bool:
    """Is the access one block of consecutive rows, clipped by the tensor's own end alone? Then one copy does it."""
    a = access
    if a.begin != Const(0) or a.group is not None or a.table is not None or len(tile.shape) != 2:
        return False
    size = a.tensor.shape[a.tensor.dims.index("seq")]
    rows = next((value for v, value in program.lets if v == a.rows), a.rows)
    return rows == minimum(size - a.row0, tile.shape[0])


def box_rows(access: Access, tile: Tile) -> int:
    """Rows of the boxes that make up the tile; 0 where no box does (rows that run over heads, pages of odd sizes)."""
    if access.group is not None:
        return 0
    if access.table is None:
        return tile.shape[0]
    rows = math.gcd(access.page_size, tile.shape[0])
    return 0 if rows % SWIZZLE_ROWS else rows


def panel_columns(tile: Tile) -> int:
    """Columns of a panel of the tile's layout in shared memory: panels lie one behind the other, all rows high, and a
    box of fewer rows is one panel wide."""
    return 32 if tile.shape[1] % 64 else 64


def unclean(program: Program) -> dict[Tile, Load]:
    """Tiles whose rows past the access must be cleared on chip, by their load. A row along the sum of a product enters
    every result, so that even a probability of 0 would make NaN of a NaN there; other rows stay by themselves, and are
    masked or not stored."""
    summed = {op.b for op in walk(program.body) if isinstance(op, Mma) and not op.transpose_b}
    loads = (op for op in walk(program.body) if isinstance(op, Load))
    return {op.dst: op for op in loads if op.dst in summed and not is_plain(op.src, op.dst, program)}


# --------------------------------------------------------------------------------------------- text


Columns = tuple[Union[int, str], Union[int, str]]


def box_text(access: Access, rows: tuple[str, int], columns: Columns, names: Names) -> str:
    """A box: so many rows from the tile's row `rows[0]` on, and a range of columns. Columns past the tensor's read as
    zero and are not written. Of a pool of pages, it is the box number `n` of the tile, see `read_table`."""
    a, (first, count) = access, rows
    row = scalar_text(a.row0, names)
    place = _places(a, names) | {"dim": f"{columns[0]}:{columns[1]}"}
    if a.table is not None:
        row = row if first == "0" else f"{row} + {first}"
        slot = "0" if count == a.page_size else f"T.truncmod({row}, {a.page_size})"
        place |= {"page": "pages[n]" if first != "0" else "pages[0]", "slot": f"{slot}:{slot} + {count}"}
    else:
        begin = scalar_text(a.begin, names)
        row = row if begin == "0" else f"{begin} + {row}"
        place |= {"seq": f"{row}:{row} + {count}"}
    return f"{tensor_name(a.tensor.name)}[{', '.join(place[d] for d in a.tensor.dims)}]"


def block_text(access: Access, tile: Tile, names: Names, columns: tuple[int, int] | None = None) -> str:
    """All rows of a tile whose rows are consecutive, as wide as the tile or `columns` of it."""
    return box_text(access, ("0", tile.shape[0]), columns or (0, tile.shape[1]), names)


def boxes(op: Load) -> int:
    """Boxes of a tile."""
    return op.dst.shape[0] // box_rows(op.src, op.dst)


def read_table(lines: Lines, op: Load, names: Names) -> None:
    """The pages of a tile's boxes, into `pages`. All are read before any is needed, since each takes long; entries past
    the rows are left alone, they may hold anything."""
    a, box = op.src, box_rows(op.src, op.dst)
    row = scalar_text(a.row0, names)
    with lines.block(f"for n in T.unroll({boxes(op)}):"), lines.block(f"if n * {box} < {scalar_text(a.rows, names)}:"):
        lines.add(f"pages[n] = {_page(a, f'{row} + n * {box}', names)}")


def element_text(access: Access, names: Names, divided: bool = False, column: str = "c") -> str:
    """Element (r, column) of an access of any kind; `divided`: see `divided_rows`."""
    a = access
    row = f"{scalar_text(a.row0, names)} + r"
    place = _places(a, names)
    if a.table is not None:
        place |= {"page": _page(a, row, names), "slot": f"T.truncmod({row}, {a.page_size})"}
    elif a.group is not None:
        seq, head = _position_and_head(a, names)
        row, head = ("row_seq[r]", "row_head[r]") if divided else (seq, head)
        place |= {"head": f"{place['head']} + {head}"}
    begin = scalar_text(a.begin, names)
    place |= {"seq": row if begin == "0" else f"{begin} + {row}", "dim": column}
    return f"{tensor_name(a.tensor.name)}[{', '.join(place[d] for d in a.tensor.dims)}]"


def _position_and_head(a: Access, names: Names) -> tuple[str, str]:
    """Where row r of a group of heads lies."""
    assert a.group is not None
    row, group = f"{scalar_text(a.row0, names)} + r", scalar_text(a.group, names)
    return f"T.truncdiv({row}, {group})", f"T.truncmod({row}, {group})"


def divided_rows(program: Program) -> int:
    """Rows of the result whose rows run over a group of heads, 0 where there is none. Where they lie takes a division,
    which is done once per row, into `row_seq` and `row_head`, and not once per element."""
    stores = (op for op in walk(program.body) if isinstance(op, Store))
    return max((op.src.shape[0] for op in stores if _divides(op)), default=0)


def _divides(op: Store) -> bool:
    return op.dst.group is not None and len(op.src.shape) == 2


def _page(a: Access, row: str, names: Names) -> str:
    assert a.table is not None
    return f"{tensor_name(a.table.name)}[{scalar_text(a.batch, names)}, T.truncdiv({row}, {a.page_size})]"


def _places(a: Access, names: Names) -> dict[str, str]:
    place = {"batch": scalar_text(a.batch, names), "head": scalar_text(a.head, names)}
    return place | ({"split": scalar_text(a.split, names)} if a.split is not None else {})


def valid_text(access: Access, tile: Tile, names: Names) -> str:
    """Is element (r, c) of the tile one of the access?"""
    rows = f"r < {scalar_text(access.rows, names)}"
    width = access.tensor.shape[-1] if access.tensor.dims[-1] == "dim" else None
    if len(tile.shape) == 2 and isinstance(width, Const) and width.value < tile.shape[1]:
        return f"T.And({rows}, c < {width.value})"
    return rows


def load_elements(lines: Lines, op: Load, names: Names) -> None:
    """A tile element by element, rows past the access as zero."""
    valid, element = valid_text(op.src, op.dst, names), element_text(op.src, names)
    with lines.block(parallel(op.dst)):
        lines.add(f'{index(op.dst)} = T.if_then_else({valid}, {element}, T.cast(0, "{op.dst.dtype}"))')


def gather_rows(lines: Lines, op: Load, place: str, names: Names) -> None:
    """The rows of an access by one warp, 8 elements a thread, to element (r, column + c) of shared memory, through
    `gathered`, so that loads are under way together. Rows past the access keep what was there: a row of queries is
    alone with itself."""
    chunks, width = op.dst.shape[1] // VECTOR, op.src.tensor.shape[-1]
    rows, element = scalar_text(op.src.rows, names), element_text(op.src, names, column="column + c")
    if width != Const(op.dst.shape[1]):
        element = f'T.if_then_else(column < {width}, {element}, T.cast(0, "{op.dst.dtype}"))'

    def move(text: str) -> None:
        with lines.block(f"for n in T.unroll({GATHERED}):"):
            lines.add(f"chunk = (step * {GATHERED} + n) * {WARP} + thread % {WARP}")
            lines.add(f"r = T.truncdiv(chunk, {chunks})", f"column = T.truncmod(chunk, {chunks}) * {VECTOR}")
            with lines.block(f"if r < {rows}:"), lines.block(f"for c in T.vectorized({VECTOR}):"):
                lines.add(text)

    with lines.block(f"for step in T.serial(T.ceildiv({bracketed(rows)} * {chunks}, {GATHERED * WARP})):"):
        move(f"gathered[n, c] = {element}")
        move(f"{place} = gathered[n, c]")
    lines.add("T.fence_proxy_async()")


def store_elements(lines: Lines, op: Store, source: str, names: Names) -> None:
    """The rows of the access alone, element by element, rounded on the way."""
    divided = _divides(op)
    if divided:
        seq, head = _position_and_head(op.dst, names)
        with lines.block(f"for r in T.Parallel({op.src.shape[0]}):"):
            lines.add(f"row_seq[r] = {seq}", f"row_head[r] = {head}")
    with lines.block(parallel(op.src)), lines.block(f"if {valid_text(op.dst, op.src, names)}:"):
        lines.add(f"{element_text(op.dst, names, divided)} = {index(op.src, source)}")


def declare_divided_rows(lines: Lines, program: Program) -> None:
    rows = divided_rows(program)
    if rows:
        lines.add(*(f'{name} = T.alloc_fragment(({rows},), "int32")' for name in ("row_seq", "row_head")))


def fill_rows(lines: Lines, fill: Fill, lane: str, lanes: int, block: str, blocks: str) -> None:
    """Rows that belong to no task: block after block takes one, its lanes take the elements."""
    t, end = fill.tensor, scalar_text(fill.tensor.shape[fill.tensor.dims.index("seq")], {})
    size = {d: scalar_text(n, {}) for d, n in zip(t.dims, t.shape)}
    value = "0" if fill.value == 0 else f'{"-" * (fill.value < 0)}T.infinity("{t.dtype}")'
    first, width = f"{scalar_text(fill.begin, {})} + {block}", size.get("dim")
    elements = f"{size['head']} * {width}" if width else size["head"]
    place = {"split": "part", "batch": "0", "seq": "row", "head": f"T.truncdiv(x, {width})" if width else "x"}
    place |= {"dim": f"T.truncmod(x, {width})"}

    def loop(name: str, count: str) -> AbstractContextManager[None]:
        return lines.block(f"for {name} in T.serial({count}):")

    with loop("n", f"T.max(T.ceildiv({end} - ({first}), {blocks}), 0)"):
        lines.add(f"row = {first} + n * {bracketed(blocks)}")
        with loop("part", size.get("split", "1")), loop("step", f"T.ceildiv({elements}, {lanes})"):
            lines.add(f"x = step * {lanes} + {lane}")
            with lines.block(f"if x < {elements}:"):
                lines.add(
                    f'{tensor_name(t.name)}[{", ".join(place[d] for d in t.dims)}] = T.cast({value}, "{t.dtype}")'
                )
