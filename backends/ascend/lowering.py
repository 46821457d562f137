"""From the roles of a program to instructions, op by op. Nothing here knows attention.

Cube: operands in L1, products in L0C. Vector: everything in UB, half of every tile's rows on each of the two vector
cores. Channels are rings in device memory, one per core; their signals are cross-core flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fa_multi.roles import Acquire, Await, Channel, Commit, Recv, Release, RoleProgram, Roles, Send, StagedLoop
from fa_multi.tiles import Cast, Expr, Load, Map, MaskTile, Mma, Op, Phase, RowReduce, Store, Tile

from .instructions import Access, Buffer, If, Instr, Loop, Node
from .limits import ALIGNMENT, LimitError, check_buffers, check_gemm
from .transfers import VECTOR_CORES, Transfers
from .vector import VectorOps
from .views import text, views


@dataclass
class Memory:
    """Buffers of one role, laid out one behind the other in each memory."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)

    def buffer(self, name: str, memory: str, shape: tuple[int, ...], dtype: str, over: str | None = None) -> Buffer:
        """The buffer of that name, made on first use. over: lay it over this buffer instead of behind the last."""
        if name in self.buffers:
            return self.buffers[name]
        base = self.buffers[over] if over else None
        align = ALIGNMENT[memory]
        start = base.offset if base else -(-self.used.get(memory, 0) // align) * align
        made = Buffer(name, memory, shape, dtype, start)
        self.used[memory] = max(self.used.get(memory, 0), start + made.bytes)
        self.buffers[name] = made
        return made


@dataclass(frozen=True)
class RoleCode:
    """One role as instructions. before and after run once per core, task once per task; locals: name and dtype of its
    scalar variables."""

    role: str
    before: list[Node]
    task: list[Node]
    after: list[Node]
    buffers: tuple[Buffer, ...]
    locals: tuple[tuple[str, str], ...]


def lower_roles(roles: Roles, target: str) -> list[RoleCode]:
    """Instructions of every role, without intra-core flags. target: "pto" or "ascendc", which differ in row broadcasts.

    Raises LimitError where the hardware or the compiler cannot do it.
    """
    return [_RoleLowering(roles, role, target).run() for role in roles.roles]


def flag_ids(roles: Roles) -> dict[tuple[str, str], int]:
    """(channel tile, "ready" or "free") -> cross-core flag id."""
    ids = {}
    for n, c in enumerate(roles.channels):
        ids[c.tile.name, "ready"], ids[c.tile.name, "free"] = 2 * n, 2 * n + 1
    return ids


def ring_name(channel: Channel) -> str:
    """The kernel argument that holds the ring of a channel: [cores, depth, rows, columns]."""
    return f"ring_{channel.tile.name}"


class _RoleLowering:
    def __init__(self, roles: Roles, role: RoleProgram, target: str):
        self.roles, self.role, self.plan = roles, role, roles.plan
        self.cube = role.role == "cube"
        self.memory = Memory()
        self.rings = {t.name: n for t, n in role.rings}
        self.flags = flag_ids(roles)
        self.views = views(roles.program)
        self.locals: dict[str, str] = {}
        self.nodes: list[Node] = []
        self.head: list[Node] = []  # what a task starts with: values that its loop reads and nothing in it changes
        self.kept: dict[Expr, str] = {}  # expressions already made there, and the buffers that hold them
        self.transfers = Transfers(self, target)
        self.trip = ""  # the variable that holds the trip of the stage being lowered
        self.phases: tuple[Phase, ...] = ()
        if not self.cube:
            self.vector = VectorOps(self, target)

    # ---- the frame -------------------------------------------------------------------------------------------------

    def run(self) -> RoleCode:
        self._plan_buffers()
        task = self._collect(self.role.body)
        if any(c.per_trip for c in self._channels()):
            task += [Instr(f"base = base + {self._groups()}")]
        task = self.head + task
        before, after = self._presets(), self._drains()
        if not self.cube:
            before = self.vector.positions.constants() + before
        reserved = {} if self.cube else {"UB": self.vector.hidden.buffer.bytes}
        check_buffers(self.memory.buffers.values(), reserved)
        return RoleCode(
            self.role.role, before, task, after, tuple(self.memory.buffers.values()), tuple(self.locals.items())
        )

    def _collect(self, ops: Iterable[Op]) -> list[Node]:
        outer, self.nodes = self.nodes, []
        for op in ops:
            self._op(op)
        inner, self.nodes = self.nodes, outer
        return inner

    def emit(self, statement: str, *touched: Access) -> None:
        self.nodes.append(Instr(statement, touched))

    def local(self, name: str, value: str) -> str:
        """Assign a scalar; named scalars keep the text short, and the compiler much faster."""
        self.locals[name] = "int32"
        self.emit(f"{name} = {value}")
        return name

    def _channels(self) -> list[Channel]:
        return [c for c in self.roles.channels if self.role.role in (c.producer, c.consumer)]

    def _presets(self) -> list[Node]:
        """The consumer of a ring starts by declaring all its slots free."""
        return [
            Loop("g", str(c.depth // c.signal_interval), [self._set(c, "free", self._reader_pipe())])
            for c in self._channels()
            if c.consumer == self.role.role
        ]

    def _drains(self) -> list[Node]:
        """The producer ends by taking all free signals back: no flag stays set for the next launch."""
        return [
            Loop("g", str(c.depth // c.signal_interval), [self._wait(c, "free")])
            for c in self._channels()
            if c.producer == self.role.role
        ]

    def block(self, condition: str, nodes: list[Node]) -> None:
        """Nodes that only run under a condition."""
        self.nodes.append(If(condition, nodes))

    # ---- ops -------------------------------------------------------------------------------------------------------

    def _op(self, op: Op) -> None:
        steps: dict[type, Callable[..., None]] = {
            Load: self.transfers.load,
            Mma: self._mma,
            StagedLoop: self._loop,
            Store: self.transfers.store,
            Send: self._send,
            Recv: self._recv,
            Acquire: self._acquire,
            Commit: self._commit,
            Await: self._await,
            Release: self._release,
        }
        if not self.cube:
            v = self.vector
            steps |= {Map: v.map, RowReduce: v.reduce, Cast: v.cast, MaskTile: v.masking.mask}
        if type(op) not in steps:
            raise LimitError(f"the {self.role.role} role has no instruction for `{op}`")
        steps[type(op)](op)

    def _loop(self, loop: StagedLoop) -> None:
        self.local("trips", text(loop.trips))
        lag = max(stage.lag for stage in loop.stages)
        self.phases = loop.phases
        if not self.cube:
            for n, phase in enumerate(loop.phases[:-1]):
                self.local(f"stop{n}", text(phase.stop))
        body: list[Node] = []
        for stage in loop.stages:
            self.trip = loop.var.name
            self.locals[self.trip] = "int32"
            inner: list[Node] = [Instr(f"{self.trip} = step - {stage.lag}" if stage.lag else f"{self.trip} = step")]
            inner += self._collect(stage.body)
            late = [f"step >= {stage.lag}"] if stage.lag else []
            early = [f"step < trips + {stage.lag}" if stage.lag else "step < trips"] if stage.lag < lag else []
            condition = " and ".join(late + early)
            body += [If(condition, inner)] if condition else inner
        self.trip = ""
        extent = f"T.if_then_else(trips > 0, trips + {lag}, 0)" if lag else "trips"
        self.nodes.append(Loop("step", extent, body))

    def _mma(self, op: Mma) -> None:
        a, b, dst = self.tile(op.a), self.tile(op.b), self.tile(op.dst)
        n, k = (b.shape[0], b.shape[1]) if op.transpose_b else (b.shape[1], b.shape[0])
        check_gemm(str(op), a.shape[0], n, k, a.dtype)
        transpose = ", transpose_B=True" if op.transpose_b else ""
        self.emit(
            f"T.gemm_v0({a.name}, {b.name}, {dst.name}{transpose}, init={not op.accumulate})",
            Access("MTE1", a, False),
            Access("MTE1", b, False),
            Access("M", dst, True),
        )

    # ---- channels --------------------------------------------------------------------------------------------------

    def _slot(self, c: Channel) -> str:
        groups = c.depth // c.signal_interval
        if not c.per_trip:
            raise LimitError(f"channel {c.tile}: tiles that cross once per task are not supported yet")
        if c.depth == 1:
            return "0"
        if c.signal_interval == 1:
            return f"(base + {self.trip}) % {c.depth}"
        every = c.signal_interval
        return f"(base + {self.trip} // {every}) % {groups} * {every} + {self.trip} % {every}"

    def _groups(self) -> str:
        every = self.plan.signal_interval
        return "trips" if every == 1 else f"(trips + {every - 1}) // {every}"

    def _reader_pipe(self) -> str:
        return "MTE2"  # both roles read a ring with their loading pipe

    def _set(self, c: Channel, kind: str, pipe: str) -> Instr:
        return Instr(f'T.set_cross_flag("{pipe}", {self.flags[c.tile.name, kind]})  # {c.tile} {kind}')

    def _wait(self, c: Channel, kind: str) -> Instr:
        return Instr(f"T.wait_cross_flag({self.flags[c.tile.name, kind]})  # {c.tile} {kind}")

    def _every(self, c: Channel, node: Node, at_start: bool) -> None:
        """One signal per `signal_interval` trips: waits at the first of them, sets at the last."""
        every = c.signal_interval
        if every == 1:
            self.nodes.append(node)
        elif at_start:
            self.nodes.append(If(f"{self.trip} % {every} == 0", [node]))
        else:
            self.nodes.append(If(f"{self.trip} % {every} == {every - 1} or {self.trip} == trips - 1", [node]))

    def _acquire(self, op: Acquire) -> None:
        self._every(op.channel, self._wait(op.channel, "free"), at_start=True)

    def _commit(self, op: Commit) -> None:
        pipe = "FIX" if self.cube else "MTE3"
        self._every(op.channel, self._set(op.channel, "ready", pipe), at_start=False)

    def _await(self, op: Await) -> None:
        self._every(op.channel, self._wait(op.channel, "ready"), at_start=True)

    def _release(self, op: Release) -> None:
        self._every(op.channel, self._set(op.channel, "free", self._reader_pipe()), at_start=False)

    def _ring_slot(self, c: Channel) -> str:
        slot = self._slot(c)
        slot = slot if slot == "0" else self.local("slot", slot)
        if self.cube:
            return f"{ring_name(c)}[cid, {slot}, :, :]"
        half = c.tile.shape[0] // VECTOR_CORES
        return f"{ring_name(c)}[cid, {slot}, vid * {half}:(vid + 1) * {half}, :]"

    def _send(self, op: Send) -> None:
        src = self.tile(op.channel.tile)
        self.emit(
            f"T.copy({src.name}, {self._ring_slot(op.channel)})", Access("FIX" if self.cube else "MTE3", src, False)
        )

    def _recv(self, op: Recv) -> None:
        dst = self.tile(op.channel.tile)
        self.emit(f"T.copy({self._ring_slot(op.channel)}, {dst.name})", Access("MTE2", dst, True))

    # ---- buffers ---------------------------------------------------------------------------------------------------

    def tile(self, tile: Tile) -> Buffer:
        """The buffer that holds a tile of this role."""
        return self.memory.buffers[self._buffer_name(tile)]

    def _buffer_name(self, tile: Tile) -> str:
        if not self.cube:
            return f"{tile.name}_ub"
        return f"{tile.name}_l0" if tile.dtype == "float32" else f"{tile.name}_l1"

    def _plan_buffers(self) -> None:
        """Every tile its own bytes, but for tiles that only live outside the loop: those lie over scratch."""
        inside = set(_tiles(self.role.body, loops_only=True))
        tiles = list(dict.fromkeys(_tiles(self.role.body)))
        loads = {op.dst: op for op in _ops(self.role.body) if isinstance(op, Load)}
        for tile in tiles:
            if self.cube:
                memory = "L0C" if tile.dtype == "float32" else "L1"
                made = self.memory.buffer(self._buffer_name(tile), memory, tile.shape, tile.dtype)
                if tile in loads and self.transfers.in_pieces(loads[tile].src, tile.shape[0]):
                    self.transfers.blocks(made)
                continue
            if tile.shape[0] % (VECTOR_CORES * 8):
                raise LimitError(f"tile {tile}: {tile.shape[0]} rows cannot be halved in groups of 8; use other tiles")
            shape = (tile.shape[0] // VECTOR_CORES, *tile.shape[1:])
            if tile.name in self.rings:
                if len(shape) != 1:
                    raise LimitError(f"tile {tile}: only row vectors can be kept for several trips")
                shape = (self.rings[tile.name], *shape)
            outside = len(shape) == 2 and tile not in inside
            over = self.vector.scratch(shape, tile.dtype).name if outside else None
            self.memory.buffer(self._buffer_name(tile), "UB", shape, tile.dtype, over)


def _ops(ops: Iterable[Op], loops_only: bool = False) -> Iterator[Op]:
    for op in ops:
        if isinstance(op, StagedLoop):
            for stage in op.stages:
                yield from _ops(stage.body)
        elif not loops_only:
            yield op


def _tiles(ops: Iterable[Op], loops_only: bool = False) -> Iterator[Tile]:
    for op in _ops(ops, loops_only):
        yield from (*op.writes, *op.reads)
