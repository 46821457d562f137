"""Intervals against brute force: trimming, unmasked tiles and empty rows all follow from the two ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fa_multi.masks import Bound, Interval, Mask
from fa_multi.reference import visible
from fa_multi.scalars import Const, Var, ceildiv, maximum, minimum

LENGTHS = st.integers(1, 70)


@given(sq=LENGTHS, sk=LENGTHS, causal=st.booleans())
@settings(max_examples=300, deadline=None)
def test_interval_is_the_oracles_mask(sq: int, sk: int, causal: bool) -> None:
    interval = Mask(causal=causal).interval(Const(sq), Const(sk))
    expected = visible(sq, sk, causal)
    for row in range(sq):
        first, last = interval.first(row).eval({}), interval.last(row).eval({})
        assert [first <= col < last for col in range(sk)] == expected[row].tolist()


@given(
    sq=LENGTHS,
    sk=LENGTHS,
    left=st.one_of(st.none(), st.integers(-20, 40)),
    right=st.one_of(st.none(), st.integers(-20, 40)),
    m=st.sampled_from([4, 16]),
    n=st.sampled_from([4, 8, 16]),
)
@settings(max_examples=500, deadline=None)
def test_tiles_cover_what_is_visible_and_unmasked_tiles_hide_nothing(sq, sk, left, right, m, n) -> None:
    interval = Interval(upper=(Bound(0, Const(sk)),))
    if left is not None:
        interval &= Interval(lower=(Bound(1, Const(sk - sq - left)),))
    if right is not None:
        interval &= Interval(upper=(Bound(1, Const(sk - sq + 1 + right)),))
    for row0 in range(0, sq, m):
        rows = min(m, sq - row0)
        env = {"row0": row0, "rows": rows}
        for var, value in interval.tile_lets(Var("row0"), Var("row0") + Var("rows") - 1, n):
            env[var.name] = value.eval(env)
        lo, full_lo = env.get("tile_lo", 0), env.get("full_lo", 0)
        hi, full_hi = env["tile_hi"], env["full_hi"]
        assert 0 <= lo <= full_lo <= full_hi <= hi or lo == hi == full_hi
        for row in range(row0, row0 + rows):
            first, last = interval.first(row).eval({}), interval.last(row).eval({})
            for col in range(sk):
                if first <= col < last:
                    assert lo * n <= col < hi * n
            for tile in range(full_lo, full_hi):
                assert first <= tile * n
                assert tile * n + n <= last


def test_scalar_text_and_value_agree() -> None:
    x, y = Var("x"), Var("y")
    functions = {"min": min, "max": max, "ceildiv": lambda a, b: -(-a // b)}
    for e in (
        x - (y - 3),
        (x + 1) * 2 - y,
        (x + y) // 3 * 2,
        maximum(minimum(x, y), 0),
        ceildiv(x + 5, 4) - 1,
        x + 3 - 3,
    ):
        for a in (0, 1, 7):
            for b in (0, 2, 9):
                assert eval(str(e), {"x": a, "y": b, **functions}) == e.eval({"x": a, "y": b})
