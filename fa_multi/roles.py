"""From one sequential program to concurrent roles: who does which op, and how a tile gets from one doer to the next.

A backend names a role for every op. Each tile that one role writes and another reads becomes a `Channel`: a ring of
`depth` slots with a *ready* signal (producer to consumer) and a *free* signal (back). The pass cuts the program along
the roles, places the signals, and lets the score half of the loop run `skew` tiles ahead of the output half. Nothing
here knows attention or a device; `check.py` proves the result safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .plan import Plan
from .scalars import Scalar, Var
from .tiles import Load, Loop, Map, Mma, Op, Phase, Program, Read, Tile


@dataclass(frozen=True)
class Channel:
    """A tile on its way from one role to another.

    depth: slots in the ring. signal_interval: trips that one ready or free signal stands for.
    memory: "shared" (both roles work in the slot itself) or "global" (the producer sends, the consumer receives).
    per_trip: the tile crosses once per trip of the loop, else once per task.
    """

    tile: Tile
    producer: str
    consumer: str
    depth: int
    signal_interval: int
    memory: str
    per_trip: bool

    @property
    def bytes(self) -> int:
        """Bytes of the whole ring."""
        return self.tile.bytes * self.depth

    def __str__(self) -> str:
        every = f", one signal per {self.signal_interval} tiles" if self.signal_interval > 1 else ""
        return (
            f"channel {self.tile}: {self.producer} -> {self.consumer}, {self.depth} x "
            f"{'x'.join(map(str, self.tile.shape))} {self.tile.dtype} ({self.bytes} bytes, {self.memory} memory), "
            f"once per {'trip' if self.per_trip else 'task'}; {self.producer} signals ready, "
            f"{self.consumer} signals free{every}"
        )


class Step(Op):
    """A step of a role that is not an op of the program."""


@dataclass(frozen=True)
class Acquire(Step):
    """Producer: wait until the next slot is free."""

    channel: Channel

    def __str__(self) -> str:
        return f"acquire {self.channel.tile}"


@dataclass(frozen=True)
class Commit(Step):
    """Producer: signal that the slot is ready."""

    channel: Channel

    def __str__(self) -> str:
        return f"commit {self.channel.tile}"


@dataclass(frozen=True)
class Await(Step):
    """Consumer: wait until the next slot is ready."""

    channel: Channel

    def __str__(self) -> str:
        return f"await {self.channel.tile}"


@dataclass(frozen=True)
class Release(Step):
    """Consumer: signal that the slot is free."""

    channel: Channel

    def __str__(self) -> str:
        return f"release {self.channel.tile}"


@dataclass(frozen=True)
class Send(Step):
    """Producer of a global channel: copy its tile into the slot."""

    channel: Channel

    @property
    def reads(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.channel.tile,)

    def __str__(self) -> str:
        return f"send {self.channel.tile}"


@dataclass(frozen=True)
class Recv(Step):
    """Consumer of a global channel: copy the slot into its own tile."""

    channel: Channel

    @property
    def writes(self) -> tuple[Tile, ...]:  # type: ignore[override]
        return (self.channel.tile,)

    def __str__(self) -> str:
        return f"receive {self.channel.tile}"


@dataclass(frozen=True)
class Stage:
    """Ops of trip `t - lag` at step t of a `StagedLoop`; nothing where that is no trip."""

    lag: int
    body: tuple[Op, ...]


class Block(Op):
    """A step made of steps."""

    def lines(self, indent: str) -> list[str]:
        """Readable lines."""
        raise NotImplementedError


@dataclass(frozen=True)
class StagedLoop(Block):
    """Steps t = 0 .. trips - 1 + largest lag; at each, the stages in order. `var` in a stage is that stage's trip."""

    var: Var
    trips: Scalar
    stages: tuple[Stage, ...]
    phases: tuple[Phase, ...]

    def lines(self, indent: str) -> list[str]:
        lines = [f"{indent}for {self.var} in 0 .. {self.trips}   # {spans(self.phases)}"]
        for stage in self.stages:
            if stage.lag:
                lines.append(f"{indent}  {stage.lag} trip{'s' if stage.lag > 1 else ''} behind:")
            lines += format_steps(stage.body, indent + ("    " if stage.lag else "  "))
        return lines


@dataclass(frozen=True)
class RoleProgram:
    """What one role runs per task. `rings` gives slots to a private tile that must outlive its trip: the value of trip
    t lives in slot t modulo that number."""

    role: str
    body: tuple[Op, ...]
    rings: tuple[tuple[Tile, int], ...] = ()

    def __str__(self) -> str:
        rings = [f"  keep {t} for {n} trips" for t, n in self.rings]
        return "\n".join([f"role {self.role}", *rings, *format_steps(self.body, "  ")])


@dataclass(frozen=True)
class Roles:
    """A program cut into roles."""

    program: Program
    plan: Plan
    roles: tuple[RoleProgram, ...]
    channels: tuple[Channel, ...]

    def role(self, name: str) -> RoleProgram:
        return next(r for r in self.roles if r.role == name)

    def __str__(self) -> str:
        return "\n".join([f"plan {self.plan}", *map(str, self.channels), *map(str, self.roles)])


def cut(
    program: Program,
    plan: Plan,
    role_of: Callable[[Op], str],
    memory: str,
    skew: Mapping[str, int] | None = None,
) -> Roles:
    """Cut `program` along `role_of`. Channels live in `memory` ("shared" or "global"); `skew` is per role (default: the
    plan's for every role)."""
    body = _split_foreign_accumulators(program.body, role_of)
    order = tuple(dict.fromkeys(role_of(op) for op in _flatten(body)))
    channels = _channels(body, plan, role_of, memory)
    lags = {role: plan.skew if skew is None else skew.get(role, 0) for role in order}
    roles = tuple(_role(body, role, role_of, channels, lags[role]) for role in order)
    return Roles(program, plan, roles, channels)


def _flatten(ops: Iterable[Op]) -> Iterable[Op]:
    for op in ops:
        yield from _flatten(op.body) if isinstance(op, Loop) else (op,)


def _split_foreign_accumulators(ops: Sequence[Op], role_of: Callable[[Op], str]) -> tuple[Op, ...]:
    """Where a product accumulates into a tile that another role owns, let it make a partial product, and the owner add
    it: `acc += p @ v` becomes `o = p @ v` and `acc = acc + o`."""
    everything = list(_flatten(ops))

    def rewrite(op: Op) -> tuple[Op, ...]:
        if isinstance(op, Loop):
            return (replace(op, body=tuple(new for inner in op.body for new in rewrite(inner))),)
        if isinstance(op, Mma) and op.accumulate:
            owners = {role_of(o) for o in everything if op.dst in o.writes and o is not op}
            if owners - {role_of(op)}:
                part = Tile("o", op.dst.shape, op.dst.dtype)
                return (replace(op, dst=part, accumulate=False), Map(op.dst, Read(op.dst) + part))
        return (op,)

    return tuple(new for op in ops for new in rewrite(op))


def _channels(body: Sequence[Op], plan: Plan, role_of: Callable[[Op], str], memory: str) -> tuple[Channel, ...]:
    in_loop = {t for op in body if isinstance(op, Loop) for inner in op.body for t in inner.writes}
    producer: dict[Tile, str] = {}
    readers: dict[Tile, set[str]] = {}
    for op in _flatten(body):
        for t in op.writes:
            producer.setdefault(t, role_of(op))  # later writers work on what they received
        for t in op.reads:
            readers.setdefault(t, set()).add(role_of(op))
    channels = []
    for tile, source in producer.items():
        consumers = readers.get(tile, set()) - {source}
        if not consumers:
            continue
        if len(consumers) > 1 or source in readers[tile]:
            raise ValueError(
                f"tile {tile} of role {source} is read by {sorted(readers[tile])}; a channel joins two roles"
            )
        depth = plan.depth.get(tile.name, 1)
        per_trip = tile in in_loop
        interval = plan.signal_interval if per_trip else 1
        if depth % interval:
            raise ValueError(f"channel {tile}: depth {depth} is not a multiple of signal_interval {interval}")
        channels.append(Channel(tile, source, min(consumers), depth, interval, memory, per_trip))
    return tuple(channels)


def _role(
    body: Sequence[Op], role: str, role_of: Callable[[Op], str], channels: tuple[Channel, ...], lag: int
) -> RoleProgram:
    steps: list[Op] = []
    rings: list[tuple[Tile, int]] = []
    for op in body:
        if not isinstance(op, Loop):
            if role_of(op) == role:
                steps.append(op)
            continue
        late = _late_ops(op.body) if lag else frozenset()
        mine = [o for o in op.body if role_of(o) == role]
        stages = [[o for o in mine if o not in late], [o for o in mine if o in late]]
        inside = [c for c in channels if c.per_trip]
        staged = tuple(Stage(n * lag, tuple(_signals(s, role, inside))) for n, s in enumerate(stages) if s)
        if staged:
            steps.append(StagedLoop(op.var, op.trips, staged, op.phases))
        private = {t for o in stages[0] for t in o.writes} & {t for o in stages[1] for t in o.reads}
        private -= {c.tile for c in channels}
        rings += [(t, lag + 1) for t in sorted(private, key=lambda t: t.name)]
    outside = [c for c in channels if not c.per_trip]
    return RoleProgram(role, tuple(_signals(steps, role, outside)), tuple(rings))


def _late_ops(body: Sequence[Op]) -> frozenset[Op]:
    """The output half of a loop body: the last product, what touches its result, and loads only it needs."""
    last = [op for op in body if isinstance(op, Mma)][-1]
    results = {last.dst}
    for op in body:  # the accumulator that a partial product is added to belongs with it
        if isinstance(op, Map) and last.dst in op.reads:
            results.update(op.writes)
    late: set[Op] = {op for op in body if results & {*op.writes, *op.reads}}
    needed_early = {t for op in body if op not in late for t in op.reads}
    late |= {op for op in body if isinstance(op, Load) and op.dst in last.reads and op.dst not in needed_early}
    return frozenset(late)


def _touches(op: Op, tile: Tile, kind: str) -> bool:
    if isinstance(op, StagedLoop):
        return any(_touches(o, tile, kind) for stage in op.stages for o in stage.body)
    return tile in (op.writes if kind == "write" else op.reads)


def _signals(ops: Sequence[Op], role: str, channels: Sequence[Channel]) -> list[Op]:
    """Put acquire/commit around the writes, and await/release around the reads, of every channel's tile."""
    steps = list(ops)
    for c in channels:
        kind = {c.producer: "write", c.consumer: "read"}.get(role)
        touching = [i for i, op in enumerate(steps) if kind and _touches(op, c.tile, kind)]
        if not touching:
            continue
        first, last = touching[0], touching[-1]
        if kind == "write":
            send: list[Op] = [Send(c)] if c.memory == "global" else []
            steps[last + 1 : last + 1] = [Acquire(c), *send, Commit(c)] if send else [Commit(c)]
            if not send:
                steps.insert(first, Acquire(c))
        elif c.memory == "global":
            steps[first:first] = [Await(c), Recv(c), Release(c)]
        else:
            steps.insert(last + 1, Release(c))
            steps.insert(first, Await(c))
    return steps


def spans(phases: Iterable[Phase]) -> str:
    """Where a loop's masks apply."""
    return ", ".join(f"{'masked' if p.masked else 'unmasked'} to {p.stop}" for p in phases)


def format_steps(steps: Iterable[Op], indent: str) -> list[str]:
    """Readable lines for the steps of a role."""
    lines = []
    for step in steps:
        lines += step.lines(indent) if isinstance(step, Block) else [f"{indent}{step}"]
    return lines
