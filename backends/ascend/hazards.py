"""Order between the pipes of one core: where two instructions on different pipes touch the same bytes, and one writes,
a set_flag behind the first and a wait_flag before the second; on the same pipe, a barrier between them.

`insert` places them, each because of such a pair. `verify` is the independent proof: it unrolls the finished list along
many paths and checks with vector clocks that every dependent pair is ordered and that every flag is set and waited for
alternately. The simulator cannot see these hazards: it executes a core's instructions in order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .instructions import Access, Barrier, Flag, If, Instr, Loop, Node
from .limits import EVENTS, RESERVED_EVENTS, LimitError

Pair = tuple[str, str]  # source pipe, target pipe
IN_ORDER = "S"  # the scalar unit ends one instruction before it starts the next, and a barrier on it is an error
MAX_STEPS = 20_000  # of one unrolled path


class HazardError(ValueError):
    """Two dependent instructions are not ordered, or flags do not alternate. The message names both ends."""


@dataclass(frozen=True)
class _Sync:
    """A set behind child `after`, a wait before child `before` of a block; `back`: that wait is an iteration later."""

    pair: Pair
    after: int
    before: int
    back: bool
    event: int = -1

    def covers(self, after: int, before: int, back: bool) -> bool:
        """Whether this orders child `after` before child `before` (of the next iteration if `back`)."""
        if self.back == back:
            return self.after >= after and self.before <= before
        # a sync inside one iteration also orders two iterations; a backward one orders nothing inside an iteration
        return back and (self.after >= after or self.before <= before)

    def spans(self, child: int) -> bool:
        """Whether the flag may be set while `child` runs."""
        return self.back or self.after < child < self.before


def insert(nodes: Sequence[Node]) -> list[Node]:
    """The same program with flags and barriers in it. Raises LimitError when a pipe pair runs out of event ids."""
    return _insert_block(list(nodes), in_loop=False, busy=frozenset())[0]


def _insert_block(
    nodes: list[Node], in_loop: bool, busy: frozenset[tuple[Pair, int]]
) -> tuple[list[Node], list[_Sync]]:
    """(new nodes, syncs that go around the loop whose body this is). Inner blocks first: what they order already needs
    nothing out here. Their events are named last, when it is known which ones are taken out here."""
    insides = [_insert_inside(n, frozenset()) for n in nodes]
    touched = [_summary(inside) for inside in insides]
    implied = _loop_syncs(insides)
    syncs = _name_events(_cross_pipe_syncs(touched, implied, in_loop), busy)
    barriers = _same_pipe_barriers(touched, [*syncs, *implied], in_loop)
    out: list[Node] = []
    for i, node in enumerate(nodes):
        out += [Flag(True, *s.pair, s.event) for s in syncs if s.before == i]
        out += [Barrier(pipe) for pipe in sorted(barriers.get(i, ()))]
        out += _insert_inside(node, busy | {(s.pair, s.event) for s in syncs if s.spans(i)})
        out += [Flag(False, *s.pair, s.event) for s in syncs if s.after == i]
    return out, [s for s in syncs if s.back]


def _insert_inside(node: Node, busy: frozenset[tuple[Pair, int]]) -> list[Node]:
    if isinstance(node, If):
        return [If(node.condition, _insert_block(node.body, False, busy)[0])]
    if isinstance(node, Loop):
        body, around = _insert_block(node.body, True, busy)
        before = [Flag(False, *s.pair, s.event) for s in around]  # nothing to wait for in the first iteration
        after = [Flag(True, *s.pair, s.event) for s in around]  # and nothing left set after the last
        return [*before, Loop(node.var, node.extent, body), *after]
    return [node]


@dataclass(frozen=True)
class _Touch:
    """An access inside a child. before: pipes whose work from before the child is over when this starts, thanks to a
    wait (or barrier) inside the child; after: pipes that wait for this inside the child."""

    access: Access
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()

    def needs_order(self, later: _Touch) -> bool:
        """Whether something must order this before `later`, in a later child or iteration."""
        a, b = self.access, later.access
        if not a.conflicts(b) or a.pipe in later.before or b.pipe in self.after:
            return False
        return not self.after & later.before  # some pipe waits for this, and is then itself waited for


def _summary(nodes: Sequence[Node], waits: frozenset[Pair] = frozenset()) -> list[_Touch]:
    """What a child touches. waits: (source, target) pairs already waited for on the way here."""
    touches: list[_Touch] = []
    for node in nodes:
        if isinstance(node, Barrier) or (isinstance(node, Flag) and node.wait):
            pair = (node.pipe, node.pipe) if isinstance(node, Barrier) else (node.source, node.target)
            waits |= {pair}
        if isinstance(node, Barrier) or (isinstance(node, Flag) and not node.wait):
            pipe, target = (node.pipe, node.pipe) if isinstance(node, Barrier) else (node.source, node.target)
            touches = [_Touch(t.access, t.before, t.after | {target}) if t.access.pipe == pipe else t for t in touches]
        elif isinstance(node, (If, Loop)):
            touches += _summary(node.body, waits)
        elif isinstance(node, Instr):
            for access in node.accesses:
                touches.append(_Touch(access, frozenset(p for p, q in waits if q == access.pipe)))
    return list(dict.fromkeys(touches))


_Touched = Sequence[Sequence[_Touch]]


def _dependences(touched: _Touched, in_loop: bool) -> Iterator[tuple[int, int, bool, list[tuple[_Touch, _Touch]]]]:
    """(child, later child, whether that is in the next iteration, pairs to order); nearest children first."""
    spans = [(i, j, False) for j in range(len(touched)) for i in range(j - 1, -1, -1)]
    if in_loop:
        spans += [(i, j, True) for j in range(len(touched)) for i in range(len(touched) - 1, j - 1, -1)]
    for i, j, back in spans:
        pairs = [(a, b) for a in touched[i] for b in touched[j] if a.needs_order(b)]
        if pairs:
            yield i, j, back, pairs


def _loop_syncs(insides: Sequence[Sequence[Node]]) -> list[_Sync]:
    """A loop whose flags go around it orders what comes before it and what comes after, run or not."""
    return [
        _Sync((n.source, n.target), k - 1, k + 1, back=False)
        for k, inside in enumerate(insides)
        for n in inside
        if isinstance(n, Flag) and not n.wait
    ]


def _cross_pipe_syncs(touched: _Touched, implied: Sequence[_Sync], in_loop: bool) -> list[_Sync]:
    syncs: list[_Sync] = []
    for i, j, back, touches in _dependences(touched, in_loop):
        for pair in dict.fromkeys((a.access.pipe, b.access.pipe) for a, b in touches):
            if pair[0] != pair[1] and not any(s.pair == pair and s.covers(i, j, back) for s in (*syncs, *implied)):
                syncs.append(_Sync(pair, i, j, back))
    return syncs


def _same_pipe_barriers(touched: _Touched, syncs: Sequence[_Sync], in_loop: bool) -> dict[int, set[str]]:
    """Child index -> pipes that need a barrier before it."""
    places: dict[int, set[str]] = {}
    for i, j, back, touches in _dependences(touched, in_loop):
        between = range(i + 1, j + 1) if not back else [*range(i + 1, len(touched)), *range(j + 1)]
        for a, b in touches:
            pipe = a.access.pipe
            if pipe == IN_ORDER or pipe != b.access.pipe or any(pipe in places.get(k, ()) for k in between):
                continue
            if not _ordered_through_another(a, b, i, j, back, syncs):
                places.setdefault(j, set()).add(pipe)
    return places


def _ordered_through_another(a: _Touch, b: _Touch, i: int, j: int, back: bool, syncs: Sequence[_Sync]) -> bool:
    """Whether some other pipe waits for `a`, and the pipe of `b` then waits for that one."""
    pipe = a.access.pipe
    for second in syncs:
        other, target = second.pair
        if target != pipe or other == pipe or not second.covers(i, j, back):
            continue
        if other in a.after and (second.after >= i or not second.back):
            return True
        if any(
            first.pair == (pipe, other) and not first.back and i <= first.after and first.before <= second.after
            for first in syncs
        ):
            return True
    return False


def _name_events(syncs: Sequence[_Sync], busy: frozenset[tuple[Pair, int]]) -> list[_Sync]:
    """Give every sync an event id that no flag set at the same time has."""
    named: list[_Sync] = []
    for s in sorted(syncs, key=lambda s: not s.back):  # the long-lived ones first
        taken = {e for pair, e in busy if pair == s.pair}
        taken |= {n.event for n in named if n.pair == s.pair and (n.back or s.back or _overlap(n, s))}
        free = [e for e in range(EVENTS) if e not in RESERVED_EVENTS and e not in taken]
        if not free:
            raise LimitError(
                f"more than {EVENTS - len(RESERVED_EVENTS)} events are needed at once from pipe "
                f"{s.pair[0]} to {s.pair[1]}; use fewer buffers in one role"
            )
        named.append(_Sync(s.pair, s.after, s.before, s.back, free[0]))
    return named


def _overlap(a: _Sync, b: _Sync) -> bool:
    return a.after < b.before and b.after < a.before


# ---- the proof ------------------------------------------------------------------------------------------------------


def verify(nodes: Sequence[Node], paths: int = 60, seed: int = 0) -> None:
    """Raise HazardError unless every dependent pair is ordered, on straight paths (every loop 0, 1, 2 and 3 times,
    every branch taken or none) and on `paths` random ones."""
    choices = [_Choice(trips, taken) for trips in (0, 1, 2, 3) for taken in (True, False)]
    choices += [_Choice(rng=random.Random(seed + n)) for n in range(paths)]
    for choice in choices:
        _Clocks().run(_unroll(nodes, choice))


@dataclass(frozen=True)
class _Choice:
    """How often every loop runs and whether branches are taken; at random where `rng` is given."""

    trips: int = 0
    taken: bool = False
    rng: random.Random | None = None

    def loop(self) -> int:
        return self.rng.randrange(4) if self.rng else self.trips

    def branch(self) -> bool:
        return self.rng.random() < 0.7 if self.rng else self.taken


def _unroll(nodes: Sequence[Node], choice: _Choice) -> Iterator[Node]:
    for node in nodes:
        if isinstance(node, Loop):
            for _ in range(choice.loop()):
                yield from _unroll(node.body, choice)
        elif isinstance(node, If):
            if choice.branch():
                yield from _unroll(node.body, choice)
        else:
            yield node


class _Clocks:
    """Each pipe runs its instructions in order of start, not of end. known[q][p] = n says: when the next instruction of
    q starts, the first n of p are known to have ended."""

    def __init__(self) -> None:
        self.issued: dict[str, int] = {}
        self.known: dict[str, dict[str, int]] = {}
        self.raised: dict[tuple[str, str, int], dict[str, int]] = {}
        self.history: dict[tuple[str, bool, str, int], tuple[Access, int, str]] = {}

    def run(self, path: Iterator[Node]) -> None:
        for step, node in enumerate(path):
            if step > MAX_STEPS:
                return  # long enough to have seen every pair of neighbours
            if isinstance(node, Instr):
                self._instruction(node)
            elif isinstance(node, Barrier):
                self._learn(node.pipe, {node.pipe: self.issued.get(node.pipe, 0)})
            elif isinstance(node, Flag):
                self._flag(node)
        if self.raised:
            source, target, event = next(iter(self.raised))
            raise HazardError(f"event {event} from {source} to {target} is left set at the end")

    def _learn(self, pipe: str, clock: dict[str, int]) -> None:
        mine = self.known.setdefault(pipe, {})
        for p, n in clock.items():
            mine[p] = max(mine.get(p, 0), n)

    def _flag(self, flag: Flag) -> None:
        key = flag.source, flag.target, flag.event
        where = f"event {flag.event} from {flag.source} to {flag.target}"
        if not 0 <= flag.event < EVENTS or flag.event in RESERVED_EVENTS:
            raise HazardError(f"{where}: the id must be in 0..{EVENTS - 1} and not {sorted(RESERVED_EVENTS)}")
        if flag.wait:
            if key not in self.raised:
                raise HazardError(f"{where} is waited for before it is set")
            self._learn(flag.target, self.raised.pop(key))
        elif key in self.raised:
            raise HazardError(f"{where} is set twice without a wait between")
        else:
            clock = dict(self.known.get(flag.source, {}))
            clock[flag.source] = self.issued.get(flag.source, 0)
            self.raised[key] = clock

    def _instruction(self, instr: Instr) -> None:
        for pipe in dict.fromkeys(a.pipe for a in instr.accesses):
            self.issued[pipe] = self.issued.get(pipe, 0) + 1
        for access in instr.accesses:
            known = self.known.get(access.pipe, {})
            for earlier, number, text in self.history.values():
                if known.get(earlier.pipe, 0) >= number or earlier.pipe == access.pipe == IN_ORDER:
                    continue
                if earlier.conflicts(access):
                    raise HazardError(
                        f"nothing orders `{text}` ({earlier.pipe}) before `{instr.text}` ({access.pipe}): "
                        f"both touch {earlier.buffer.memory} of {earlier.buffer.name}"
                    )
        for access in instr.accesses:
            self._remember(access, self.issued[access.pipe], instr.text)

    def _remember(self, access: Access, number: int, text: str) -> None:
        """The newest access of each kind is enough: a pipe's clock that covers it covers the older ones."""
        key = access.pipe, access.write, access.buffer.name, access.buffer.offset
        self.history.pop(key, None)  # the newest goes last, where errors look for it last
        self.history[key] = access, number, text
