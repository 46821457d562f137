"""The CPU lane executes the program as it stands, whatever the tiles and wherever the mask ops apply."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from fa_multi.backends.cpu.interpreter import execute
from hypothesis import given, settings
from hypothesis import strategies as st

import fa_multi
from fa_multi import reference
from fa_multi.accuracy import judge
from fa_multi.masks import Mask
from fa_multi.plan import Plan
from fa_multi.programs.forward import forward
from fa_multi.spec import AttentionSpec
from fa_multi.tiles import Load, Loop, MaskTile, Op, Phase, Program, walk


def run(program: Program, q, k, v, tile_elements=1 << 20):
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"))
    sizes = dict(zip(("batch", "seqlen_q", "heads_q"), q.shape)) | {"seqlen_k": k.shape[1], "heads_k": k.shape[2]}
    execute(program, sizes, {"q": q, "k": k, "v": v, "out": out, "lse": lse}, tile_elements)
    return out, lse


def qkv(b=2, sq=50, sk=70, hq=4, hk=2, d=32, dtype=torch.float32):
    shapes = [(b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, d)]
    return tuple(torch.randn(s).to(dtype) for s in shapes)


def spec(causal=True, d=32, dtype="float32"):
    return AttentionSpec(dtype, d, d, d**-0.5, Mask(causal=causal), return_lse=True)


@pytest.mark.parametrize("tiles", [(16, 16), (64, 16), (16, 64), (7, 5), (128, 128)])
@pytest.mark.parametrize("padded", [32, 48])
def test_tile_sizes_do_not_change_the_result(tiles: tuple[int, int], padded: int) -> None:
    q, k, v = qkv()
    out, lse = run(forward(spec(), Plan(*tiles, padded, padded)), q, k, v)
    golden, golden_lse = reference.attention(q, k, v, causal=True)
    naive, naive_lse = reference.attention(q, k, v, causal=True, dtype=q.dtype)
    assert judge(out, golden, naive).ok
    assert judge(lse, golden_lse, naive_lse).ok


def test_few_or_many_tasks_side_by_side_give_equal_bits() -> None:
    q, k, v = qkv()
    program = forward(spec(), Plan(16, 16, 32, 32))
    one, _ = run(program, q, k, v, tile_elements=1)
    all_, _ = run(program, q, k, v, tile_elements=1 << 24)
    assert torch.equal(one, all_)


def edit_loop(program: Program, change) -> Program:
    return replace(program, body=tuple(change(op) if isinstance(op, Loop) else op for op in program.body))


@given(sq=st.integers(1, 60), sk=st.integers(1, 60), causal=st.booleans())
@settings(max_examples=60, deadline=None)
def test_mask_is_the_identity_outside_its_phases(sq: int, sk: int, causal: bool) -> None:
    """The unmasked phase of the loop may drop the mask: poison it there, and nothing changes."""
    q, k, v = qkv(sq=sq, sk=sk)
    program = forward(spec(causal), Plan(16, 8, 32, 32))
    masked = run(program, q, k, v)

    def split(loop: Loop) -> Loop:
        """Drop the mask in unmasked phases by splitting the loop in two."""
        assert [p.masked for p in loop.phases] == [True, False]
        return replace(loop, trips=loop.phases[0].stop)

    plain = tuple(
        op for op in next(o for o in program.body if isinstance(o, Loop)).body if not isinstance(op, MaskTile)
    )
    loop = next(o for o in program.body if isinstance(o, Loop))
    first = split(loop)
    shift = {loop.var: loop.var + loop.phases[0].stop}
    rest = replace(loop, trips=loop.trips - loop.phases[0].stop, body=tuple(shifted(op, shift) for op in plain))
    at = program.body.index(loop)
    both = replace(program, body=(*program.body[:at], first, rest, *program.body[at + 1 :]))
    for a, b in zip(masked, run(both, q, k, v)):
        assert torch.equal(a, b)


def shifted(op, shift):
    """`op` with the loop variable replaced in its addresses."""
    from fa_multi.scalars import Binary, Var

    def scalar(s):
        if isinstance(s, Var):
            return shift.get(s, s)
        if isinstance(s, Binary):
            return Binary(s.op, scalar(s.a), scalar(s.b))
        return s

    if isinstance(op, Load):
        return replace(op, src=replace(op.src, row0=scalar(op.src.row0), rows=scalar(op.src.rows)))
    return op


def test_dropping_an_op_is_noticed() -> None:
    """The oracle comparison fails when the program is wrong: without the rescale, without the mask."""
    q, k, v = qkv(sq=64, sk=64)
    program = forward(spec(), Plan(16, 16, 32, 32))
    golden, _ = reference.attention(q, k, v, causal=True)
    naive, _ = reference.attention(q, k, v, causal=True, dtype=q.dtype)
    rescale = next(op for op in walk(program.body) if str(op) == "acc = acc * alpha")
    mask = next(op for op in walk(program.body) if isinstance(op, MaskTile))
    for dropped in (rescale, mask):
        broken = edit_loop(program, partial(without, dropped))
        assert not judge(run(broken, q, k, v)[0], golden, naive).ok


def without(dropped: Op, loop: Loop) -> Loop:
    return replace(loop, body=tuple(op for op in loop.body if op is not dropped))


def test_wrong_phases_do_not_matter_to_the_cpu_lane() -> None:
    """It applies the mask everywhere, so it stays the judge of lanes that do not."""
    q, k, v = qkv()
    program = forward(spec(), Plan(16, 16, 32, 32))
    wrong = edit_loop(program, lambda loop: replace(loop, phases=(Phase(loop.trips, masked=False),)))
    assert torch.equal(run(program, q, k, v)[0], run(wrong, q, k, v)[0])


def test_inputs_are_not_written() -> None:
    q, k, v = qkv()
    copies = [x.clone() for x in (q, k, v)]
    fa_multi.attention(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), copies))


def test_nan_in_one_batch_entry_stays_there() -> None:
    q, k, v = qkv(b=3)
    clean = fa_multi.attention(q, k, v)
    k[1] = float("nan")
    v[1] = float("inf")
    dirty = fa_multi.attention(q, k, v)
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
    assert bool(dirty[1].isnan().all())
