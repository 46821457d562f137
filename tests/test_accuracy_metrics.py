"""Every number of the comparison against its definition, written out for small tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fa_multi.accuracy.metrics import ULP_BINS, Measures, Tally, ulp_distance
from fa_multi.accuracy.standards import Thresholds, dual, low_precision, nats, ratio, rows
from fa_multi.accuracy.tolerance import judge
from fa_multi.philox import fingerprint, key, normal


def tally(x: torch.Tensor, reference: torch.Tensor, small_below: float = 0.1, small_atol: float = 0.01) -> Tally:
    """x, reference : (heads, rows, cols)."""
    found = Tally(1, *x.shape[:2], x.dtype, small_below, small_atol)
    found.add(x, reference.double(), 0, 0)
    return found


def measure(x: torch.Tensor, reference: torch.Tensor, **small: float) -> Measures:
    return tally(x, reference, **small).result()


def noisy(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 50, 8)) -> tuple[torch.Tensor, torch.Tensor]:
    reference = torch.from_numpy(normal(key("metrics"), 0, math.prod(shape))).view(shape)
    noise = torch.from_numpy(normal(key("noise"), 0, math.prod(shape))).view(shape)
    return (reference + 0.02 * noise).to(dtype), reference


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ulp_distance_counts_floats(dtype: torch.dtype) -> None:
    start = torch.tensor([-1.0, -1e-7, 0.0, 3.0, 0.5], dtype=dtype)
    steps = [0, 1, 5, 40]
    x = start.clone()
    for taken in range(max(steps) + 1):
        if taken in steps:
            assert ulp_distance(x, start.double()).tolist() == [taken] * 5
        bits = x.view(torch.int32 if dtype == torch.float32 else torch.int16)
        up = torch.where(bits >= 0, bits + 1, torch.where(x == 0, torch.ones_like(bits), bits - 1))
        x = up.view(dtype)
    assert ulp_distance(torch.tensor([-0.0], dtype=dtype), torch.zeros(1).double()).item() == 0


def test_the_measures_are_their_definitions() -> None:
    x, reference = noisy()
    m = measure(x, reference)
    a, r = x.double().numpy().ravel(), reference.numpy().ravel()
    e = a - r
    normal_ones = np.abs(r) >= 0.1
    assert m.elements == m.finite == e.size
    assert m.max_abs == pytest.approx(np.abs(e).max())
    assert m.rel_l2 == pytest.approx(np.linalg.norm(e) / np.linalg.norm(r))
    assert m.cosine == pytest.approx(a @ r / np.linalg.norm(a) / np.linalg.norm(r))
    assert m.rmse == pytest.approx(math.sqrt((e**2).mean()))
    assert m.bias == pytest.approx(e.mean())
    assert m.error_balance == pytest.approx(abs((e > 0).mean() - (e < 0).mean()))
    assert m.max_rel == pytest.approx((np.abs(e) / np.abs(r))[normal_ones].max())
    assert m.mean_rel == pytest.approx((np.abs(e) / np.abs(r))[normal_ones].mean())
    assert (m.normal, m.small) == (normal_ones.sum(), (~normal_ones).sum())
    assert m.small_wrong == pytest.approx((np.abs(e)[~normal_ones] > 0.01).mean())
    assert m.small_max_abs == pytest.approx(np.abs(e)[~normal_ones].max())
    h, i, d = np.unravel_index(np.abs(e).argmax(), x.shape)
    assert m.worst[0].at == {"batch": 0, "head": h, "query": i, "dim": d}
    assert (m.worst[0].result, m.worst[0].reference) == (x[h, i, d].item(), reference[h, i, d].item())


def test_rows_and_pieces_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x, reference = noisy(torch.bfloat16)
    whole = tally(x, reference)
    monkeypatch.setattr("fa_multi.accuracy.metrics._AT_ONCE", 16)
    parts = Tally(1, 3, 50, x.dtype, 0.1, 0.01)
    parts.add(x[:2], reference[:2], 0, 0)
    parts.add(x[2:], reference[2:], 0, 2)
    torch.testing.assert_close(parts.row_square, whole.row_square)
    assert torch.equal(parts.row_max, whole.row_max)
    a, b = parts.result().to_dict(), whole.result().to_dict()
    assert a.pop("ulp")["histogram"] == b.pop("ulp")["histogram"]
    assert a.pop("worst") == b.pop("worst")
    for name, value in b.items():
        assert a[name] == pytest.approx(value), name


def test_nan_and_inf_are_counted_and_left_out_of_the_rest() -> None:
    x, reference = noisy()
    clean = measure(x, reference)
    x, reference = x.clone(), reference.clone()
    x[0, 0, :6] = torch.tensor([math.nan, math.inf, -math.inf, 1.0, math.nan, 1.0])
    reference[0, 0, :6] = torch.tensor([math.nan, math.inf, math.inf, -math.inf, 1.0, math.nan])
    m = measure(x, reference)
    assert (m.nan, m.pos_inf, m.neg_inf, m.special_differ) == (2, 1, 1, 4)
    assert [p.at["dim"] for p in m.special_at] == [2, 3, 4, 5]
    assert m.finite == clean.finite - 6
    assert math.isfinite(m.rel_l2)


def test_ulp_histogram() -> None:
    reference = torch.ones(1, 1, 8)
    x = torch.ones(1, 1, 8, dtype=torch.float32)
    x.view(torch.int32)[0, 0] += torch.tensor([0, 1, 2, 4, 8, 16, 64, 65], dtype=torch.int32)
    m = measure(x, reference)
    assert m.ulp["histogram"] == dict.fromkeys(ULP_BINS, 1)
    assert m.ulp["max"] == 65
    assert m.ulp["mean"] == pytest.approx(20)


def test_judge_names_the_element() -> None:
    _, reference = noisy(torch.bfloat16)
    low = reference.bfloat16()
    good = judge(low, reference, low)
    assert good.ok, good
    bad = low.clone()
    bad[1, 7, 3] += 1
    assert "worst at (1, 7, 3)" in str(judge(bad, reference, low))


# ---------------------------------------------------------------------------------------------------- rules


def test_dual_standard_ratios_and_levels() -> None:
    x, reference = noisy(shape=(4, 200, 8))
    b = measure(x, reference)
    three = measure((reference + 3 * (x.double() - reference)).float(), reference)
    ratios, outcome = dual(three, b, torch.float32, Thresholds())
    assert ratios["rmse"] == pytest.approx(3, rel=1e-3)
    assert ratios["mean_rel"] == pytest.approx(3, rel=1e-3)
    assert not outcome.ok
    assert "rmse 3.00 > 1.5" in outcome.text
    assert dual(b, b, torch.float32, Thresholds(level="L2"))[1].ok
    slack = Thresholds(rmse_ratio=4, mean_rel_ratio=4, small_wrong_ratio=9)
    assert dual(three, b, torch.float32, slack)[1].ok


def test_dual_standard_asks_for_no_less_than_rounding() -> None:
    """B is the golden result itself, A the golden result rounded: no device can do better than A."""
    _, reference = noisy(shape=(4, 200, 8))
    a = measure(reference.bfloat16(), reference, small_atol=1.0)
    b = measure(reference.float(), reference)
    b.mean_rel = b.max_rel = b.rmse = 1e-30
    assert dual(a, b, torch.bfloat16, Thresholds())[1].ok


def test_ratio_of_nothing() -> None:
    assert (ratio(0, 0), ratio(1, 0), ratio(1, 2)) == (1, 10000, 0.5)


def test_low_precision_rule_has_a_limit_on_both_sides_of_two() -> None:
    _, reference = noisy()
    step = torch.finfo(torch.float32).eps
    naive = measure((reference * 1.001).float(), reference)
    assert low_precision("a", measure((reference * 1.0019).float(), reference), naive, step, Thresholds()).ok
    assert not low_precision("a", measure((reference * 1.0021).float(), reference), naive, step, Thresholds()).ok


def test_the_rows_rule_sees_a_wrong_small_row() -> None:
    """An error below the largest element's rounding, in a row of small values."""
    _, reference = noisy(torch.bfloat16)
    reference = reference.clone()
    reference[1, 7] *= 1e-3
    right = reference.bfloat16()
    wrong = right.clone()
    wrong[1, 7, 3] += 0.01
    step = torch.finfo(torch.bfloat16).eps
    naive = tally(right, reference)
    assert rows("a", tally(right, reference), naive, step, Thresholds()).ok
    outcome = rows("a", tally(wrong, reference), naive, step, Thresholds())
    assert not outcome.ok
    assert "head 1, query 7" in outcome.text
    assert low_precision("a", measure(wrong, reference), naive.result(), step, Thresholds()).ok


def test_lse_is_judged_in_nats() -> None:
    reference = torch.full((2, 5, 1), 8.0)
    assert nats("a", measure(reference.float() + 5e-4, reference), Thresholds()).ok
    assert not nats("a", measure(reference.float() + 2e-3, reference), Thresholds()).ok


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"level": "L3"}, "level must be one of L0, L1, L2, got 'L3'"),
        ({"rules": ["dual", "luck"]}, "rules must be some of .*, got luck"),
        ({"lse_nat": 1}, "no entry 'lse_nat'; entries are "),
        ({"lse_nats": "x"}, "lse_nats must be a number >= 0, got 'x'"),
        ({"rmse_ratio": -1}, "rmse_ratio must be a number >= 0, got -1"),
        ({"small_below": {"fp8": 1}}, "small_below must map fp16, bf16, fp32 to numbers"),
    ],
)
def test_bad_thresholds(entries: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Thresholds.from_dict(entries)


def test_thresholds_survive_a_round_trip() -> None:
    limits = Thresholds(level="L2", small_below={"fp16": 1e-3, "bf16": 2e-3, "fp32": 1e-6}, rules=("dual",))
    assert Thresholds.from_dict(limits.to_dict()) == limits


# ---------------------------------------------------------------------------------------------------- inputs


def test_the_generator_is_philox() -> None:
    """Known answer of Philox4x64-10 for counter 0 and key 0 (Random123's test vectors); numpy counts up first."""
    words = np.random.Philox(key=0, counter=2**256 - 1).random_raw(4)
    assert [hex(w) for w in words] == [
        "0x16554d9eca36314c",
        "0xdb20fe9d672d0fdc",
        "0xd7e772cee186176b",
        "0x7e68b68aec7ba23b",
    ]


def test_draws_are_random_access_and_normal() -> None:
    stream = key(0, "case", "q")
    x = normal(stream, 0, 200_000)
    assert np.array_equal(normal(stream, 150_000, 1000), x[150_000:151_000])
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    assert abs(np.mean(np.abs(x) < 1) - 0.6827) < 0.01
    assert not np.array_equal(normal(key(1, "case", "q"), 0, 100), x[:100])


def test_fingerprints_ignore_strides_and_see_bits_and_shapes() -> None:
    x = torch.randn(3, 4, 5).bfloat16()
    assert fingerprint(x) == fingerprint(x.transpose(0, 2).contiguous().transpose(0, 2))
    assert fingerprint(x) != fingerprint(x.reshape(4, 3, 5))
    assert fingerprint(torch.zeros(2)) != fingerprint(-torch.zeros(2))
