"""What must hold without an oracle, on every lane: bytes outside the valid region change no bit of a result, and calls
that mean the same give the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fa_multi
from tests import calls
from tests.calls import Inputs

LANES = [
    pytest.param("cpu"),
    pytest.param("npu-sim", marks=pytest.mark.sim),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
FAST = [LANES[0], LANES[2]]  # where another kernel costs no ten seconds
D, SIZE = 32, 16
FOLDED = 4  # pages so small that the CUDA lane lets the two key heads share a tile


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def put(lane: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Where the lane's tensors live."""
    return [x.to("cuda" if lane == "cuda" else "cpu") for x in tensors]


def on(lane: str, call: Inputs) -> Inputs:
    """A call with all its tensors there."""
    *tensors, keywords = call
    q, k, v = put(lane, *tensors)
    return q, k, v, {n: put(lane, x)[0] if isinstance(x, torch.Tensor) else x for n, x in keywords.items()}


def paged(lane: str, size: int = SIZE, **shape: Any) -> Inputs:
    return on(lane, calls.paged(size=size, **shape))


def packed(lane: str, queries=(5, 0, 33), keys=(9, 3, 70)) -> Inputs:
    return on(lane, calls.packed(queries, keys, spare=7))


def run_paged(lane: str, call: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, keywords = call
    return fa_multi.attention_paged(q, k, v, device=lane, return_lse=True, **keywords, **options)


def run_packed(lane: str, call: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, keywords = call
    return fa_multi.attention_varlen(q, k, v, device=lane, return_lse=True, **keywords, **options)


def same_bits(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> None:
    for x, y in zip(a, b):
        assert not bool(x.isnan().any())
        assert torch.equal(x, y)


def nearly(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal but for one step of bfloat16 here and there."""
    torch.testing.assert_close(a, b, rtol=2.0**-7, atol=1e-3)


# ------------------------------------------------------------------------------------- bytes that nobody should read


def check_unused_bytes(lane: str, size: int) -> None:
    call = paged(lane, size)
    clean = run_paged(lane, call)
    _, k, v, keywords = call
    table, used = keywords["block_table"], torch.zeros(*k.shape[:2], dtype=torch.bool, device=k.device)
    for b, n in enumerate(keywords["cache_seqlens"].tolist()):
        for t in range(n):
            used[table[b, t // size], t % size] = True
        table[b, -(-n // size) :] = -(1 << 30)
    k[~used] = math.nan
    v[~used] = math.inf
    same_bits(clean, run_paged(lane, call))


def test_unused_pages_slots_and_table_entries_may_hold_anything(lane: str) -> None:
    check_unused_bytes(lane, SIZE)


@pytest.mark.parametrize("lane", FAST)
def test_unused_bytes_may_hold_anything_where_heads_share_a_tile(lane: str) -> None:
    check_unused_bytes(lane, FOLDED)


def test_spare_rows_and_buffers_may_hold_anything(lane: str) -> None:
    call = packed(lane)
    clean = run_packed(lane, call)
    q, k, v, keywords = call
    ends = (int(keywords["cu_seqlens_q"][-1]), int(keywords["cu_seqlens_k"][-1]))
    for x, end in ((q, ends[0]), (k, ends[1]), (v, ends[1])):
        x[end:] = math.nan
    out, lse = (torch.full_like(x, math.nan) for x in clean)
    dirty = run_packed(lane, call, out=out, lse=lse)
    assert dirty[0] is out
    same_bits(clean, dirty)
    assert bool((out[ends[0] :] == 0).all())
    assert bool((lse[:, ends[0] :] == -math.inf).all())


@pytest.mark.parametrize("lane", FAST)
def test_keys_past_seqused_k_may_hold_anything(lane: str) -> None:
    call = packed(lane)
    _, k, v, keywords = call
    used = put(lane, torch.tensor([4, 0, 33], dtype=torch.int32))[0]
    clean = run_packed(lane, call, seqused_k=used, causal=True)
    for begin, end in zip((keywords["cu_seqlens_k"][:-1] + used).tolist(), keywords["cu_seqlens_k"][1:].tolist()):
        k[begin:end] = math.nan
        v[begin:end] = math.nan
    same_bits(clean, run_packed(lane, call, seqused_k=used, causal=True))


@pytest.mark.parametrize("lane", FAST)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_packed_queries_against_pages_leave_spare_rows_empty(lane: str, splits: int, sink: bool) -> None:
    """Split or not: the partial results of rows that belong to no sequence must be empty too."""
    q, k, v, keywords = paged(lane, sq=3)
    counts = [3, 0, 2]
    rows = torch.cat([*(q[b, :n] for b, n in enumerate(counts)), torch.full_like(q[0], math.nan)])
    cu = put(lane, torch.tensor([0, *counts]).cumsum(0).int())[0]
    call = (rows, k, v, {**keywords, "cu_seqlens_q": cu, "max_seqlen_q": 3})
    extra = {"sink": put(lane, torch.tensor([1.0, -1.0, 9.0, 0.0]))[0]} if sink else {}
    for _ in range(2):  # a workspace of an earlier call holds its numbers
        out, lse = run_paged(lane, call, causal=True, num_splits=splits, **extra)
        assert not bool(out.isnan().any())
        assert bool((out[sum(counts) :] == 0).all())
        assert bool((lse[:, sum(counts) :] == -math.inf).all())


@pytest.mark.parametrize("lane", FAST)
def test_spare_rows_have_no_sink_without_keys_either(lane: str) -> None:
    q, k, v, keywords = packed(lane, keys=(0, 0, 0))
    sink = put(lane, torch.tensor([1.0, -1.0, 9.0, 0.0]))[0]
    out, lse = run_packed(lane, (q, k[:0], v[:0], keywords), sink=sink)
    end = int(keywords["cu_seqlens_q"][-1])
    assert bool((out == 0).all())
    assert torch.equal(lse[:, :end], sink[:, None].expand(4, end))
    assert bool((lse[:, end:] == -math.inf).all())


# ------------------------------------------------------------------------------------- calls that mean the same


def test_permuting_pages_changes_nothing(lane: str) -> None:
    call = paged(lane)
    q, k, v, keywords = call
    order = torch.randperm(len(k), device=k.device)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(k), device=k.device)
    moved = {**keywords, "block_table": place[keywords["block_table"].long()].int()}
    same_bits(run_paged(lane, call), run_paged(lane, (q, k[order], v[order], moved)))


def test_more_pages_and_a_wider_table_change_nothing(lane: str) -> None:
    call = paged(lane)
    q, k, v, keywords = call
    pool = [torch.cat([x, torch.full_like(x[:5], math.nan)]) for x in (k, v)]
    table = keywords["block_table"]
    wide = {**keywords, "block_table": torch.cat([table, torch.full_like(table, len(k) + 99)], 1)}
    same_bits(run_paged(lane, call, num_splits=1), run_paged(lane, (q, *pool, wide), num_splits=1))


@pytest.mark.parametrize("lane", FAST)
def test_batch_mates_change_nothing(lane: str) -> None:
    lengths = (70, 5, 300)
    call = paged(lane, lengths=lengths)
    q, k, v, keywords = call
    together = run_paged(lane, call, fixed_split_size=128)
    for b in range(len(lengths)):
        alone = (q[b : b + 1], k, v, {name: x[b : b + 1] for name, x in keywords.items()})
        same_bits((together[0][b : b + 1], together[1][b : b + 1]), run_paged(lane, alone, fixed_split_size=128))


@pytest.mark.parametrize("lane", FAST)
def test_keys_in_two_halves_merge_to_the_whole(lane: str) -> None:
    q, k, v = put(lane, *(torch.randn(s).bfloat16() for s in ((2, 40, 4, D), (2, 300, 2, D), (2, 300, 2, D))))
    out, lse = fa_multi.attention(q, k, v, device=lane, return_lse=True)
    parts = [fa_multi.attention(q, k[:, a:b], v[:, a:b], device=lane, return_lse=True) for a, b in ((0, 77), (77, 300))]
    merged = fa_multi.merge_states(*parts[0], *parts[1])
    nearly(merged[0], out)
    torch.testing.assert_close(merged[1], lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lane", FAST)
def test_layouts_change_nothing(lane: str) -> None:
    q, k, v = put(lane, *(torch.randn(2, 90, 3, 4, D).bfloat16()[:, :, n] for n in range(3)))
    out, lse = fa_multi.attention(q, k, v, device=lane, causal=True, return_lse=True)
    other = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    same, same_lse = fa_multi.attention(*other, device=lane, causal=True, return_lse=True, layout="bhsd")
    same_bits((out, lse), (same.transpose(1, 2), same_lse))


@pytest.mark.parametrize("lane", FAST)
@pytest.mark.parametrize("splits", [1, 3])
def test_page_sizes_change_nothing(lane: str, splits: int) -> None:
    """Nor does it matter that some of them let key heads share a tile."""
    q, k, v, keywords = on(lane, calls.paged(size=48, sq=2))
    out, lse = run_paged(lane, (q, k, v, keywords), causal=True, num_splits=splits)
    for size in (16, FOLDED):
        parts = 48 // size
        table = (keywords["block_table"][:, :, None] * parts + torch.arange(parts, device=k.device)).flatten(1).int()
        cut = [x.reshape(-1, size, *x.shape[2:]) for x in (k, v)]
        again = run_paged(lane, (q, *cut, {**keywords, "block_table": table}), causal=True, num_splits=splits)
        nearly(again[0], out)
        torch.testing.assert_close(again[1], lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lane", FAST)
def test_every_query_head_twice_gives_every_result_twice(lane: str) -> None:
    call = paged(lane, sq=2)
    q, k, v, keywords = call
    out, lse = run_paged(lane, call, causal=True)
    twice = run_paged(lane, (q.repeat_interleave(2, 2), k, v, keywords), causal=True)
    nearly(twice[0], out.repeat_interleave(2, 2))
    torch.testing.assert_close(twice[1], lse.repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)
