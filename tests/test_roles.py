"""Cutting a program into roles, overlapping them, and the proof that the result is safe, with every fault planted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa_multi.check import RoleError, SignalLimits, check
from fa_multi.masks import Mask
from fa_multi.overlap import OverlappedLoop, Timed, WaitMma, overlap
from fa_multi.plan import Plan
from fa_multi.programs.forward import forward
from fa_multi.roles import Acquire, Await, Commit, Recv, Release, Roles, Send, StagedLoop, cut
from fa_multi.spec import AttentionSpec
from fa_multi.tiles import Load, Mma

SPEC = AttentionSpec("bfloat16", 128, 128, 0.1, Mask(causal=True), return_lse=True)
ASCEND_SIGNALS = SignalLimits(ids=11, outstanding=15)


def ascend(skew=0, interval=1, cores=24, **depth) -> Roles:
    plan = Plan(128, 128, 128, 128, depth=depth, skew=skew, signal_interval=interval, cores=cores)
    return cut(forward(SPEC, plan), plan, lambda op: "cube" if isinstance(op, (Load, Mma)) else "vector", "global")


def hopper(cores=0, **depth) -> Roles:
    plan = Plan(128, 128, 128, 128, depth=depth or {"k": 2, "v": 2}, skew=1, groups=2, cores=cores)
    roles = cut(
        forward(SPEC, plan),
        plan,
        lambda op: "loader" if isinstance(op, Load) else "compute",
        "shared",
        skew={"compute": 1},
    )
    return replace(roles, roles=(roles.role("loader"), overlap(roles.role("compute"))))


# ------------------------------------------------------------------------------------------------ the cut


def test_ascend_cut_yields_the_three_workspaces() -> None:
    channels = {c.tile.name: c for c in ascend(s=4, p=3, o=2).channels}
    found = {n: (c.producer, c.consumer, c.tile.dtype, c.depth, c.memory) for n, c in channels.items()}
    assert found == {
        "s": ("cube", "vector", "float32", 4, "global"),
        "p": ("vector", "cube", "bfloat16", 3, "global"),
        "o": ("cube", "vector", "float32", 2, "global"),
    }


def test_ascend_accumulator_stays_with_its_owner() -> None:
    text = str(ascend())
    assert "o = p @ v" in text
    assert "acc = acc + o" in text
    assert "acc +=" not in text


def test_hopper_cut_yields_the_k_and_v_rings() -> None:
    channels = {c.tile.name: c for c in hopper().channels}
    found = {n: (c.producer, c.consumer, c.depth, c.bytes, c.per_trip) for n, c in channels.items()}
    assert found == {
        "q": ("loader", "compute", 1, 128 * 128 * 2, False),
        "k": ("loader", "compute", 2, 2 * 128 * 128 * 2, True),
        "v": ("loader", "compute", 2, 2 * 128 * 128 * 2, True),
    }


def test_skew_keeps_alpha_for_the_trips_it_is_behind() -> None:
    assert [(t.name, n) for t, n in ascend(skew=3, s=4, p=4, o=2).role("vector").rings] == [("alpha", 4)]
    assert ascend(skew=0).role("vector").rings == ()


def test_depth_must_be_a_multiple_of_the_interval() -> None:
    with pytest.raises(ValueError, match="channel s: depth 3 is not a multiple of signal_interval 2"):
        ascend(interval=2, s=3, p=2, o=2)


# ------------------------------------------------------------------------------------------------ the overlap


def test_overlap_issues_the_next_scores_before_the_output_and_softmax_under_it() -> None:
    loop = next(op for op in hopper().role("compute").body if isinstance(op, OverlappedLoop))
    steps = [f"{t.step}@{t.ahead}" for t in loop.steady]
    at = {s.split("@")[0] if not s.startswith("wait") else s: i for i, s in enumerate(steps)}
    order = [
        next(i for i, s in enumerate(steps) if s.startswith("s = q @ k.T")),
        next(i for i, s in enumerate(steps) if s.startswith("acc = acc * alpha")),
        next(i for i, s in enumerate(steps) if s.startswith("acc += p @ v")),
        next(i for i, s in enumerate(steps) if s.startswith("wait for all but 1")),
        next(i for i, s in enumerate(steps) if s.startswith("release k")),
        next(i for i, s in enumerate(steps) if s.startswith("s = exp")),
        next(i for i, s in enumerate(steps) if s.startswith("wait for all products")),
        next(i for i, s in enumerate(steps) if s.startswith("release v")),
        next(i for i, s in enumerate(steps) if s.startswith("p = bfloat16(s)")),
    ]
    assert order == sorted(order), at


def test_overlap_needs_skew_one() -> None:
    with pytest.raises(ValueError, match="overlap needs a loop with stages 0 and 1 trip behind"):
        overlap(ascend(skew=0).role("vector"))


# ------------------------------------------------------------------------------------------------ safe as it stands


@pytest.mark.parametrize(
    "roles",
    [
        ascend(),
        ascend(skew=1, s=2, p=2, o=2),
        ascend(skew=2, s=1, p=2, o=1),
        ascend(skew=4, interval=2, s=6, p=6, o=2),
        ascend(skew=1, interval=2, s=4, p=4, o=4),
        hopper(),
        hopper(k=1, v=1),
        hopper(k=3, v=3),
        hopper(cores=132),
    ],
    ids=lambda r: str(r.plan),
)
def test_safe(roles: Roles) -> None:
    check(roles, ASCEND_SIGNALS if roles.channels[0].memory == "global" else None)


# ------------------------------------------------------------------------------------------------ planted faults


def edited(roles: Roles, role: str, change) -> Roles:
    """`roles` with every list of steps of one role passed through `change`."""

    def visit(ops):
        out = []
        for op in change(list(ops)):
            if isinstance(op, StagedLoop):
                stages = tuple(replace(s, body=tuple(change(list(s.body)))) for s in op.stages)
                op = replace(op, stages=stages)
            elif isinstance(op, OverlappedLoop):
                op = replace(
                    op,
                    prologue=tuple(change(list(op.prologue))),
                    steady=tuple(timed(op.steady, change)),
                    epilogue=tuple(change(list(op.epilogue))),
                )
            out.append(op)
        return tuple(out)

    def timed(steps, change):
        ahead = {id(t.step): t.ahead for t in steps}
        return [Timed(s, ahead[id(s)]) for s in change([t.step for t in steps])]

    parts = tuple(replace(r, body=visit(r.body)) if r.role == role else r for r in roles.roles)
    return replace(roles, roles=parts)


def without(kind, tile):
    return lambda ops: [o for o in ops if not (isinstance(o, kind) and o.channel.tile.name == tile)]


def moved(kind, tile, to):
    """Move a signal step directly before the first step for which `to` holds."""

    def change(ops):
        mine = [o for o in ops if isinstance(o, kind) and o.channel.tile.name == tile]
        targets = [i for i, o in enumerate(ops) if to(o)]
        if not mine or not targets:
            return ops
        rest = [o for o in ops if o is not mine[0]]
        at = next(i for i, o in enumerate(rest) if to(o))
        return [*rest[:at], mine[0], *rest[at:]]

    return change


def is_step(kind, tile):
    return lambda o: isinstance(o, kind) and o.channel.tile.name == tile


WIDE = {"s": 2, "p": 2, "o": 2}
FAULTS = {
    "a ready signal is never set": (edited(ascend(**WIDE), "cube", without(Commit, "s")), "deadlock"),
    "a free signal is never set": (edited(ascend(**WIDE), "vector", without(Release, "s")), "deadlock"),
    "a ready wait is missing": (edited(ascend(**WIDE), "vector", without(Await, "o")), "unready"),
    # With skew 0 the probabilities come back before the next scores are written, so only a skew needs this wait.
    "a free wait is missing": (edited(ascend(skew=2, s=2, p=4, o=2), "cube", without(Acquire, "s")), "overwrite"),
    "ready before the send": (edited(ascend(**WIDE), "cube", moved(Commit, "s", is_step(Send, "s"))), "unready"),
    "free before the read": (
        edited(ascend(skew=1, p=2), "vector", moved(Release, "s", is_step(Recv, "s"))),
        "overwrite",
    ),
    "K released before its product is done": (
        edited(hopper(k=1, v=1), "compute", moved(Release, "k", lambda o: isinstance(o, WaitMma))),
        "overwrite",
    ),
    "V released before its product is done": (
        edited(hopper(k=1, v=1), "compute", moved(Release, "v", lambda o: isinstance(o, WaitMma))),
        "overwrite",
    ),
    "K is never awaited": (edited(hopper(), "compute", without(Await, "k")), "unready"),
    "the loader does not wait for free slots": (edited(hopper(), "loader", without(Acquire, "v")), "overwrite"),
    "P's ring is shorter than the skew": (ascend(skew=5, s=2, p=2, o=2), "deadlock"),
    "alpha has one slot under a skew": (
        replace(
            ascend(skew=1, **WIDE),
            roles=tuple(replace(r, rings=()) for r in ascend(skew=1, **WIDE).roles),
        ),
        "stale",
    ),
    "more than 15 signals outstanding": (ascend(s=16, p=16, o=16), "outstanding"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    roles, kind = FAULTS[name]
    with pytest.raises(RoleError) as error:
        check(roles, ASCEND_SIGNALS if roles.channels[0].memory == "global" else None)
    assert error.value.kind == kind, str(error.value)


def test_too_few_flag_ids() -> None:
    with pytest.raises(RoleError, match="3 channels need 6 signal ids, the device has 5"):
        check(ascend(), SignalLimits(ids=5, outstanding=15))


def test_a_signal_set_twice_is_unbalanced() -> None:
    twice = edited(
        ascend(**WIDE), "vector", lambda ops: [x for o in ops for x in ([o, o] if is_step(Release, "s")(o) else [o])]
    )
    with pytest.raises(RoleError) as error:
        check(twice, None, tasks=[(1,)])
    assert error.value.kind == "unbalanced"
