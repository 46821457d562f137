"""The role form (Hopper): one warp loads by TMA, two or three warpgroups compute; rings of slots in shared memory with
ready and free barriers between them. Printed from the role programs, op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fa_multi.overlap import OverlappedLoop, Timed, WaitMma
from fa_multi.roles import Acquire, Await, Channel, Commit, Release, Roles, StagedLoop
from fa_multi.scalars import Const, Scalar
from fa_multi.tiles import Arith, Cast, Load, Loop, Map, MaskTile, Mma, Number, Op, Read, RowReduce, Store, Tile

from . import emit_ops as ops
from .limits import registers
from .planner import CudaPlan
from .printing import Lines, Names, scalar_text

WARP, GROUP = 32, 128  # threads
HEADER = '''"""{title}

Role form: warp 0 loads tiles by TMA, warpgroups 1 to {groups} compute. Generated; the tile program it comes from:

{program}
"""

import tilelang.language as T

PASS_CONFIGS = {{"tl.enable_fast_math": True}}


'''


def emit(roles: Roles) -> str:
    """The kernel module of the role form."""
    return _Kernel(roles).text()


def hoist_rescale(loop: OverlappedLoop, zero: frozenset[Tile]) -> OverlappedLoop:
    """Move what the output half does in front of its product (rescaling the accumulator) to the end of the trip before:
    the product that last wrote the accumulator is done there, and nothing delays the output product any more. At the
    start there is nothing to rescale in tiles that are `zero`."""
    late = [t.step for t in loop.steady if t.ahead == 0]
    moved = [op for op in late[: next(i for i, op in enumerate(late) if isinstance(op, Mma))] if isinstance(op, Map)]
    steady = [t for t in loop.steady if not (t.ahead == 0 and t.step in moved)]
    return replace(
        loop,
        prologue=(*loop.prologue, *(op for op in moved if op.dst not in zero)),
        steady=(*steady, *(Timed(op, 1) for op in moved)),
        epilogue=tuple(op for op in loop.epilogue if op not in moved),
    )


@dataclass(frozen=True)
class DeferredSum:
    """`total = total * factor + row_sum(source)`, of which only the final total is read: each thread then sums its own
    columns, and the threads of a row add up once, behind the loop."""

    reduce: RowReduce
    update: Map
    factor: Tile

    @property
    def total(self) -> Tile:
        return self.update.dst

    @property
    def part(self) -> str:
        return f"{self.total}_part"


def deferred_sum(body: Sequence[Op], outside: Sequence[Op]) -> DeferredSum | None:
    """The sum of a loop body that can be deferred, if there is one; `outside`: the ops around the loop."""
    for reduce in body:
        if not (isinstance(reduce, RowReduce) and reduce.kind == "sum" and not reduce.accumulate):
            continue
        readers = [op for op in body if reduce.dst in op.reads]
        if len(readers) != 1 or not isinstance(readers[0], Map):
            continue
        update, value = readers[0], readers[0].value
        if not (isinstance(value, Arith) and value.op == "+" and value.b == Read(reduce.dst)):
            continue
        scaled, total = value.a, update.dst
        if not (isinstance(scaled, Arith) and scaled.op == "*" and scaled.a == Read(total)):
            continue
        starts_at_zero = Map(total, Number(0.0)) in outside
        private = all(op is update or total not in (*op.reads, *op.writes) for op in body)
        if isinstance(scaled.b, Read) and starts_at_zero and private:
            return DeferredSum(reduce, update, scaled.b.tile)
    return None


class _Kernel:
    def __init__(self, roles: Roles) -> None:
        assert isinstance(roles.plan, CudaPlan)
        self.roles, self.program, self.plan = roles, roles.program, roles.plan
        self.lines = Lines()
        self.channels = {c.tile: c for c in roles.channels}
        self.staging = ops.staging(self.program)
        self.compute_threads = GROUP * self.plan.groups
        loop = next(op for op in self.program.body if isinstance(op, Loop))
        self.loop = loop
        self.sum = deferred_sum(loop.body, self.program.body)
        # Tasks of unequal length (the trips depend on the block of rows) go in pairs, longest with shortest.
        self.axis = self.program.axes[-1][0].name
        self.paired = ops.depends_on(self.program, loop.trips, self.axis)

    # ---------------------------------------------------------------------------------------- the frame

    def text(self) -> str:
        lines = self.lines
        with lines.block("def build():"):
            ops.declare_dynamic(lines, self.program)
            lines.add("full_row = T.GemmWarpPolicy.FullRow", "", "@T.prim_func", "def main(")
            lines.add(*(f"    {a}," for a in ops.arguments(self.program, ["blocks"])))
            with (
                lines.block("):"),
                lines.block(f"with T.Kernel(blocks, threads={GROUP + self.compute_threads}) as block:"),
            ):
                self.body()
            lines.add("", "return main")
        header = HEADER.format(title=self.program.name, groups=self.plan.groups, program=self.program)
        return header + lines.text()

    def body(self) -> None:
        lines = self.lines
        for c in self.channels.values():
            lines.add(f'{c.tile} = T.alloc_shared(({c.depth}, {_shape(c.tile)}), "{c.tile.dtype}")')
        deferred = {self.sum.reduce.dst} if self.sum else set()
        for t in ops.fragments(self.program):
            if t not in deferred:
                lines.add(f'{t} = T.alloc_fragment(({_shape(t)}{"," * (len(t.shape) == 1)}), "{t.dtype}")')
        if self.sum:
            lines.add(f'{self.sum.part} = T.alloc_fragment(({self.plan.block_m}, 8), "float32")')
        for c in self.channels.values():
            lines.add(f"{c.tile}_ready = T.alloc_barrier([{WARP}] * {c.depth})")
            lines.add(f"{c.tile}_free = T.alloc_barrier([{self.compute_threads // WARP}] * {c.depth})")
        self.schedule()
        loader, compute = registers(self.plan.groups, self.plan.head_dim_v)
        with lines.block(f"if thread < {GROUP}:"):
            lines.add(f"T.set_max_nreg({loader}, 0)")
            with lines.block(f"if thread < {WARP}:"):
                self.tasks(_Loader(self))
        with lines.block("else:"):
            lines.add(f"T.set_max_nreg({compute}, 1)")
            if self.plan.ping_pong:
                lines.add("# warpgroups take turns: 2 lets 1 go first")
                with lines.block(f"if thread >= {2 * GROUP}:"):
                    lines.add(f"T.named_barrier_arrive(8, {2 * GROUP})")
            self.tasks(_Compute(self))

    def schedule(self) -> None:
        """Task numbering: blocks of rows run fastest, then heads, then batch entries, so that concurrent tasks share
        keys. Pairs have equal lengths, which balances the blocks of this loop without a counter in memory."""
        lines = self.lines
        *outer, (axis, extent) = self.program.axes
        lines.add("thread = T.get_thread_binding()")
        scalars = ops.TaskScalars(self.program, ())
        scalars.require(lines, [extent], 'T.alloc_var("int32", init={value})')
        count = f"{axis}_count"
        # Plain names, computed anew where they are used: variables would hold registers through the loop over keys.
        lines.add(f"{count} = {scalar_text(extent, {})}")
        lines.add(f"units = {f'T.truncdiv({count} + 1, 2)' if self.paired else count}")
        total = " * ".join(scalar_text(n, {}) for _, n in outer)
        lines.add(f"turns = T.ceildiv(units * {total} - block, blocks)")
        names = [
            "unit",
            "line",
            *(["place"] if self.paired else []),
            *(v.name for v, _ in self.program.axes),
            *(v.name for v, _ in self.program.lets),
        ]
        lines.add(*(f'{name} = T.alloc_var("int32", init=0)' for name in names))
        lines.add('tasks_done = T.alloc_var("int32", init=0)', 'trips_done = T.alloc_var("int32", init=0)')

    def tasks(self, role: _Role) -> None:
        """The loop over the tasks of this block."""
        lines, axis = self.lines, self.axis
        place = "place" if self.paired else axis
        with lines.block("for turn in T.serial(turns):"):
            lines.add(
                "unit = block + turn * blocks", "line = T.truncdiv(unit, units)", f"{place} = unit - line * units"
            )
            if not self.paired:
                role.task()
                return
            lines.add("# a middle block of rows has no partner")
            with lines.block(f"for side in T.serial(T.if_then_else(place * 2 + 1 == {axis}_count, 1, 2)):"):
                lines.add(f"{axis} = T.if_then_else(side == 0, {axis}_count - 1 - place, place)")
                role.task()


def _shape(tile: Tile) -> str:
    return ", ".join(map(str, tile.shape))


# --------------------------------------------------------------------------------------------- one role


class _Role:
    """Text of one role's task. Positions: a ring turns once per trip or once per task, on over all tasks."""

    def __init__(self, kernel: _Kernel) -> None:
        self.kernel, self.lines, self.program = kernel, kernel.lines, kernel.program
        inner = self.program.axes[-1][0].name
        self.axes_known = False
        self.scalars = ops.TaskScalars(self.program, {inner})

    def require(self, *values: Op) -> None:
        """Print the task scalars that ops read, the first time."""
        needed = [s for op in values for s in ops.scalars_in(op)]
        names = {n for s in needed for n in s.free()}
        names |= {n for m in self.scalars.missing(needed) for n in self.scalars.lets[m].free()}
        outer = self.program.axes[:-1]
        if not self.axes_known and names & {v.name for v, _ in outer}:
            self.axes_known = True
            rest = "line"
            for v, extent in reversed(outer[1:]):
                size = scalar_text(extent, {})
                quotient = outer[0][0].name if len(outer) == 2 else "line"
                self.lines.add(f"{quotient} = T.truncdiv({rest}, {size})", f"{v} = {rest} - {quotient} * {size}")
        self.scalars.require(self.lines, needed)

    def slot(self, c: Channel, trip: str) -> tuple[str, str]:
        """(slot, parity) of a channel's ring at a trip of the loop."""
        position = "tasks_done"
        if c.per_trip:
            position = "trips_done" if trip == "0" else f"(trips_done + {trip})"
        if c.depth == 1:
            return "0", f"{position} % 2"
        return f"{position} % {c.depth}", f"{position} // {c.depth} % 2"

    def place(self, tile: Tile, trip: str) -> str:
        """Text of a tile where an op uses it."""
        c = self.kernel.channels.get(tile)
        return f"{tile}[{self.slot(c, trip)[0]}, :, :]" if c else tile.name

    def task(self) -> None:
        raise NotImplementedError

    def trip_names(self, trip: str) -> Names:
        return {self.kernel.loop.var.name: trip}


class _Loader(_Role):
    def task(self) -> None:
        body = self.kernel.roles.role("loader").body
        for op in body:
            self.require(replace(op, phases=()) if isinstance(op, StagedLoop) else op)
            if isinstance(op, StagedLoop):
                with self.lines.block(f"for {op.var} in T.serial({scalar_text(op.trips, {})}):"):
                    for stage in op.stages:
                        for inner in stage.body:
                            self.step(inner, op.var.name)
                self.lines.add(f"trips_done = trips_done + {scalar_text(op.trips, {})}")
            else:
                self.step(op, "0")
        self.lines.add("tasks_done = tasks_done + 1")

    def step(self, op: Op, trip: str) -> None:
        if isinstance(op, Acquire):
            slot, parity = self.slot(op.channel, trip)
            self.lines.add(f"T.barrier_wait({op.channel.tile}_free[{slot}], {parity} ^ 1)")
        elif isinstance(op, Commit):
            self.lines.add(f"T.barrier_arrive({op.channel.tile}_ready[{self.slot(op.channel, trip)[0]}])")
        elif isinstance(op, Load):
            slot = self.slot(self.kernel.channels[op.dst], trip)[0]
            block = ops.block_text(op.src, op.dst, self.trip_names(trip))
            self.lines.add(f"T.tma_copy({block}, {op.dst}[{slot}, :, :], barrier={op.dst}_ready[{slot}])")
        else:
            raise NotImplementedError(f"the loader has no text for {op}")


class _Compute(_Role):
    def __init__(self, kernel: _Kernel) -> None:
        super().__init__(kernel)
        body = self.program.body
        self.zero = frozenset(op.dst for op in body if isinstance(op, Map) and op.value == Number(0.0))

    def task(self) -> None:
        lines, k = self.lines, self.kernel
        for op in _release_staged_last(k.roles.role("compute").body, k.staging):
            if isinstance(op, OverlappedLoop):
                self.loop(hoist_rescale(op, self.zero) if k.plan.late_rescale else op)
                continue
            if k.sum and isinstance(op, Map) and op.dst == k.sum.total and isinstance(op.value, Number):
                lines.add(f"T.fill({k.sum.part}, 0)")
                continue
            self.require(op)
            self.step(op, "0")
        lines.add("tasks_done = tasks_done + 1")

    def loop(self, loop: OverlappedLoop) -> None:
        lines, sum_ = self.lines, self.kernel.sum
        trips = scalar_text(loop.trips, {})
        self.require(StagedLoop(loop.var, loop.trips, (), loop.phases))
        self.require(*loop.prologue, *(t.step for t in loop.steady), *loop.epilogue)
        with lines.block(f"if {trips} > 0:"):
            for op in loop.prologue:
                self.step(op, "0", first=True)
            start: Scalar = Const(0)
            for phase in loop.phases:
                self.steady(loop, start, phase.stop, phase.masked)
                start = phase.stop
            lines.add("# the output of the last trip")
            last = f"{trips} - 1"
            for op in loop.epilogue:
                self.step(op, last)
        lines.add(f"trips_done = trips_done + {trips}")
        if sum_:
            lines.add(f"T.reduce_sum({sum_.part}, {sum_.total}, dim=1)")

    def steady(self, loop: OverlappedLoop, start: Scalar, stop: Scalar, masked: bool) -> None:
        """The trips whose score half lies in one phase: the output half of trip j beside the score half of j + 1."""
        lines, k, j = self.lines, self.kernel, loop.var.name
        products = [t for t in loop.steady if isinstance(t.step, Mma)]
        last_wait = [t for t in loop.steady if isinstance(t.step, WaitMma)][-1]
        lines.add(f"# {'masked' if masked else 'wholly visible'} tiles")
        first = "0" if start == Const(0) else f"T.max({scalar_text(start, {})} - 1, 0)"
        with lines.block(f"for {j} in T.serial({first}, T.max({scalar_text(stop, {})} - 1, 0)):"):
            for t in loop.steady:
                trip = f"{j} + 1" if t.ahead else j
                if isinstance(t.step, MaskTile) and not masked:
                    continue
                if t is products[0] and k.plan.ping_pong:
                    lines.add(f"T.sync_threads(barrier_id=7 + thread // {GROUP}, arrive_count={2 * GROUP})")
                if t is last_wait:
                    self.keep_in_front(products[0].step, products[-1].step, j)
                self.step(t.step, trip)
                if t is products[-1] and k.plan.ping_pong:
                    lines.add(f"T.named_barrier_arrive(10 - thread // {GROUP}, {2 * GROUP})")

    def keep_in_front(self, scores: Op, output: Op, trip: str) -> None:
        """Keep the softmax in front of the wait for the output product."""
        assert isinstance(scores, Mma)
        assert isinstance(output, Mma)
        rows, columns = scores.dst.shape
        self.lines.add(
            f"T.warpgroup_fence_operand({scores.dst}, num_regs={rows * columns // self.kernel.compute_threads})"
        )
        if self.kernel.plan.pin:
            self.step(Await(self.kernel.channels[output.b]), trip)

    def step(self, op: Op, trip: str, first: bool = False) -> None:
        lines, k, names = self.lines, self.kernel, self.trip_names(f"({trip})" if " " in trip else trip)
        if isinstance(op, Await):
            slot, parity = self.slot(op.channel, trip)
            lines.add(f"T.barrier_wait({op.channel.tile}_ready[{slot}], {parity})")
        elif isinstance(op, Release):
            with lines.block(f"if thread % {WARP} == 0:"):
                lines.add(f"T.barrier_arrive({op.channel.tile}_free[{self.slot(op.channel, trip)[0]}])")
        elif isinstance(op, WaitMma):
            lines.add(f"T.wait_wgmma({op.pending})")
        elif isinstance(op, Mma):
            options = ", transpose_B=True" if op.transpose_b else ""
            options += ", policy=full_row" + ("" if op.accumulate else ", clear_accum=True")
            lines.add(f"T.wgmma_gemm({self.place(op.a, trip)}, {self.place(op.b, trip)}, {op.dst}{options})")
        elif k.sum and op == k.sum.reduce:
            pass  # with its update
        elif k.sum and op == k.sum.update:
            self.add_own_columns(k.sum, first)
        elif isinstance(op, Cast) and op.dst not in ops.fragments(self.program):
            self.stage(op)
        elif isinstance(op, Store):
            self.store(op, names)
        else:
            ops.print_tile_op(lines, op, names)

    def add_own_columns(self, s: DeferredSum, first: bool) -> None:
        """A thread holds columns 2 t and 2 t + 1 of every 8, so with 8 partial sums per row it adds its own alone."""
        rows, columns = s.reduce.src.shape
        if not first:  # there the sum is still zero
            with self.lines.block(f"for r, c in T.Parallel({rows}, 8):"):
                self.lines.add(f"{s.part}[r, c] = {s.part}[r, c] * {s.factor}[r]")
        each = self.lines.block(f"for n in T.unroll({columns // 8}):")
        with each, self.lines.block(f"for r, c in T.Parallel({rows}, 8):"):
            self.lines.add(f"{s.part}[r, c] = {s.part}[r, c] + {s.reduce.src}[r, n * 8 + c]")

    # ---------------------------------------------------------------------------------------- results

    def stage(self, op: Cast) -> None:
        """Round into the memory that the result leaves from; without one, the store rounds."""
        host = self.kernel.staging.get(op.dst)
        for columns in self.panels(op.dst, host) if host else []:
            source = op.src.name if columns is None else f"{op.src}[:, {columns[0]}:{columns[1]}]"
            self.lines.add(f"T.copy({source}, {self.panel_text(host, columns)})")

    def store(self, op: Store, names: Names) -> None:
        host = self.kernel.staging.get(op.src)
        if not ops.is_plain(op.dst, op.src, self.program):
            with (
                self.lines.block(ops.parallel(op.src)),
                self.lines.block(f"if {ops.valid_text(op.dst, op.src, names)}:"),
            ):
                self.lines.add(f"{ops.element_text(op.dst, names)} = {ops.index(op.src)}")
        elif host:
            for columns in self.panels(op.src, host):
                block = ops.block_text(op.dst, op.src, names, columns)
                self.lines.add(f"T.copy({self.panel_text(host, columns)}, {block})")
        else:
            source = next((o.src for o in self.program.body if isinstance(o, Cast) and o.dst == op.src), op.src)
            self.lines.add(f"T.copy({source}, {ops.block_text(op.dst, op.src, names)})")

    def panels(self, result: Tile, host: Tile) -> list[tuple[int, int] | None]:
        """Column ranges: all at once where the widths agree, else the 64-column panels of the shared layout."""
        if result.shape == host.shape:
            return [None]
        return [(c, c + 64) for c in range(0, result.shape[1], 64)]

    def panel_text(self, host: Tile | None, columns: tuple[int, int] | None) -> str:
        assert host is not None
        slot = self.slot(self.kernel.channels[host], "0")[0]
        return f"{host}[{slot}, :, {f'{columns[0]}:{columns[1]}' if columns else ':'}]"


def _release_staged_last(body: Sequence[Op], staging: dict[Tile, Tile]) -> list[Op]:
    """A slot that results leave through is released behind their store."""
    steps = list(body)
    for result, host in staging.items():
        release = next((op for op in steps if isinstance(op, Release) and op.channel.tile == host), None)
        store = next((op for op in steps if isinstance(op, Store) and op.src == result), None)
        if release and store and steps.index(release) < steps.index(store):
            steps.remove(release)
            steps.insert(steps.index(store) + 1, release)
    return steps
