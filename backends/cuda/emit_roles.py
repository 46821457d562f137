"""The role form (Hopper): a warp or two load by TMA, one to three warpgroups compute; rings of slots in shared memory
with ready and free barriers between them. Printed from the role programs, op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fa_multi.addressing import BLOCK
from fa_multi.overlap import OverlappedLoop, WaitMma
from fa_multi.roles import Acquire, Await, Channel, Commit, Release, Roles, StagedLoop
from fa_multi.scalars import Const, Scalar
from fa_multi.tiles import Arith, Cast, Load, Loop, Map, MaskTile, Mma, Number, Op, Read, RowReduce, Store, Tile

from . import emit_ops as ops
from . import transfers
from .limits import registers
from .planner import GATHERER, CudaPlan
from .printing import Lines, Names, scalar_text
from .scheduling import BLOCKS, Fixed, Queue, queued
from .transfers import WARP

GROUP = 128  # threads
# Named barriers. 0 to 7 are the compiler's; 8 and 9 are the turns of two warpgroups.
ALL_COMPUTE = 10
OWN_GROUP = 11  # and on, one per warpgroup (threads 128 and on)
HEADER = '''"""{title}

Role form: {loaders} by TMA, {groups} warpgroups compute. Generated; the tile program it comes from:

{program}
"""

import tilelang.language as T

# Barriers and bounds are all in the text: one of the compiler would wait for all warpgroups, which may be taking turns.
PASS_CONFIGS = {{
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,
}}


'''
CLEAR_TAIL = '''@T.macro
def clear_tail(tile, slot, valid, thread):
    """Clear the rows of a slot from `valid` on: they may hold anything, and 0 * NaN is NaN. Every warpgroup clears all
    of them: they may be taking turns, so they must not wait for each other, and a zero written twice does no harm."""
    for n in T.serial(T.truncdiv(({rows} - valid) * {chunks} + 127, 128)):
        chunk = n * 128 + thread % 128
        if valid + T.truncdiv(chunk, {chunks}) < {rows}:
            for c in T.vectorized(8):
                column = T.truncmod(chunk, {chunks}) * 8 + c
                tile[slot, valid + T.truncdiv(chunk, {chunks}), column] = T.cast(0, "{dtype}")
    T.fence_proxy_async()
    T.sync_threads(barrier_id={barrier} + thread // 128, arrive_count=128)


'''


def emit(roles: Roles) -> str:
    """The kernel module of the role form."""
    return _Kernel(roles).text()


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
        self.gathers = any(r.role == GATHERER for r in roles.roles)
        self.staging = {} if self.gathers else ops.staging(self.program)
        self.unclean = transfers.unclean(self.program)
        self.compute_threads = GROUP * self.plan.groups
        loop = next(op for op in self.program.body if isinstance(op, Loop))
        self.loop = loop
        self.sum = deferred_sum(loop.body, self.program.body)
        axis, carrier = self.program.axes[-1][0], queued(roles)
        paired = axis == BLOCK and ops.depends_on(self.program, loop.trips, axis.name)
        self.schedule: Fixed | Queue = Queue(self.program, carrier) if carrier else Fixed(self.program, paired)

    # ---------------------------------------------------------------------------------------- the frame

    def text(self) -> str:
        lines = self.lines
        with lines.block("def build():"):
            ops.declare_dynamic(lines, self.program)
            lines.add("full_row = T.GemmWarpPolicy.FullRow", "", "@T.prim_func", "def main(")
            lines.add(*(f"    {a}," for a in ops.arguments(self.program, [BLOCKS])))
            lines.add(*(f"    {a}," for a in self.schedule.arguments))
            with (
                lines.block("):"),
                lines.block(f"with T.Kernel({BLOCKS}, threads={GROUP + self.compute_threads}) as block:"),
            ):
                self.body()
            lines.add("", "return main")
        others = len(self.roles.roles) - 1
        loaders = "warp 0 loads" if others == 1 else f"warps 0 to {others - 1} load"
        header = HEADER.format(title=self.program.name, loaders=loaders, groups=self.plan.groups, program=self.program)
        for tile in self.unclean:
            rows, columns = tile.shape
            header += CLEAR_TAIL.format(rows=rows, chunks=columns // 8, dtype=tile.dtype, barrier=OWN_GROUP - 1)
        return header + lines.text()

    def body(self) -> None:
        lines = self.lines
        lines.add(*ops.FOLLOW)
        for op in self.program.body:
            if isinstance(op, Load) and not transfers.box_rows(op.src, op.dst):
                ops.assume_aligned(lines, op.src.tensor)
                lines.add(f'gathered = T.alloc_local(({transfers.GATHERED}, {transfers.VECTOR}), "{op.dst.dtype}")')
        for c in self.channels.values():
            lines.add(f'{c.tile} = T.alloc_shared(({c.depth}, {_shape(c.tile)}), "{c.tile.dtype}")')
        deferred = {self.sum.reduce.dst} if self.sum else set()
        for t in ops.fragments(self.program):
            if t not in deferred:
                lines.add(f'{t} = T.alloc_fragment(({_shape(t)}{"," * (len(t.shape) == 1)}), "{t.dtype}")')
        transfers.declare_divided_rows(lines, self.program)
        paged = [op for op in self.loop.body if isinstance(op, Load) and op.src.table is not None]
        if paged:
            lines.add(f'pages = T.alloc_local(({transfers.boxes(paged[0])},), "int32")')
        if self.sum:
            lines.add(f'{self.sum.part} = T.alloc_fragment(({self.plan.block_m}, 8), "float32")')
        for c in self.channels.values():
            lines.add(f"{c.tile}_ready = T.alloc_barrier([{WARP}] * {c.depth})")
            lines.add(f"{c.tile}_free = T.alloc_barrier([{self.compute_threads // WARP}] * {c.depth})")
        lines.add("thread = T.get_thread_binding()")
        self.schedule.declare(lines)
        lines.add('tasks_done = T.alloc_var("int32", init=0)', 'trips_done = T.alloc_var("int32", init=0)')
        loader, compute = registers(self.plan.groups, self.plan.head_dim_v)
        with lines.block(f"if thread < {GROUP}:"):
            lines.add(f"T.set_max_nreg({loader}, 0)")
            for n, name in enumerate(r.role for r in self.roles.roles if r.role != "compute"):
                with lines.block(f"{'el' * (n > 0)}if thread < {WARP * (n + 1)}:"):
                    self.schedule.tasks(_Loader(self, name))
        with lines.block("else:"):
            lines.add(f"T.set_max_nreg({compute}, 1)")
            for fill in self.program.fills:
                transfers.fill_rows(lines, fill, f"thread - {GROUP}", self.compute_threads, "block", BLOCKS)
            if self.plan.ping_pong:
                lines.add("# warpgroups take turns: 2 lets 1 go first")
                with lines.block(f"if thread >= {2 * GROUP}:"):
                    lines.add(f"T.named_barrier_arrive(8, {2 * GROUP})")
            self.schedule.tasks(_Compute(self, "compute"))


def _shape(tile: Tile) -> str:
    return ", ".join(map(str, tile.shape))


# --------------------------------------------------------------------------------------------- one role


class _Role:
    """Text of one role's task. Positions: a ring turns once per trip or once per task, on over all tasks."""

    def __init__(self, kernel: _Kernel, name: str) -> None:
        self.kernel, self.lines, self.program, self.name = kernel, kernel.lines, kernel.program, name
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
            self.kernel.schedule.place(self.lines)
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

    def run(self) -> None:
        """One task, or nothing where it has no rows: all roles then skip it alike."""
        if self.program.ragged is None:
            self.task()
            return
        self.require(next(op for op in self.program.body if isinstance(op, Load)))
        with self.lines.block("if rows > 0:"):
            self.task()

    def task(self) -> None:
        raise NotImplementedError

    def step(self, op: Op, trip: str) -> None:
        raise NotImplementedError

    def trip_names(self, trip: str) -> Names:
        return {self.kernel.loop.var.name: trip}


class _Loader(_Role):
    def task(self) -> None:
        body = self.kernel.roles.role(self.name).body
        for op in body:
            self.require(replace(op, phases=()) if isinstance(op, StagedLoop) else op)
            if isinstance(op, StagedLoop):
                with self.lines.block(f"for {op.var} in T.serial({scalar_text(op.trips, {})}):"):
                    steps = [inner for stage in op.stages for inner in stage.body]
                    paged = [o for o in steps if isinstance(o, Load) and o.src.table is not None]
                    if paged:  # keys and values lie in the same pages
                        transfers.read_table(self.lines, paged[0], self.trip_names(op.var.name))
                    for inner in steps:
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
            self.load(op, trip)
        else:
            raise NotImplementedError(f"the loader has no text for {op}")

    def load(self, op: Load, trip: str) -> None:
        lines, names, slot = self.lines, self.trip_names(trip), self.slot(self.kernel.channels[op.dst], trip)[0]
        if not transfers.box_rows(op.src, op.dst):
            transfers.gather_rows(lines, op, f"{op.dst}[{slot}, r, column + c]", names)
            return
        barrier = f"barrier={op.dst}_ready[{slot}]"
        if self.kernel.plan.read_once and op in self.kernel.loop.body:
            barrier += ', eviction_policy="evict_first"'
        box, columns = transfers.box_rows(op.src, op.dst), op.dst.shape[1]
        if transfers.boxes(op) == 1:
            text = transfers.block_text(op.src, op.dst, names)
            lines.add(f"T.tma_copy({text}, {op.dst}[{slot}, :, :], {barrier})")
            return
        width = transfers.panel_columns(op.dst)
        with (
            lines.block(f"for n in T.unroll({transfers.boxes(op)}):"),
            lines.block(f"if n * {box} < {scalar_text(op.src.rows, names)}:"),
            lines.block(f"for panel in T.unroll({columns // width}):"),
        ):
            panel = (f"panel * {width}", f"panel * {width} + {width}")
            text = transfers.box_text(op.src, (f"n * {box}", box), panel, names)
            into = f"{op.dst}[{slot}, n * {box}:n * {box} + {box}, {panel[0]}:{panel[1]}]"
            lines.add(f"T.tma_copy({text}, {into}, {barrier})")


class _Compute(_Role):
    def task(self) -> None:
        lines, k = self.lines, self.kernel
        if k.gathers:  # short tasks: read lengths before waiting for anything
            self.require(*self.program.body)
        for op in _release_staged_last(k.roles.role("compute").body, k.staging):
            if isinstance(op, OverlappedLoop):
                self.loop(op)
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
            for tile in self.kernel.unclean:
                self.clear_tail(tile)
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

    def clear_tail(self, tile: Tile) -> None:
        """Clear the rows of a tile past the keys before anything reads them; only the first trip can have such rows."""
        assert self.kernel.loop.full_after_first
        channel, names = self.kernel.channels[tile], self.trip_names("0")
        valid = scalar_text(self.kernel.unclean[tile].src.rows, names)
        with self.lines.block(f"if {valid} < {tile.shape[0]}:"):
            self.step(Await(channel), "0")
            self.lines.add(f"clear_tail({tile}, {self.slot(channel, '0')[0]}, {valid}, thread)")

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
            pass  # the store rounds
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

    def sync(self, written: bool = False) -> None:
        """Wait for every compute warp; `written`: what they wrote is then there for TMA and for products."""
        if written:
            self.lines.add("T.fence_proxy_async()")
        self.lines.add(f"T.sync_threads(barrier_id={ALL_COMPUTE}, arrive_count={self.kernel.compute_threads})")

    def store(self, op: Store, names: Names) -> None:
        """A result leaves through the memory of an operand where it has one, in one piece where all its rows count."""
        lines, host = self.lines, self.kernel.staging.get(op.src)
        source = next((o.src for o in self.program.body if isinstance(o, Cast) and o.dst == op.src), op.src)
        if transfers.is_plain(op.dst, op.src, self.program):
            self.store_block(op, source, host, names)
            return
        if host:
            whole = f"{scalar_text(op.dst.rows, names)} == {op.src.shape[0]}"
            with lines.block(f"if {whole}:"):
                self.store_block(op, source, host, names)
            with lines.block("else:"):
                transfers.store_elements(lines, op, source.name, names)
        else:
            transfers.store_elements(lines, op, source.name, names)

    def store_block(self, op: Store, source: Tile, host: Tile | None, names: Names) -> None:
        if host is None:
            self.lines.add(f"T.copy({source}, {transfers.block_text(op.dst, op.src, names)})")
            return
        self.sync()
        for columns in self.panels(op.src, host):
            part = source.name if columns is None else f"{source}[:, {columns[0]}:{columns[1]}]"
            self.lines.add(f"T.copy({part}, {self.panel_text(host, columns)})")
        self.sync(written=True)
        for columns in self.panels(op.src, host):
            block = transfers.block_text(op.dst, op.src, names, columns)
            self.lines.add(f"T.copy({self.panel_text(host, columns)}, {block})")

    def panels(self, result: Tile, host: Tile) -> list[tuple[int, int] | None]:
        """Column ranges: all at once where the widths agree, else the 64-column panels of the shared layout."""
        if result.shape == host.shape:
            return [None]
        return [(c, c + 64) for c in range(0, result.shape[1], 64)]

    def panel_text(self, host: Tile, columns: tuple[int, int] | None) -> str:
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
