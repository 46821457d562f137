"""Executes a tile program with torch. Tasks of one block of rows run together, as the leading axis of every tile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fa_multi.tiles import (
    Access,
    Arith,
    Cast,
    Expr,
    Func,
    Load,
    Loop,
    Map,
    MaskTile,
    Mma,
    Number,
    Op,
    Program,
    Read,
    RowReduce,
    Store,
    Tile,
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
    for point in itertools.product(*outer):
        for chunk in grid.split(step):
            env: Env = {**sizes, **{n: x for n, x in zip(names, point) if x is not None}}
            env.update({n: chunk[:, i] for i, n in enumerate(together)})
            for var, value in program.lets:
                env[var.name] = value.eval(env)
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
            elif isinstance(op, (Load, Store)):
                access = op.src if isinstance(op, Load) else op.dst
                shaping.update(roots(access.row0.free() | access.rows.free()))

    visit(program.body)
    return [axis.name for axis, _ in program.axes if axis.name not in shaping]


class _Task:
    """One block of rows, for `count` tasks side by side; a tile is a tensor (count, rows[, cols])."""

    def __init__(self, env: Env, tensors: Mapping[str, torch.Tensor], count: int) -> None:
        self.env, self.tensors, self.count = env, tensors, count
        self.tiles: Tiles = {}

    def run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if isinstance(op, Loop):
                for trip in range(int(op.trips.eval(self.env))):
                    self.env[op.var.name] = trip
                    self.run(op.body)
            else:
                _OPS[type(op)](self, op)

    def index(self, access: Access) -> tuple[list[Any], int]:
        """Index of the valid rows, and how many there are."""
        row0, rows = int(access.row0.eval(self.env)), int(access.rows.eval(self.env))
        places = {
            "batch": access.batch.eval(self.env),
            "head": access.head.eval(self.env),
            "seq": slice(row0, row0 + rows),
            "dim": slice(None),
        }
        return [places[d] for d in access.tensor.dims], rows

    def load(self, op: Load) -> None:
        index, rows = self.index(op.src)
        values = self.tensors[op.src.tensor.name][tuple(index)]
        if values.shape[1:] != op.dst.shape:
            tile = values.new_zeros((self.count, *op.dst.shape))
            tile[:, :rows, : values.shape[2]] = values
            values = tile
        self.tiles[op.dst] = values

    def store(self, op: Store) -> None:
        index, rows = self.index(op.dst)
        target = self.tensors[op.dst.tensor.name]
        values = self.tiles[op.src][:, :rows]
        if values.dim() == 3:
            target[tuple(index)] = values[:, :, : target.shape[-1]]
        else:
            target[tuple(index)] = values

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
        col = int(op.col0.eval(self.env)) + torch.arange(tile.shape[2])[None, :]
        hidden = torch.zeros(tile.shape[1:], dtype=torch.bool)
        for bound in op.interval.lower:
            hidden |= col < bound.slope * row + int(bound.offset.eval(self.env))
        for bound in op.interval.upper:
            hidden |= col >= bound.slope * row + int(bound.offset.eval(self.env))
        if hidden.any():
            tile.masked_fill_(hidden, float("-inf"))

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
        assert isinstance(e, Arith)
        in_place = out is not None and dst not in tiles_in(e.b)
        a = self.evaluate(e.a, dim, out if in_place else None, dst)
        b = self.evaluate(e.b, dim, None, dst)
        if e.op == "max" and isinstance(b, float):
            return a.clamp(min=b)
        fits = out is not None and isinstance(a, torch.Tensor) and a.shape == out.shape
        return _ARITHMETIC[e.op](a, b, out=out if fits else None)


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"exp": torch.exp, "log": torch.log}
_ARITHMETIC: dict[str, Callable[..., torch.Tensor]] = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "/": torch.div,
    "max": torch.maximum,
}
_OPS: dict[type, Callable[[_Task, Any], None]] = {
    Load: _Task.load,
    Store: _Task.store,
    Mma: _Task.mma,
    MaskTile: _Task.mask,
    RowReduce: _Task.reduce,
    Cast: _Task.cast,
    Map: _Task.map,
}
