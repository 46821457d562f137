"""Public bug reports about masks and rows with nothing to attend to. Each test is named after its thread."""

from __future__ import annotations

import math

import pytest
import torch

from fa_multi.compat.sdpa import scaled_dot_product_attention
from tests.regressions.lanes import LANES, agree, run


@pytest.mark.parametrize("lane", LANES)
def test_flash_attention_1778_causal_aligns_bottom_right(lane: str) -> None:
    """5 queries, 2 keys: users expected top-left. Bottom-right leaves the first three rows empty, exactly 0."""
    q, k, v = torch.randn(1, 5, 2, 32).half(), torch.randn(1, 2, 2, 32).half(), torch.randn(1, 2, 2, 32).half()
    out, lse = agree(lane, q, k, v, causal=True)
    assert bool((out[:, :3] == 0).all())
    assert bool((lse[:, :, :3] == -math.inf).all())
    assert torch.equal(out[:, 3].cpu(), v[:, 0])


@pytest.mark.parametrize("lane", LANES)
def test_flashinfer_4452_lse_of_empty_rows(lane: str) -> None:
    """Paged prefill, causal, more queries than keys: the LSE of the empty rows was finite."""
    q = torch.randn(1, 40, 2, 64).bfloat16()
    k, v = (torch.randn(2, 16, 2, 64).bfloat16() for _ in range(2))
    table, used = torch.tensor([[1, 0]]).int(), torch.tensor([10]).int()
    out, lse = run(lane, q, k, v, block_table=table, cache_seqlens=used, causal=True, return_lse=True)
    assert bool((out[:, :30] == 0).all())
    assert bool((lse[:, :, :30] == -math.inf).all())
    assert bool(lse[:, :, 30:].isfinite().all())


@pytest.mark.parametrize("lane", LANES)
def test_transformers_39408_a_window_of_w_keys(lane: str) -> None:
    """W passed as the left window saw W + 1 keys: both ends are inclusive, so W keys are (W - 1, 0)."""
    q, k = torch.zeros(1, 20, 2, 32).half(), torch.zeros(1, 20, 2, 32).half()
    v = torch.randn(1, 20, 2, 32).half()
    _, lse = agree(lane, q, k, v, causal=True, window_size=(3, 0))
    torch.testing.assert_close(lse[0, 0, 5:].exp().cpu(), torch.full((15,), 4.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("lane", LANES)
def test_nanochat_452_window_applies_to_one_query(lane: str) -> None:
    q, k, v = torch.randn(1, 1, 2, 32).half(), torch.randn(1, 50, 2, 32).half(), torch.randn(1, 50, 2, 32).half()
    out, _ = agree(lane, q, k, v, causal=True, window_size=(7, 0))
    k[:, :42] = 100.0
    assert torch.equal(out, agree(lane, q, k, v, causal=True, window_size=(7, 0))[0])


def test_pytorch_103963_fully_masked_rows_of_a_bool_mask() -> None:
    """Rows of a mask that are all False gave NaN; such a mask is no interval per batch entry here, and is refused."""
    q = torch.randn(1, 1, 8, 8)
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4:] = False
    with pytest.raises(ValueError, match="attn_mask must keep everything"):
        scaled_dot_product_attention(q, q, q, attn_mask=mask)
    nothing = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    assert bool((scaled_dot_product_attention(q, q, q, attn_mask=nothing) == 0).all())


@pytest.mark.parametrize("lane", LANES)
def test_rocm_libraries_12229_sink_counts_once_over_splits(lane: str) -> None:
    """Split-KV with a sink, a hole of the window between splits, and an empty key range."""
    q = torch.randn(3, 1, 4, 64).half()
    k, v = (torch.randn(3, 700, 4, 64).half() for _ in range(2))
    used, sink = torch.tensor([700, 3, 0]).int(), torch.tensor([2.0, -1.0, 20.0, -math.inf])
    options = {"cache_seqlens": used, "sink": sink, "window_size": (90, -1), "return_lse": True, "softcap": 10.0}
    one = run(lane, q, k, v, num_splits=1, **options)
    for splits in (2, 5):
        for a, b in zip(run(lane, q, k, v, num_splits=splits, **options), one):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lane", LANES)
def test_cudnn_frontend_940_infinite_sinks(lane: str) -> None:
    """exp2(inf - inf) gave NaN: a sink of +inf takes all the weight, one of -inf none."""
    q, k, v = torch.randn(1, 5, 2, 32).half(), torch.randn(1, 9, 2, 32).half(), torch.randn(1, 9, 2, 32).half()
    out, lse = run(lane, q, k, v, sink=torch.tensor([math.inf, -math.inf]), return_lse=True)
    plain, plain_lse = run(lane, q, k, v, return_lse=True)
    assert bool((out[:, :, 0] == 0).all())
    assert bool((lse[:, 0] == math.inf).all())
    torch.testing.assert_close(out[:, :, 1], plain[:, :, 1])
    torch.testing.assert_close(lse[:, 1], plain_lse[:, 1])


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("seqlen", [256, 296])
def test_tilelang_1213_tails(lane: str, seqlen: int) -> None:
    """296 = 2 x 128 + 40 rows gave a large error where 256 was fine: what lies past the end must be neutral."""
    q, k, v = (torch.randn(1, seqlen, 2, 96).half() for _ in range(3))
    agree(lane, q, k, v)


@pytest.mark.parametrize("lane", LANES)
def test_triton_621_every_column_counts(lane: str) -> None:
    """Head dim 128 silently used the first 64 columns."""
    q, k = torch.zeros(1, 3, 1, 128).half(), torch.zeros(1, 9, 1, 128).half()
    q[..., 127] = 8.0
    k[0, 4, 0, 127] = 8.0
    agree(lane, q, k, torch.randn(1, 9, 1, 128).half())
