"""Public bug reports about packed sequences. Each test is named after its thread."""

from __future__ import annotations

import math

import pytest
import torch

from tests.regressions.lanes import LANES, agree, run


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("lane", LANES)
def test_flash_attention_1537_zero_and_one_token_sequences_under_gqa(lane: str) -> None:
    """cumsum of q [0,1,0,1], k [0,3,0,5], heads 9/3, max_seqlen_q 1, causal: "shape is invalid"."""
    q, k, v = torch.randn(2, 9, 64).half(), torch.randn(8, 3, 64).half(), torch.randn(8, 3, 64).half()
    out = run(
        lane, q, k, v, cu_seqlens_q=offsets(0, 0, 1, 1, 2), cu_seqlens_k=offsets(0, 0, 3, 3, 8), max_seqlen_q=1,
        max_seqlen_k=5, causal=True,
    )  # fmt: skip
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        alone, _ = agree(lane, q[None, row : row + 1], k[None, keys], v[None, keys], causal=True)
        torch.testing.assert_close(out[row], alone[0, 0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("lane", LANES)
def test_flash_attention_1713_a_sequence_of_keys_without_queries(lane: str) -> None:
    """cu_q [0,150,150,300], cu_k [0,100,200,300]: the middle keys belong to nobody."""
    q, k, v = (torch.randn(300, 2, 32).half() for _ in range(3))
    lengths = {"cu_seqlens_q": offsets(0, 150, 150, 300), "cu_seqlens_k": offsets(0, 100, 200, 300)}
    out = run(lane, q, k, v, max_seqlen_q=150, max_seqlen_k=100, **lengths)
    k[100:200], v[100:200] = math.nan, math.nan
    assert torch.equal(out, run(lane, q, k, v, max_seqlen_q=150, max_seqlen_k=100, **lengths))


@pytest.mark.parametrize("lane", LANES)
def test_flash_attention_1661_rows_past_the_last_sequence(lane: str) -> None:
    """Spare output rows held junk."""
    q, k, v = (torch.randn(46, 2, 32).half() for _ in range(3))
    cu = offsets(0, 14, 44)
    out, lse = run(lane, q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=30, max_seqlen_k=30, return_lse=True)
    assert bool((out[44:] == 0).all())
    assert bool((lse[:, 44:] == -math.inf).all())


@pytest.mark.parametrize("lane", LANES)
def test_flash_linear_attention_npu_544_every_remainder(lane: str) -> None:
    """The tail was wrong only where the length was no multiple of the tile: many remainders in one batch."""
    lengths = [1, 2, 7, 15, 16, 17, 31, 33, 63, 65]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths), 1, 32).half() for _ in range(3))
    out = run(lane, q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=65, max_seqlen_k=65, causal=True)
    for begin, end in zip(cu.tolist(), cu.tolist()[1:]):
        alone, _ = agree(lane, *(x[None, begin:end] for x in (q, k, v)), causal=True)
        torch.testing.assert_close(out[begin:end], alone[0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("lane", LANES)
def test_pytorch_81077_many_empty_sequences(lane: str) -> None:
    q, k, v = (torch.randn(3, 1, 32).half() for _ in range(3))
    cu = offsets(0, 0, 0, 1, 1, 1, 1, 3, 3, 3)
    out = run(lane, q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=2, max_seqlen_k=2)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out[0], v[0])
