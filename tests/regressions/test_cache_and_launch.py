"""Public bug reports about caches, pages, offsets, launches and merging. Each test is named after its thread."""

from __future__ import annotations

import math

import pytest
import torch

import fa_multi
from tests.regressions.lanes import LANES, agree, run


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("lengths", [(32, 64, 96, 48), (1, 3, 2, 3)])
def test_flash_attention_2374_nan_beyond_the_length(lane: str, lengths: tuple[int, ...]) -> None:
    """P = 0 there, but 0 x NaN = NaN in the output product."""
    q, k, v = torch.randn(4, 1, 8, 64).half(), torch.randn(4, 128, 8, 64).half(), torch.randn(4, 128, 8, 64).half()
    used = torch.tensor(lengths).int()
    clean = run(lane, q, k, v, cache_seqlens=used)
    for b, n in enumerate(lengths):
        k[b, n:], v[b, n:] = math.nan, math.nan
    assert torch.equal(clean, run(lane, q, k, v, cache_seqlens=used))


@pytest.mark.parametrize("lane", LANES)
def test_vllm_936_uninitialised_last_page(lane: str) -> None:
    """An additive mask turns NaN + -inf into NaN: it must be a selection."""
    q = torch.randn(1, 1, 2, 64).half()
    k, v = (torch.randn(2, 64, 2, 64).half() for _ in range(2))
    table, used = torch.tensor([[0, 1]]).int(), torch.tensor([70]).int()
    clean = run(lane, q, k, v, block_table=table, cache_seqlens=used)
    k[1, 6:], v[1, 6:] = math.nan, math.inf
    assert torch.equal(clean, run(lane, q, k, v, block_table=table, cache_seqlens=used))


@pytest.mark.parametrize("lane", LANES)
def test_flash_attention_2709_a_length_past_the_table(lane: str) -> None:
    """One page of 256 and a length of 257: nothing past the table is read, as if the length ended there."""
    q = torch.randn(1, 1, 2, 32).half()
    k, v = (torch.randn(1, 256, 2, 32).half() for _ in range(2))
    table = torch.tensor([[0]]).int()
    a, b = (run(lane, q, k, v, block_table=table, cache_seqlens=torch.tensor([n]).int()) for n in (256, 257))
    assert torch.equal(a, b)


@pytest.mark.parametrize("lane", LANES)
def test_local_inference_431_a_negative_length_is_empty(lane: str) -> None:
    q, k, v = torch.randn(2, 1, 2, 32).half(), torch.randn(2, 40, 2, 32).half(), torch.randn(2, 40, 2, 32).half()
    out, lse = run(lane, q, k, v, cache_seqlens=torch.tensor([-1, 7]).int(), return_lse=True)
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == -math.inf).all())


@pytest.mark.parametrize("lane", LANES)
def test_pytorch_179760_automatic_splits_equal_explicit_ones(lane: str) -> None:
    q = torch.randn(2, 1, 4, 64).half()
    k, v = (torch.randn(2, 900, 4, 64).half() for _ in range(2))
    used = torch.tensor([900, 333]).int()
    auto, one = (run(lane, q, k, v, cache_seqlens=used, num_splits=n) for n in (0, 1))
    torch.testing.assert_close(auto, one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lane", LANES)
def test_sglang_22020_second_chunk_of_a_prefill(lane: str) -> None:
    """The cached keys were dropped: a chunk of queries at the end sees everything before it."""
    q, k, v = (torch.randn(1, 90, 2, 32).half() for _ in range(3))
    whole, _ = agree(lane, q, k, v, causal=True)
    chunk, _ = agree(lane, q[:, 50:], k, v, causal=True)
    torch.testing.assert_close(chunk, whole[:, 50:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("lane", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pytorch_142228_batch_of_65536_and_more(lane: str) -> None:
    """Launch limits of grid axes y and z, in two libraries without an exception."""
    q, k, v = (torch.randn(65_537, 1, 1, 8).half() for _ in range(3))
    assert torch.equal(run(lane, q, k, v), v)


@pytest.mark.gpu
def test_natten_347_offsets_past_2_to_the_31() -> None:
    """An int32 element offset wraps, and the result is finite but wrong."""
    shape = (1, 2**21 + 1, 16, 64)
    q = torch.randn(1, 1, 16, 64, device="cuda").half()
    k = torch.randn(shape, device="cuda", dtype=torch.float16)
    v = torch.zeros_like(k)
    k[:, -1] = q[:, 0] * 8
    v[:, -1] = 1
    out = fa_multi.attention(q, k, v)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=5e-2)


@pytest.mark.parametrize("lane", LANES)
def test_flash_attention_2492_head_dim_104(lane: str) -> None:
    """A head dim that is no multiple of 32 is padded inside, or refused with a reason."""
    q, k, v = (torch.randn(1, 40, 2, 104).half() for _ in range(3))
    reason = fa_multi.supports(q, k, v, device=lane)
    if reason is None:
        agree(lane, q, k, v, causal=True)
    else:
        assert lane.startswith("npu")
        assert "104" in reason


@pytest.mark.parametrize("lane", LANES)
def test_flash_attention_978_lse_without_keys(lane: str) -> None:
    """LSE was +inf."""
    q, k = torch.randn(1, 3, 2, 32).half(), torch.randn(1, 0, 2, 32).half()
    out, lse = run(lane, q, k, k, return_lse=True)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("lane", LANES)
def test_sglang_35045_lse_is_natural(lane: str) -> None:
    """A base-2 LSE in a natural-log merge was wrong by 0.105."""
    q, k = torch.zeros(1, 1, 1, 32).half(), torch.zeros(1, 20, 1, 32).half()
    _, lse = agree(lane, q, k, torch.randn(1, 20, 1, 32).half())
    assert abs(float(lse) - math.log(20)) < 1e-5


def test_local_inference_468_merging_into_an_input() -> None:
    """Results never alias inputs, so the same tensor may be given twice."""
    out, lse = torch.randn(2, 3, 4, 192), torch.randn(2, 4, 3)
    merged, merged_lse = fa_multi.merge_states(out, lse, out, lse)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse + math.log(2))


@pytest.mark.parametrize("lane", LANES)
def test_flash_attention_1897_results_do_not_depend_on_batch_mates(lane: str) -> None:
    q = torch.randn(3, 1, 2, 64).half()
    k, v = (torch.randn(3, 500, 2, 64).half() for _ in range(2))
    used = torch.tensor([500, 40, 300]).int()
    both = run(lane, q, k, v, cache_seqlens=used, fixed_split_size=256)
    alone = run(lane, q[1:2], k[1:2], v[1:2], cache_seqlens=used[1:2], fixed_split_size=256)
    assert torch.equal(both[1:2], alone)


@pytest.mark.parametrize("lane", LANES)
def test_tilelang_545_a_group_smaller_than_the_tile(lane: str) -> None:
    """Decode with padded heads: the first product was wrong in bf16."""
    q = torch.randn(2, 1, 14, 64).bfloat16()
    k, v = (torch.randn(2, 77, 2, 64).bfloat16() for _ in range(2))
    expected, _ = agree(lane, q, k, v)
    got = run(lane, q, k, v, cache_seqlens=torch.tensor([77, 77]).int())
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-2)
