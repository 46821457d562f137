"""Overlap inside one role whose products run asynchronously (Hopper wgmma): the score product of trip t + 1 is issued
before the output product of trip t, and the softmax of t + 1 runs while that one is in flight (FlashAttention-3,
algorithm 2, arXiv 2407.08608). The order and every wait are derived from what the ops read and write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .roles import Block, Release, RoleProgram, StagedLoop, Step, format_steps, spans
from .scalars import Scalar, Var
from .tiles import Map, Mma, Number, Op, Phase, Tile


@dataclass(frozen=True)
class WaitMma(Step):
    """Wait until at most `pending` of the products issued last are still in flight."""

    pending: int

    def __str__(self) -> str:
        return f"wait for all but {self.pending} products" if self.pending else "wait for all products"


@dataclass(frozen=True)
class Timed:
    """A step together with its trip: that of the loop variable plus `ahead` (0 or 1)."""

    step: Op
    ahead: int


@dataclass(frozen=True)
class OverlappedLoop(Block):
    """prologue (trip 0); steady for var = 0 .. trips - 2; epilogue (trip trips - 1). Nothing runs if trips is 0.
    Phases count trips of the steps that are one ahead."""

    var: Var
    trips: Scalar
    prologue: tuple[Op, ...]
    steady: tuple[Timed, ...]
    epilogue: tuple[Op, ...]
    phases: tuple[Phase, ...]

    def lines(self, indent: str) -> list[str]:
        inner, steady = indent + "    ", [f"{indent}    {t.step}   # trip {self.var} + {t.ahead}" for t in self.steady]
        return [
            f"{indent}trip 0 of {self.trips}, none if that is 0   # {spans(self.phases)}",
            *format_steps(self.prologue, inner),
            f"{indent}for {self.var} in 0 .. {self.trips} - 1",
            *steady,
            f"{indent}last trip",
            *format_steps(self.epilogue, inner),
        ]


def overlap(role: RoleProgram, late_rescale: bool = False) -> RoleProgram:
    """`role` with its staged loop (lags 0 and 1) turned into an `OverlappedLoop`; private tiles need no ring then.
    `late_rescale`: what the output half does in front of its product goes to the end of the trip before."""
    body = tuple(_overlap_loop(op) if isinstance(op, StagedLoop) else op for op in role.body)
    if late_rescale:
        zero = frozenset(op.dst for op in body if isinstance(op, Map) and op.value == Number(0.0))
        body = tuple(_rescale_late(op, zero) if isinstance(op, OverlappedLoop) else op for op in body)
    return RoleProgram(role.role, body, ())


def _rescale_late(loop: OverlappedLoop, zero: frozenset[Tile]) -> OverlappedLoop:
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


def _overlap_loop(loop: StagedLoop) -> OverlappedLoop:
    lags = [stage.lag for stage in loop.stages]
    if lags != [0, 1]:
        raise ValueError(f"overlap needs a loop with stages 0 and 1 trip behind, got lags {lags}; cut with skew 1")
    early, late = (stage.body for stage in loop.stages)
    at = 1 + next(i for i, op in enumerate(early) if isinstance(op, Mma))
    issue = 1 + next(i for i, op in enumerate(late) if isinstance(op, Mma))
    order = [Timed(op, 1) for op in early[:at]] + [Timed(op, 0) for op in late[:issue]]
    steady = _with_waits(order + [Timed(op, 1) for op in early[at:]], [Timed(op, 0) for op in late[issue:]])
    _check_lifetimes(early, late, steady)
    prologue = _with_waits([Timed(op, 0) for op in early], [])
    epilogue = _with_waits([Timed(op, 0) for op in late[:issue]], [Timed(op, 0) for op in late[issue:]])
    return OverlappedLoop(loop.var, loop.trips, _steps(prologue), tuple(steady), _steps(epilogue), loop.phases)


def _steps(timed: Iterable[Timed]) -> tuple[Op, ...]:
    return tuple(t.step for t in timed)


def _conflicts(step: Op, mma: Mma) -> bool:
    """Must `step` wait until `mma` is done?"""
    if isinstance(step, Release):
        return step.channel.tile in mma.reads
    touched: set[Tile] = {*step.reads, *step.writes}
    return mma.dst in touched or bool(set(mma.reads) & set(step.writes))


def _with_waits(steps: Sequence[Timed], after_last: Sequence[Timed]) -> list[Timed]:
    """Insert waits before the first step that conflicts with a product in flight. `after_last` (the steps behind the
    last product of the late stage) goes right behind the wait that completes it."""
    flying: list[Mma] = []
    last = [t.step for t in steps if isinstance(t.step, Mma)][-1]
    out: list[Timed] = []
    rest = list(after_last)

    def complete(mma: Mma, ahead: int) -> None:
        pending = len(flying) - 1 - flying.index(mma)
        out.append(Timed(WaitMma(pending), ahead))
        del flying[: len(flying) - pending]
        if mma is last:
            out.extend(rest)
            rest.clear()

    for t in steps:
        blocking = [mma for mma in flying if _conflicts(t.step, mma)]
        if blocking and not isinstance(t.step, Mma):
            complete(blocking[-1], t.ahead)
        out.append(t)
        if isinstance(t.step, Mma):
            flying.append(t.step)
    if flying:
        complete(flying[-1], out[-1].ahead)
    return out


def _check_lifetimes(early: Sequence[Op], late: Sequence[Op], steady: Sequence[Timed]) -> None:
    """What trip t makes for its late half has one slot, so it must be read before trip t + 1 overwrites it."""
    handed_over = {t for op in early for t in op.writes} & {t for op in late for t in op.reads}
    for tile in handed_over:
        readers = [i for i, t in enumerate(steady) if t.ahead == 0 and tile in t.step.reads]
        writers = [i for i, t in enumerate(steady) if t.ahead == 1 and tile in t.step.writes]
        if readers and writers and max(readers) > min(writers):
            raise ValueError(f"tile {tile} of trip t + 1 would overwrite that of trip t before its last use")
