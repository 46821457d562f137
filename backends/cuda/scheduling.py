"""Which block does which tasks, in the persistent role form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_multi.addressing import BLOCK, GROUP, B, H
from fa_multi.roles import Acquire, Await, Channel, Roles
from fa_multi.tiles import Load, Loop, Program

from . import emit_ops as ops
from .limits import L2_BYTES
from .printing import Lines, bracketed, scalar_text

if TYPE_CHECKING:
    from .emit_roles import _Role

BLOCKS = "blocks"  # how many blocks there are: an argument behind the sizes
TICKETS = 2  # numbers in device memory: tasks given out, and blocks that are done


def queued(roles: Roles) -> Channel | None:
    """The channel that tasks travel with, if they come from a queue: where batch entries have unequal numbers of tasks,
    and one role loads, something once per task."""
    program = roles.program
    if program.ragged is None or program.ragged[0] != program.axes[-1][0] or len(roles.roles) > 2:
        return None
    return next((c for c in roles.channels if not c.per_trip), None)


class Fixed:
    """Blocks take every so many-th unit. Blocks of rows run fastest, then heads, then batch entries, so that tasks that
    run together share keys. Tasks of unequal length (the trips depend on the block of rows) go in pairs, longest with
    shortest, which balances the blocks without a counter in memory."""

    arguments: tuple[str, ...] = ()

    def __init__(self, program: Program, paired: bool) -> None:
        self.program, self.paired = program, paired
        *self.outer, (self.axis, self.extent) = program.axes

    def declare(self, lines: Lines) -> None:
        scalars = ops.TaskScalars(self.program, ())
        scalars.require(lines, [self.extent], 'T.alloc_var("int32", init={value})')
        count = f"{self.axis}_count"
        # Plain names, computed anew where they are used: variables would hold registers through the loop over keys.
        lines.add(f"{count} = {scalar_text(self.extent, {})}")
        lines.add(f"units = {f'T.truncdiv({count} + 1, 2)' if self.paired else count}")
        total = " * ".join(bracketed(scalar_text(n, {})) for _, n in self.outer)
        lines.add(f"turns = T.ceildiv(units * {total} - block, {BLOCKS})")
        names = ["unit", "line", *(["place"] if self.paired else []), *(f"over_{v}" for v, _ in self.outer[2:])]
        _declare(lines, self.program, names)

    def tasks(self, role: _Role) -> None:
        lines, axis = role.lines, self.axis
        place = "place" if self.paired else axis.name
        with lines.block("for turn in T.serial(turns):"):
            lines.add(f"unit = block + turn * {BLOCKS}")
            lines.add("line = T.truncdiv(unit, units)", f"{place} = unit - line * units")
            if not self.paired:
                role.run()
                return
            lines.add("# a middle block of rows has no partner")
            with lines.block(f"for side in T.serial(T.if_then_else(place * 2 + 1 == {axis}_count, 1, 2)):"):
                lines.add(f"{axis} = T.if_then_else(side == 0, {axis}_count - 1 - place, place)")
                role.run()

    def place(self, lines: Lines) -> None:
        """The outer axes of a unit."""
        rest = "line"
        for n, (v, extent) in reversed([*enumerate(self.outer)][1:]):
            size, over = scalar_text(extent, {}), self.outer[0][0].name if n == 1 else f"over_{v}"
            lines.add(f"{over} = T.truncdiv({rest}, {size})", f"{v} = {rest} - {over} * {bracketed(size)}")
            rest = over


class Queue:
    """Blocks draw tickets from a counter in device memory, so that no block waits for another whatever the lengths are.

    Units are numbered without gaps, batch entry by entry; within one, heads whose keys fit into the L2 together form a
    section, and in a section long tasks (late blocks of rows) come first, so that only short ones run last. The loader
    draws, and finds the batch entry by walking on from the last one. What it finds travels with `carrier`, sent
    once per task; unit -1 is the end. The last block sets the counter back for the next launch.
    """

    arguments = (f'tickets: T.Tensor(({TICKETS},), "int32")',)

    def __init__(self, program: Program, carrier: Channel) -> None:
        assert program.ragged is not None
        assert [v for v, _ in program.axes] == [B, H, BLOCK]
        self.program, self.carrier = program, carrier
        (_, self.batch), (_, self.heads), _ = program.axes
        self.extent = program.ragged[1]
        inner = (H.name, BLOCK.name)
        self.of_entry = [v for v, _ in program.lets if not any(ops.depends_on(program, v, name) for name in inner)]
        self.fields = [v.name for v in (B, H, BLOCK, *self.of_entry)]

    def declare(self, lines: Lines) -> None:
        lines.add(f'next_task = T.alloc_shared(({self.carrier.depth}, {len(self.fields) + 1}), "int32")')
        lines.add('ticket = T.alloc_local((1,), "int32")')
        _declare(lines, self.program, ["unit", "before", "here", "near", "section", "place", f"{BLOCK}_count"])

    def tasks(self, role: _Role) -> None:
        self.draw(role) if role.name == self.carrier.producer else self.receive(role)

    def draw(self, role: _Role) -> None:
        lines, slot = role.lines, role.slot(self.carrier, "0")[0]
        lines.add("unit = block", f"{B} = -1")
        with lines.block("while unit >= 0:"):
            self.seek(role)
            role.step(Acquire(self.carrier), "0")
            with lines.block("if thread == 0:"):
                lines.add(*(f"next_task[{slot}, {n}] = {name}" for n, name in enumerate(["unit", *self.fields])))
            with lines.block("if unit >= 0:"):
                role.task()
                with lines.block("if thread == 0:"):
                    lines.add("ticket[0] = T.atomic_add(tickets[0], 1, return_prev=True)")
                lines.add(f"unit = {BLOCKS} + T.shfl_sync(ticket[0], 0)")
            with lines.block("else:"):
                lines.add(f"T.barrier_arrive({self.carrier.tile}_ready[{slot}])")
        with lines.block("if thread == 0:"):
            lines.add("ticket[0] = T.atomic_add(tickets[1], 1, return_prev=True)")
            with lines.block(f"if ticket[0] == {BLOCKS} - 1:"):
                lines.add(*(f"tickets[{n}] = 0" for n in range(TICKETS)))

    def receive(self, role: _Role) -> None:
        lines, slot = role.lines, role.slot(self.carrier, "0")[0]
        with lines.block("while unit >= 0:"):
            role.step(Await(self.carrier), "0")
            lines.add(f"unit = next_task[{slot}, 0]")
            with lines.block("if unit >= 0:"):
                lines.add(*(f"{name} = next_task[{slot}, {n + 1}]" for n, name in enumerate(self.fields)))
                role.scalars.done.update(self.fields)
                role.task()

    def seek(self, role: _Role) -> None:
        """The task of a unit. `before`: units of the entries in front of b; `here`: units of b; `near`: heads of a
        section."""
        lines, batch, heads = role.lines, scalar_text(self.batch, {}), scalar_text(self.heads, {})
        lines.add("# walk on to the entry that the unit belongs to")
        with lines.block(f"while T.And(unit - before >= here, {B} < {batch}):"):
            lines.add("before = before + here", f"{B} = {B} + 1", "here = 0")
            with lines.block(f"if {B} < {batch}:"):
                role.scalars.require(lines, self.of_entry)
                lines.add(f"{BLOCK}_count = {scalar_text(self.extent, {})}", f"here = {BLOCK}_count * {heads}")
                lines.add(f"near = T.min({self.heads_near()}, {heads})")
        with lines.block(f"if {B} == {batch}:"):
            lines.add("unit = -1")
        with lines.block("else:"):
            lines.add(f"section = T.truncdiv(unit - before, near * {BLOCK}_count) * near")
            lines.add(f"place = unit - before - section * {BLOCK}_count", f"near_now = T.min(near, {heads} - section)")
            lines.add(f"{H} = section + T.truncmod(place, near_now)")
            lines.add(f"{BLOCK} = {BLOCK}_count - 1 - T.truncdiv(place, near_now)")

    def heads_near(self) -> str:
        """Query heads whose keys and values fit into the L2."""
        loop = next(op for op in self.program.body if isinstance(op, Loop))
        row = sum(op.dst.bytes // op.dst.shape[0] for op in loop.body if isinstance(op, Load))
        known = {v.name for v, _ in self.program.lets}
        keys = "len_k" if "len_k" in known else "seqlen_k"
        return f"T.max(T.truncdiv({L2_BYTES // row}, T.max({keys}, 1)), 1) * {GROUP}"

    def place(self, lines: Lines) -> None:
        """The axes are known from `seek`."""


def _declare(lines: Lines, program: Program, names: list[str]) -> None:
    names += [*(v.name for v, _ in program.axes), *(v.name for v, _ in program.lets)]
    lines.add(*(f'{name} = T.alloc_var("int32", init=0)' for name in names))
