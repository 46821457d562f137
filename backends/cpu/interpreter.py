"""Executes a tile program with torch. Tasks of one block of rows run together, as the leading axis of every tile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fa_multi.masks import Bound
from fa_multi.tiles import (
    Access,
    Arith,
    Cast,
    Expr,
    Func,
    HeadValue,
    KeyHead,
    Load,
    Loop,
    Map,
    MaskHeads,
    MaskTile,
    Mma,
    Number,
    Op,
    Position,
    Program,
    Read,
    RowReduce,
    Store,
    Tile,
    offsets_in,
    tiles_in,
)

Env = dict[str, Any]
Tiles = dict[Tile, torch.Tensor]


def execute(
    program: Program, sizes: Mapping[str, int], tensors: Mapping[str, torch.Tensor], tile_elements: int
) -> None:
    """Run `program` for every task. `sizes` gives the run-time sizes, `tensors` the arguments by name, with the axes of
    the program's tensors. At most about `tile_elements` elements of the largest tile are live at once."""
    names = [axis.name for axis, _ in program.axes]
    extents = [int(extent.eval(sizes)) for _, extent in program.axes]
    together = _uniform_axes(program)
    outer = [range(n) if name not in together else (None,) for name, n in zip(names, extents)]
    grid = torch.cartesian_prod(*[torch.arange(n) for name, n in zip(names, extents) if name in together])
    grid = grid.reshape(-1, len(together))
    largest = max(t.shape[0] * t.shape[-1] for t in program.tiles())
    step = max(1, tile_elements // largest)
    lengths = {name: x for name, x in tensors.items() if x.dtype == torch.int32}
    for fill in program.fills:
        target, axis = tensors[fill.tensor.name], fill.tensor.dims.index("seq")
        begin = int(fill.begin.eval({**sizes, **lengths}))
        target.narrow(axis, begin, target.shape[axis] - begin).fill_(fill.value)
    for point in itertools.product(*outer):
        for chunk in grid.split(step):
            env: Env = {**sizes, **lengths, **{n: x for n, x in zip(names, point) if x is not None}}
            env.update({n: chunk[:, i] for i, n in enumerate(together)})
            for var, value in program.lets:
                env[var.name] = value.eval(env)
            if env["rows"] > 0:
                _Task(env, tensors, len(chunk)).run(program.body)


def _uniform_axes(program: Program) -> list[str]:
    """Axes that only choose where tiles lie, and no bound, row count or mask: their tasks can run side by side."""
    lets = {var.name: value.free() for var, value in program.lets}

    def roots(names: frozenset[str]) -> set[str]:
        return {root for n in names for root in (roots(lets[n]) if n in lets else {n})}

    shaping: set[str] = set()

    def visit(ops: Sequence[Op]) -> None:
        for op in ops:
            if isinstance(op, Loop):
                shaping.update(roots(op.trips.free()))
                visit(op.body)
            elif isinstance(op, MaskTile):
                bounds = (*op.interval.lower, *op.interval.upper)
                for s in (op.row0, op.col0, *(b.offset for b in bounds)):
                    shaping.update(roots(s.free()))
            elif isinstance(op, Map):
                for s in offsets_in(op.value):
                    shaping.update(roots(s.free()))
            elif isinstance(op, (Load, Store)):
                access = op.src if isinstance(op, Load) else op.dst
                shaping.update(roots(access.row0.free() | access.rows.free() | access.begin.free()))

    visit(program.body)
    return [axis.name for axis, _ in program.axes if axis.name not in shaping]


class _Task:
    """One block of rows, for `count` tasks side by side; a tile is a tensor (count, rows[, cols])."""

    def __init__(self, env: Env, tensors: Mapping[str, torch.Tensor], count: int) -> None:
        self.env, self.tensors, self.count = env, tensors, count
        self.tiles: Tiles = {}
        self.full = False  # must loads have all their rows?

    def run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if isinstance(op, Loop):
                for trip in range(int(op.trips.eval(self.env))):
                    self.env[op.var.name] = trip
                    self.full = op.full_after_first and trip > 0
                    self.run(op.body)
                self.full = False
            else:
                _OPS[type(op)](self, op)

    def rows(self, access: Access) -> tuple[int, int]:
        return int(access.row0.eval(self.env)), int(access.rows.eval(self.env))

    def index(self, access: Access) -> tuple[Any, ...]:
        """Index of the valid rows of every task: (count, rows) of them, or (count, rows, cols)."""
        row0, rows = self.rows(access)
        begin = int(access.begin.eval(self.env))
        batch, head = access.batch.eval(self.env), access.head.eval(self.env)
        split = None if access.split is None else access.split.eval(self.env)
        places = {"batch": batch, "head": head, "split": split, "dim": slice(None)}
        places["seq"] = slice(begin + row0, begin + row0 + rows)
        row = torch.arange(row0, row0 + rows)
        if access.group is not None:
            group = int(access.group.eval(self.env))
            places = {name: _column(x) for name, x in places.items()}
            places["seq"], places["head"] = begin + row // group, _column(head) + row % group
        if access.table is not None:
            pages = self.tensors[access.table.name][_column(batch), row // access.page_size].long()
            places |= {"page": pages, "slot": row % access.page_size, "head": _column(head)}
        # torch puts the tasks' axis first if every other index is a tensor too, a plain int would not do
        chosen = (places[d] for d in access.tensor.dims)
        return tuple(torch.tensor([x]) if isinstance(x, int) else x for x in chosen)

    def load(self, op: Load) -> None:
        values = self.tensors[op.src.tensor.name][self.index(op.src)]
        if self.full and values.shape[1] != op.dst.shape[0]:
            raise AssertionError(f"a trip after the first loads {values.shape[1]} rows of {op.dst.shape[0]}: {op}")
        if values.shape[1:] != op.dst.shape or len(values) != self.count:
            tile = values.new_zeros((self.count, *op.dst.shape))
            tile[(slice(None), *(slice(n) for n in values.shape[1:]))] = values
            values = tile
        self.tiles[op.dst] = values

    def store(self, op: Store) -> None:
        _, rows = self.rows(op.dst)
        target = self.tensors[op.dst.tensor.name]
        values = self.tiles[op.src][:, :rows]
        target[self.index(op.dst)] = values[:, :, : target.shape[-1]] if values.dim() == 3 else values

    def mma(self, op: Mma) -> None:
        a, b = self.tiles[op.a].float(), self.tiles[op.b].float()
        b = b.transpose(1, 2) if op.transpose_b else b
        if op.accumulate:
            self.tiles[op.dst].baddbmm_(a, b)
        else:
            self.tiles[op.dst] = torch.bmm(a, b)

    def mask(self, op: MaskTile) -> None:
        tile = self.tiles[op.tile]
        row = int(op.row0.eval(self.env)) + torch.arange(tile.shape[1])[:, None]
        row = row if op.group is None else row // int(op.group.eval(self.env))
        col = int(op.col0.eval(self.env)) + torch.arange(tile.shape[2])[None, :] // op.fold
        hidden = torch.zeros(tile.shape[1:], dtype=torch.bool)
        for bound in op.interval.lower:
            hidden |= col < self.end(bound, row)
        for bound in op.interval.upper:
            hidden |= col >= self.end(bound, row)
        if hidden.any():
            tile.masked_fill_(hidden, float("-inf"))

    def mask_heads(self, op: MaskHeads) -> None:
        tile = self.tiles[op.tile]
        tile.masked_fill_(torch.arange(tile.shape[2]) % op.heads != self.tiles[op.head].unsqueeze(-1), float("-inf"))

    def end(self, bound: Bound, row: torch.Tensor) -> torch.Tensor:
        value = bound.slope * row + int(bound.offset.eval(self.env))
        return value if bound.step == 1 else value.clamp(min=0) // bound.step * bound.step

    def reduce(self, op: RowReduce) -> None:
        src = self.tiles[op.src]
        new = src.amax(-1) if op.kind == "max" else src.sum(-1)
        if op.accumulate:
            old = self.tiles[op.dst]
            new = torch.maximum(old, new) if op.kind == "max" else old + new
        self.tiles[op.dst] = new

    def cast(self, op: Cast) -> None:
        self.tiles[op.dst] = self.tiles[op.src].to(getattr(torch, op.dst.dtype))

    def map(self, op: Map) -> None:
        shape = (self.count, *op.dst.shape)
        out = self.tiles.get(op.dst)
        value = self.evaluate(op.value, len(shape), out if out is not None and out.shape == shape else None, op.dst)
        if isinstance(value, float):
            value = torch.full(shape, value, dtype=torch.float32)
        elif any(value is t for other, t in self.tiles.items() if other != op.dst):
            value = value.clone()  # tiles are updated in place, so no two may share memory
        self.tiles[op.dst] = value

    def evaluate(self, e: Expr, dim: int, out: torch.Tensor | None, dst: Tile) -> Any:
        """Value of an expression, written to `out` where that is safe (full tiles are large: no temporaries)."""
        if isinstance(e, Number):
            return e.value
        if isinstance(e, Read):
            tile = self.tiles[e.tile]
            return tile if tile.dim() == dim else tile.unsqueeze(-1)
        if isinstance(e, Func):
            a = self.evaluate(e.a, dim, out, dst)
            return _FUNCTIONS[e.name](a, out=out if out is not None and a.shape == out.shape else None)
        if isinstance(e, HeadValue):
            return self.head_value(e, dim, dst)
        if isinstance(e, Position):
            return self.position(e, dst)
        if isinstance(e, KeyHead):
            return self.key_head(e, dst)
        assert isinstance(e, Arith)
        in_place = out is not None and dst not in tiles_in(e.b)
        a = self.evaluate(e.a, dim, out if in_place else None, dst)
        b = self.evaluate(e.b, dim, None, dst)
        if isinstance(a, float) or (e.op in ("max", "min") and isinstance(b, float)):
            a, b = (torch.tensor(x) if isinstance(x, float) else x for x in (a, b))
        fits = out is not None and isinstance(a, torch.Tensor) and a.shape == out.shape
        return _ARITHMETIC[e.op](a, b, out=out if fits else None)

    def head_value(self, e: HeadValue, dim: int, dst: Tile) -> torch.Tensor:
        """(count or 1, rows or 1[, 1])"""
        index = [_column(i.eval(self.env)) for i in e.index]
        if e.group is not None:
            rows = int(self.env["rows"])
            row = int(e.row0.eval(self.env)) + torch.arange(rows)
            index[-1] = index[-1] + row % int(e.group.eval(self.env))
        value = self.tensors[e.tensor.name][tuple(index)].reshape(-1, 1 if e.group is None else rows)
        if e.group is not None:  # rows past the valid ones belong to no head; any number does
            value = torch.nn.functional.pad(value, (0, dst.shape[0] - rows))
        return value if dim == 2 else value.unsqueeze(-1)

    def position(self, e: Position, dst: Tile) -> torch.Tensor:
        """(rows, 1) or (cols,), whatever tile it is for."""
        offset = int(e.offset.eval(self.env))
        index = torch.arange(dst.shape[e.axis])
        if e.group is not None:
            index = (int(e.row0.eval(self.env)) + index) // int(e.group.eval(self.env))
        return (index + offset).float()[:, None] if e.axis == 0 else (index + offset).float()

    def key_head(self, e: KeyHead, dst: Tile) -> torch.Tensor:
        """(count, rows)"""
        group = int(e.group.eval(self.env))
        row = int(e.row0.eval(self.env)) + torch.arange(dst.shape[0])
        return (row % group // (group // e.heads)).float().expand(self.count, -1).clone()


def _column(index: Any) -> Any:
    """An index per task as a column, to be broadcast against rows."""
    return index[:, None] if isinstance(index, torch.Tensor) else index


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"exp": torch.exp, "log": torch.log, "abs": torch.abs}
_ARITHMETIC: dict[str, Callable[..., torch.Tensor]] = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "/": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
}
_OPS: dict[type, Callable[[_Task, Any], None]] = {
    Load: _Task.load,
    Store: _Task.store,
    Mma: _Task.mma,
    MaskTile: _Task.mask,
    MaskHeads: _Task.mask_heads,
    RowReduce: _Task.reduce,
    Cast: _Task.cast,
    Map: _Task.map,
}
