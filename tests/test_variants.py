"""Contract of masks, extras, packed and paged tensors, and merging: what must hold without any tolerance."""

from __future__ import annotations

import math

import pytest
import torch

import fa_multi
from fa_multi import reference
from fa_multi.accuracy import judge
from tests.calls import packed, paged


def qkv(b=2, sq=40, sk=70, hq=4, hk=2, d=32, dtype=torch.bfloat16):
    return tuple(torch.randn(s).to(dtype) for s in [(b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, d)])


def check(q, k, v, **options) -> None:
    out, lse = fa_multi.attention(q, k, v, return_lse=True, **options)
    golden, golden_lse = reference.attention(q, k, v, **options)
    naive, naive_lse = reference.attention(q, k, v, dtype=q.dtype, **options)
    for verdict in (judge(out, golden, naive), judge(lse, golden_lse, naive_lse)):
        assert verdict.ok, f"{options}: {verdict}"


@pytest.mark.parametrize("lengths", [(40, 70), (70, 40), (1, 70), (600, 600)])
@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (5, 3)},
        {"window_size": (0, 0)},
        {"window_size": (-1, 4)},
        {"window_size": (9, None), "causal": True},
        {"window_size": (2, 2), "block_causal": 8},
        {"block_causal": 7},
        {"softcap": 3.0, "causal": True},
        {"alibi_slopes": torch.tensor([0.5, 0.1, 0.0, 2.0])},
        {"alibi_slopes": torch.rand(2, 4), "softcap": 5.0, "window_size": (20, 20)},
        {"sink": torch.tensor([0.0, -math.inf, 40.0, -40.0])},
        {"sink": torch.tensor([math.inf, 1.0, 2.0, 3.0]), "causal": True, "window_size": (3, 0)},
    ],
    ids=lambda o: "-".join(o),
)
def test_options(options, lengths) -> None:
    check(*qkv(sq=lengths[0], sk=lengths[1]), **options)


def test_window_is_inclusive_and_applies_to_one_query() -> None:
    q, k, v = qkv(sq=1, sk=10)
    out = fa_multi.attention(q, k, v, window_size=(2, -1), causal=True)
    assert torch.equal(out, fa_multi.attention(q, k[:, 7:], v[:, 7:]))


def test_no_limit_has_two_spellings_and_a_list_will_do() -> None:
    q, k, v = qkv()
    a = fa_multi.attention(q, k, v, window_size=(-1, 3))
    for same in ((None, 3), [-1, 3]):
        assert torch.equal(a, fa_multi.attention(q, k, v, window_size=same))


def test_sink_of_minus_infinity_is_no_sink() -> None:
    q, k, v = qkv(sq=70, sk=40)
    plain = fa_multi.attention(q, k, v, causal=True, return_lse=True)
    sunk = fa_multi.attention(q, k, v, causal=True, return_lse=True, sink=torch.full((4,), -math.inf))
    assert all(torch.equal(a, b) for a, b in zip(plain, sunk))


def test_sink_without_keys_is_the_lse() -> None:
    q, k, v = qkv(sq=5, sk=2)
    sink = torch.tensor([1.0, -2.0, 3.0, math.inf])
    for kv in ((k, v), (k[:, :0], v[:, :0])):
        out, lse = fa_multi.attention(q, *kv, causal=True, return_lse=True, sink=sink)
        assert bool((out[:, :3] == 0).all())
        assert torch.equal(lse[:, :, :3], sink[None, :, None].expand(2, 4, 3))


def test_infinite_sink_takes_everything() -> None:
    q, k, v = qkv()
    out, lse = fa_multi.attention(q, k, v, return_lse=True, sink=torch.full((4,), math.inf))
    assert bool((out == 0).all())
    assert bool((lse == math.inf).all())


BAD = {
    "window of one": ({"window_size": (3,)}, TypeError, "window_size must be a pair of ints"),
    "window of floats": ({"window_size": (1.0, 2)}, TypeError, "window_size must be a pair of ints"),
    "window below -1": ({"window_size": (-2, 0)}, ValueError, r"window_size must be .* got \(-2, 0\)"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must be finite and >= 0"),
    "softcap NaN": ({"softcap": math.nan}, ValueError, "softcap must be finite and >= 0"),
    "softcap text": ({"softcap": "1"}, TypeError, "softcap must be a number"),
    "block_causal": ({"block_causal": -1}, ValueError, "block_causal must be at least 0, got -1"),
    "block_causal float": ({"block_causal": 2.0}, TypeError, "block_causal must be an int, got 2.0"),
    "sink shape": ({"sink": torch.zeros(3)}, ValueError, r"sink must have shape \(4,\), got \(3,\)"),
    "sink dtype": ({"sink": torch.zeros(4).long()}, TypeError, "sink must be float32, float16 or bfloat16"),
    "sink list": ({"sink": [0.0] * 4}, TypeError, "sink must be a torch.Tensor, got list"),
    "slopes shape": (
        {"alibi_slopes": torch.zeros(3, 4)},
        ValueError,
        r"alibi_slopes must have shape \(4,\) or \(2, 4\)",
    ),
    "out shape": ({"out": torch.zeros(1).bfloat16()}, ValueError, r"out must have shape \(2, 40, 4, 32\), got \(1,\)"),
    "out dtype": ({"out": torch.zeros(2, 40, 4, 32)}, TypeError, "out must be torch.bfloat16, got torch.float32"),
    "out stride": (
        {"out": torch.zeros(2, 40, 4, 64).bfloat16()[..., ::2]},
        ValueError,
        "out must have a unit last stride",
    ),
    "lse stride": (
        {"return_lse": True, "lse": torch.zeros(2, 40, 4).transpose(1, 2)},
        ValueError,
        "lse must be contiguous, got strides",
    ),
    "lse alone": ({"lse": torch.zeros(2, 4, 40)}, ValueError, "lse is given, but return_lse is False"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    options, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        fa_multi.attention(*qkv(), **options)


def test_buffers_are_used() -> None:
    q, k, v = qkv()
    expected, expected_lse = fa_multi.attention(q, k, v, return_lse=True)
    out, lse = torch.full_like(expected, math.nan), torch.full_like(expected_lse, math.nan)
    got = fa_multi.attention(q, k, v, return_lse=True, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


# ------------------------------------------------------------------------------------------------ packed


@pytest.mark.parametrize("causal", [False, True])
def test_packed_equals_dense_sequence_by_sequence(causal: bool) -> None:
    lengths = ([5, 0, 33, 1, 8], [7, 3, 60, 0, 8])
    q, k, v, keywords = packed(*lengths)
    out, lse = fa_multi.attention_varlen(q, k, v, causal=causal, return_lse=True, **keywords)
    at_q = at_k = 0
    for sq, sk in zip(*lengths):
        one = [q[at_q : at_q + sq][None], k[at_k : at_k + sk][None], v[at_k : at_k + sk][None]]
        a, b = fa_multi.attention(*one, causal=causal, return_lse=True)
        torch.testing.assert_close(out[at_q : at_q + sq], a[0], rtol=0, atol=2e-2)
        torch.testing.assert_close(lse[:, at_q : at_q + sq], b[0], rtol=1e-5, atol=1e-5)
        at_q, at_k = at_q + sq, at_k + sk


def test_upper_bounds_do_not_matter() -> None:
    q, k, v, keywords = packed([5, 20], [9, 30])
    a = fa_multi.attention_varlen(q, k, v, **keywords)
    b = fa_multi.attention_varlen(q, k, v, **{**keywords, "max_seqlen_q": 1000, "max_seqlen_k": 5000})
    assert torch.equal(a, b)


BAD_PACKED = {
    "int64 offsets": (
        {"cu_seqlens_q": torch.tensor([0, 5, 25])},
        TypeError,
        "cu_seqlens_q must be int32, got torch.int64",
    ),
    "no offsets": ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be a torch.Tensor of int32, got NoneType"),
    "offsets of k": (
        {"cu_seqlens_k": torch.zeros(2).int()},
        ValueError,
        r"cu_seqlens_k must have shape \(3,\), got \(2,\)",
    ),
    "bound": ({"max_seqlen_q": 2.0}, TypeError, "max_seqlen_q must be an int, got 2.0"),
    "bound of k": ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be at least 0, got -1"),
    "seqused": ({"seqused_k": torch.zeros(3).int()}, ValueError, r"seqused_k must have shape \(2,\), got \(3,\)"),
}


@pytest.mark.parametrize("name", BAD_PACKED)
def test_packed_refused(name: str) -> None:
    change, kind, message = BAD_PACKED[name]
    q, k, v, keywords = packed([5, 20], [9, 30])
    with pytest.raises(kind, match=message):
        fa_multi.attention_varlen(q, k, v, **{**keywords, **change})


# ------------------------------------------------------------------------------------------------ paged


def test_tables_and_lengths_may_be_slices() -> None:
    q, k, v, keywords = paged()
    expected = fa_multi.attention_paged(q, k, v, **keywords)
    table = torch.cat([keywords["block_table"]] * 2, 1)[:, : keywords["block_table"].shape[1]]
    used = torch.stack([keywords["cache_seqlens"]] * 2, 1)[:, 0]
    assert not table.is_contiguous()
    assert torch.equal(expected, fa_multi.attention_paged(q, k, v, block_table=table, cache_seqlens=used))


@pytest.mark.parametrize("sq", [1, 3, 40])
def test_paged_equals_dense_cache(sq: int) -> None:
    q, k, v, keywords = paged(lengths=(64, 64), sq=sq)
    dense = [x[keywords["block_table"][:, :4].long()].flatten(1, 2) for x in (k, v)]
    out, lse = fa_multi.attention_paged(q, k, v, causal=True, return_lse=True, **keywords)
    same, same_lse = fa_multi.attention(q, *dense, causal=True, return_lse=True)
    torch.testing.assert_close(out, same, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse, same_lse, rtol=1e-5, atol=1e-5)
    cache = fa_multi.attention_paged(q, *dense, causal=True)
    torch.testing.assert_close(cache, same, rtol=0, atol=2e-2)


@pytest.mark.parametrize("splits", [2, 3, 7, 100])
def test_any_number_of_splits(splits: int) -> None:
    q, k, v, keywords = paged(lengths=(0, 5, 1700), sq=2)
    sink = torch.tensor([0.0, 3.0, -math.inf, 9.0])
    one = fa_multi.attention_paged(q, k, v, num_splits=1, return_lse=True, causal=True, sink=sink, **keywords)
    many = fa_multi.attention_paged(q, k, v, num_splits=splits, return_lse=True, causal=True, sink=sink, **keywords)
    torch.testing.assert_close(many[0], one[0], rtol=0, atol=1e-2)
    torch.testing.assert_close(many[1], one[1], rtol=1e-5, atol=1e-5)


def test_fixed_split_size_does_not_depend_on_batch_mates() -> None:
    q, k, v, keywords = paged(lengths=(700, 1700), sq=1)
    both = fa_multi.attention_paged(q, k, v, fixed_split_size=512, **keywords)
    short = {"block_table": keywords["block_table"][:1, :50], "cache_seqlens": keywords["cache_seqlens"][:1]}
    assert torch.equal(both[:1], fa_multi.attention_paged(q[:1], k, v, fixed_split_size=512, **short))


def test_packed_queries_against_pages() -> None:
    lengths = (4, 5, 70)
    q, k, v, keywords = paged(lengths=lengths, sq=3)
    counts = [3, 0, 2]
    cu = torch.tensor([0, *counts]).cumsum(0).int()
    rows = torch.cat([q[b, :n] for b, n in enumerate(counts)])
    out, lse = fa_multi.attention_paged(
        rows, k, v, cu_seqlens_q=cu, max_seqlen_q=3, causal=True, return_lse=True, **keywords
    )
    for b, n in enumerate(counts):
        one = {name: x[b : b + 1] for name, x in keywords.items()}
        a, c = fa_multi.attention_paged(q[b : b + 1, :n], k, v, causal=True, return_lse=True, **one)
        torch.testing.assert_close(out[cu[b] : cu[b + 1]], a[0], rtol=0, atol=1e-2)
        torch.testing.assert_close(lse[:, cu[b] : cu[b + 1]], c[0], rtol=1e-5, atol=1e-5)


BAD_PAGED = {
    "table dtype": ({"block_table": torch.zeros(3, 6)}, TypeError, "block_table must be int32, got torch.float32"),
    "table rows": (
        {"block_table": torch.zeros(2, 6).int()},
        ValueError,
        r"block_table must have shape \(3, 6\), got \(2, 6\)",
    ),
    "no lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens must be given with a block_table"),
    "no table": ({"block_table": None}, ValueError, "k_cache must have batch size 3 where no block_table is given"),
    "splits": ({"num_splits": -1}, ValueError, "num_splits must be at least 0, got -1"),
    "two ways to split": ({"num_splits": 2, "fixed_split_size": 64}, ValueError, "fixed_split_size must be 0 where"),
}


@pytest.mark.parametrize("name", BAD_PAGED)
def test_paged_refused(name: str) -> None:
    change, kind, message = BAD_PAGED[name]
    q, k, v, keywords = paged()
    with pytest.raises(kind, match=message):
        fa_multi.attention_paged(q, k, v, **{**keywords, **change})


# ------------------------------------------------------------------------------------------------ merging


def test_merging_parts_is_the_whole() -> None:
    q, k, v = qkv(dtype=torch.float32)
    whole = fa_multi.attention(q, k, v, return_lse=True)
    parts = [fa_multi.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 10), (10, 11), (11, 70))]
    merged = fa_multi.merge_state_list([o for o, _ in parts], [s for _, s in parts])
    for a, b in zip(merged, whole):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_empties_are_neutral() -> None:
    q, k, v = qkv()
    out, lse = fa_multi.attention(q, k, v, return_lse=True)
    none, none_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for parts in ((out, lse, none, none_lse), (none, none_lse, out, lse)):
        merged = fa_multi.merge_states(*parts)
        assert torch.equal(merged[0], out)
        torch.testing.assert_close(merged[1], lse, rtol=0, atol=1e-6)
    merged = fa_multi.merge_states(none, none_lse, none, none_lse)
    assert torch.equal(merged[0], none)
    assert torch.equal(merged[1], none_lse)


def test_merging_packed_results() -> None:
    out, lse = torch.randn(7, 4, 32), torch.randn(4, 7)
    merged = fa_multi.merge_states(out, lse, out, lse)
    torch.testing.assert_close(merged[0], out)
    torch.testing.assert_close(merged[1], lse + math.log(2))


def test_merge_refuses_what_does_not_fit() -> None:
    out, lse = torch.randn(2, 7, 4, 32), torch.randn(2, 4, 7)
    with pytest.raises(ValueError, match=r"every lse must be torch.float32 \(2, 4, 7\)"):
        fa_multi.merge_states(out, lse.transpose(1, 2), out, lse)
    with pytest.raises(ValueError, match=r"every out must be torch\.float32"):
        fa_multi.merge_states(out, lse, out.half(), lse)
    with pytest.raises(ValueError, match="outs and lses must be of one length"):
        fa_multi.merge_state_list([out], [])


# ------------------------------------------------------------------------------------------------ asking


def test_supports_and_lower_know_every_entry_point() -> None:
    q, k, v, keywords = packed([5, 20], [9, 30])
    assert fa_multi.supports(q, k, v, **keywords) is None
    assert "cu_seqlens_q" in str(fa_multi.lower(q, k, v, causal=True, **keywords).program)
    wrong = {**keywords, "cu_seqlens_k": torch.zeros(2).int()}
    assert "cu_seqlens_k must have shape (3,), got (2,)" in str(fa_multi.supports(q, k, v, **wrong))
    q, k, v, keywords = paged()
    assert fa_multi.supports(q, k, v, **keywords) is None
    assert "block_table" in str(fa_multi.lower(q, k, v, **keywords).program)
    assert "split in splits" in str(fa_multi.lower(q, k, v, num_splits=4, **keywords).program)
    assert "cache_seqlens must be given" in str(fa_multi.supports(q, k, v, block_table=keywords["block_table"]))
    assert "unexpected argument 'dropout'" in str(fa_multi.supports(q, k, v, dropout=0.1))
