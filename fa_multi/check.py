"""Proof that a set of roles is safe, without a device: the roles run as coroutines over counting signals.

Every wait is matched with the signal that lets it pass, and vector clocks record what each role thereby knows. A slot
may be written only when the read of its last content is known to be over, and read only when its write is known to be.
That makes the verdict independent of timing: one run shows every overwrite and every deadlock of a task sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from .overlap import OverlappedLoop, WaitMma
from .roles import Acquire, Await, Channel, Commit, Recv, Release, RoleProgram, Roles, Send, StagedLoop
from .tiles import Mma, Op, Tile

Clock = dict[str, int]
Signal = tuple[str, str]  # channel tile, "ready" or "free"


class RoleError(Exception):
    """The roles are not safe. `kind`: "deadlock", "overwrite", "unready", "stale", "unbalanced", "outstanding"
    or "flags"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True)
class SignalLimits:
    """What a device's signals can do: ids 0 .. ids - 1, at most `outstanding` signals not yet waited for."""

    ids: int
    outstanding: int


def check(roles: Roles, limits: SignalLimits | None = None, tasks: Sequence[Sequence[int]] | None = None) -> None:
    """Raise RoleError unless the roles are safe. `tasks`: sequences of trip counts to run, default chosen from the
    depths so that every ring wraps, with empty tasks in between; a plan without a persistent loop runs single tasks."""
    _check_signals(roles, limits)
    imbalance = None
    for trips in tasks or _task_sequences(roles):
        for order in permutations(r.role for r in roles.roles):
            imbalance = _Run(roles, trips, order, limits).run() or imbalance
    if imbalance:  # said last: a missing signal shows better as what it leads to
        raise RoleError("unbalanced", imbalance)


def _task_sequences(roles: Roles) -> list[tuple[int, ...]]:
    deepest = max([c.depth for c in roles.channels] + [roles.plan.skew, 1])
    single: list[tuple[int, ...]] = [(n,) for n in range(2 * deepest + 3)]
    return (
        [*single, (1, 0, 2, 0, 0, deepest + 1, 1), (deepest, 2 * deepest + 1, 3, 1, 1, 1)]
        if roles.plan.cores
        else single
    )


def _check_signals(roles: Roles, limits: SignalLimits | None) -> None:
    if limits is None:
        return
    needed = 2 * len(roles.channels)
    if needed > limits.ids:
        raise RoleError(
            "flags", f"{len(roles.channels)} channels need {needed} signal ids, the device has {limits.ids}"
        )
    for c in roles.channels:
        if c.depth // c.signal_interval > limits.outstanding:
            raise RoleError(
                "outstanding",
                f"channel {c.tile}: {c.depth // c.signal_interval} free signals can be outstanding, the device counts "
                f"to {limits.outstanding}; use a smaller depth or a larger signal_interval",
            )


@dataclass
class _Slot:
    item: int = -1
    written: tuple[str, int] | None = None
    reads: tuple[tuple[str, int], ...] = ()


class _Run:
    """One sequence of tasks, roles scheduled greedily in a given order of preference."""

    def __init__(self, roles: Roles, trips: Sequence[int], order: Iterable[str], limits: SignalLimits | None) -> None:
        self.trips, self.limits = trips, limits
        self.programs = {name: roles.role(name) for name in order}
        self.clocks: dict[str, Clock] = {name: dict.fromkeys(self.programs, 0) for name in self.programs}
        self.signals: dict[Signal, deque[Clock]] = {}
        self.slots: dict[str, list[_Slot]] = {}
        self.groups: dict[tuple[str, str], int] = {}
        self.task = dict.fromkeys(self.programs, 0)
        self.channels = {c.tile: c for c in roles.channels}
        for c in roles.channels:
            start = dict(self.clocks[c.consumer])
            self.signals[c.tile.name, "ready"] = deque()
            self.signals[c.tile.name, "free"] = deque(dict(start) for _ in range(c.depth // c.signal_interval))
            self.slots[c.tile.name] = [_Slot() for _ in range(c.depth)]

    def run(self) -> str | None:
        """Run to the end; returns what is left unbalanced then."""
        waiting: dict[str, Signal | None] = dict.fromkeys(self.programs)
        running = {name: self.role(program) for name, program in self.programs.items()}
        while running:
            for name in list(running):  # the first role that can move does
                blocked_on = waiting[name]
                if blocked_on is None or self.signals[blocked_on]:
                    break
            else:
                stuck = "; ".join(f"{n} waits for {waiting[n][0]} {waiting[n][1]}" for n in running)  # type: ignore[index]
                raise RoleError("deadlock", f"tasks of {list(self.trips)} trips: {stuck}")
            try:
                if blocked_on is not None:
                    self.receive(name, blocked_on)
                waiting[name] = next(running[name])
            except StopIteration:
                del running[name]
        return self.imbalance()

    def imbalance(self) -> str | None:
        for c in self.channels.values():
            left, free = len(self.signals[c.tile.name, "ready"]), len(self.signals[c.tile.name, "free"])
            if left or free != c.depth // c.signal_interval:
                return (
                    f"channel {c.tile} ends with {left} ready signals and {free} free ones, not 0 and "
                    f"{c.depth // c.signal_interval} (tasks of {list(self.trips)} trips)"
                )
        return None

    # ------------------------------------------------------------------------------------------ what roles do

    def role(self, program: RoleProgram) -> Generator[Signal, None, None]:
        for task, trips in enumerate(self.trips):
            self.task[program.role] = task
            private: dict[tuple[Tile, int], int] = {}
            flying: list[tuple[Mma, int]] = []
            rings = dict(program.rings)
            for op in program.body:
                for step, trip, of in _unroll(op, task, trips):
                    yield from self.step(program.role, step, trip, of, private, flying, rings)
            self.complete(program.role, 0, flying)
            for c in self.channels.values():
                if c.per_trip and program.role in (c.producer, c.consumer):
                    key = (program.role, c.tile.name)
                    self.groups[key] = self.groups.get(key, 0) + -(-trips // c.signal_interval)

    def step(
        self,
        role: str,
        step: Op,
        trip: int,
        of: int,
        private: dict[tuple[Tile, int], int],
        flying: list[tuple[Mma, int]],
        rings: Mapping[Tile, int],
    ) -> Generator[Signal, None, None]:
        self.clocks[role][role] += 1
        if isinstance(step, (Acquire, Await)):
            if trip % step.channel.signal_interval == 0:
                yield (step.channel.tile.name, "free" if isinstance(step, Acquire) else "ready")
        elif isinstance(step, (Commit, Release)):
            interval = step.channel.signal_interval
            if trip % interval == interval - 1 or trip == of - 1:
                self.send(role, (step.channel.tile.name, "ready" if isinstance(step, Commit) else "free"))
        elif isinstance(step, Send):
            self.write(role, step.channel, trip)
        elif isinstance(step, Recv):
            self.read(role, step.channel, trip)
        elif isinstance(step, WaitMma):
            self.complete(role, step.pending, flying)
        else:
            asynchronous = isinstance(step, Mma) and self.asynchronous(role)
            for tile in () if asynchronous else step.reads:
                self.touch(role, tile, trip, "read")
            for tile in step.writes:
                self.touch(role, tile, trip, "write")
            self.check_private(role, step, trip, private, rings)
            if asynchronous:
                flying.append((step, trip))  # type: ignore[arg-type]

    def asynchronous(self, role: str) -> bool:
        return any(isinstance(op, OverlappedLoop) for op in self.programs[role].body)

    def complete(self, role: str, pending: int, flying: list[tuple[Mma, int]]) -> None:
        while len(flying) > pending:
            mma, trip = flying.pop(0)
            for tile in mma.reads:
                self.touch(role, tile, trip, "read")

    def touch(self, role: str, tile: Tile, trip: int, kind: str) -> None:
        c = self.channels.get(tile)
        if c is None or c.memory == "global":  # a global slot is touched by send and receive alone
            return
        if kind == "write" and role == c.producer:
            self.write(role, c, trip)
        elif kind == "read" and role == c.consumer:
            self.read(role, c, trip)

    def check_private(
        self, role: str, step: Op, trip: int, private: dict[tuple[Tile, int], int], rings: Mapping[Tile, int]
    ) -> None:
        """A tile handed from one stage to a later one must still hold the value of its own trip."""
        handed = dict(rings) or dict.fromkeys(self.handed_over(role), 1)
        for tile in step.reads:
            if tile in handed and tile not in step.writes:
                found = private.get((tile, trip % handed[tile]))
                if found is not None and found != trip:
                    raise RoleError("stale", f"role {role} reads {tile} of trip {found} in trip {trip}")
        for tile in step.writes:
            if tile in handed:
                private[tile, trip % handed[tile]] = trip

    def handed_over(self, role: str) -> set[Tile]:
        tiles: set[Tile] = set()
        for op in self.programs[role].body:
            if isinstance(op, StagedLoop) and len(op.stages) > 1:
                early, late = op.stages[0].body, op.stages[1].body
                tiles |= {t for o in early for t in o.writes} & {t for o in late for t in o.reads}
        return tiles - set(self.channels)

    # ------------------------------------------------------------------------------------------ signals and slots

    def send(self, role: str, signal: Signal) -> None:
        queue = self.signals[signal]
        queue.append(dict(self.clocks[role]))
        if self.limits and len(queue) > self.limits.outstanding:
            raise RoleError("outstanding", f"{len(queue)} {signal[1]} signals of {signal[0]} are outstanding")

    def receive(self, role: str, signal: Signal) -> None:
        known = self.signals[signal].popleft()
        mine = self.clocks[role]
        for other, time in known.items():
            mine[other] = max(mine[other], time)

    def item(self, role: str, c: Channel, trip: int) -> tuple[int, _Slot]:
        if not c.per_trip:
            task = self.task[role]
            return task, self.slots[c.tile.name][task % c.depth]
        group = self.groups.get((role, c.tile.name), 0) + trip // c.signal_interval
        slot = (group % (c.depth // c.signal_interval)) * c.signal_interval + trip % c.signal_interval
        return group * c.signal_interval + trip % c.signal_interval, self.slots[c.tile.name][slot]

    def knows(self, role: str, event: tuple[str, int]) -> bool:
        return self.clocks[role][event[0]] >= event[1]

    def write(self, role: str, c: Channel, trip: int) -> None:
        item, slot = self.item(role, c, trip)
        if slot.item != item and not all(self.knows(role, event) for event in slot.reads):
            raise RoleError("overwrite", f"{role} writes {c.tile} of trip {trip} into a slot that is still in use")
        slot.item, slot.written, slot.reads = item, (role, self.clocks[role][role]), ()

    def read(self, role: str, c: Channel, trip: int) -> None:
        item, slot = self.item(role, c, trip)
        if slot.item > item:
            raise RoleError("overwrite", f"{role} reads {c.tile} of trip {trip}, but its slot has been written since")
        if slot.item != item or slot.written is None or not self.knows(role, slot.written):
            raise RoleError("unready", f"{role} reads {c.tile} of trip {trip} before it is known to be there")
        slot.reads = (*slot.reads, (role, self.clocks[role][role]))


def _unroll(op: Op, task: int, trips: int) -> Iterable[tuple[Op, int, int]]:
    """(step, its trip, trips of its loop) in the order the role executes them. Outside loops the trip is the task."""
    if isinstance(op, StagedLoop):
        for t in range(trips + max(stage.lag for stage in op.stages) if trips else 0):
            for stage in op.stages:
                if 0 <= t - stage.lag < trips:
                    yield from ((step, t - stage.lag, trips) for step in stage.body)
    elif isinstance(op, OverlappedLoop):
        if trips:
            yield from ((step, 0, trips) for step in op.prologue)
            for t in range(trips - 1):
                yield from ((timed.step, t + timed.ahead, trips) for timed in op.steady)
            yield from ((step, trips - 1, trips) for step in op.epilogue)
    else:
        yield op, task, task + 1
