"""What the matrix does not cover on an NVIDIA GPU: launches, streams, layouts, repeatability, compilations."""

from __future__ import annotations

import pytest
import torch
from fa_multi.backends.cuda import runtime

import fa_multi
from fa_multi import reference
from tests.calls import paged

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, causal: bool = False) -> None:
    want, _ = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal=causal)
    error = (out.cpu().double() - want).norm() / want.norm().clamp_min(1e-30)
    assert error < (4e-3 if out.dtype == torch.bfloat16 else 6e-4)


def test_equal_bits_on_repeat() -> None:
    q, k, v = draw(2, 1000, 8, 128), draw(2, 1000, 2, 128), draw(2, 1000, 2, 128)
    first = fa_multi.attention(q, k, v, causal=True, return_lse=True)
    for _ in range(5):
        for a, b in zip(first, fa_multi.attention(q, k, v, causal=True, return_lse=True)):
            assert torch.equal(a, b)


def test_runs_on_the_current_stream() -> None:
    q = draw(2, 2048, 8, 64)
    want = fa_multi.attention(q, q, q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x = q * 1  # late on this stream: a launch elsewhere would read it too early
        got = fa_multi.attention(x, x, x)
    stream.synchronize()
    assert torch.equal(want, got)


def test_is_captured_in_a_graph() -> None:
    q = draw(1, 300, 4, 128)
    want = fa_multi.attention(q, q, q, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fa_multi.attention(q, q, q, causal=True)
    got.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(want, got)


@pytest.mark.parametrize("splits", [1, 4])
def test_graph_replays_with_other_lengths(splits: int) -> None:
    q, k, v = draw(3, 1, 8, 64), draw(40, 16, 2, 64), draw(40, 16, 2, 64)
    table = torch.randperm(40, device=DEVICE)[:36].view(3, 12)[:, :10].int()
    used = torch.tensor([5, 160, 90], dtype=torch.int32, device=DEVICE)

    def step() -> torch.Tensor:
        return fa_multi.attention_paged(q, k, v, block_table=table, cache_seqlens=used, num_splits=splits)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for lengths in ([5, 160, 90], [0, 1, 160], [77, 16, 33]):
        used.copy_(torch.tensor(lengths))
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, step())


def ends(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def test_packed_graph_replays_with_other_lengths() -> None:
    q, k, v = draw(700, 4, 64), draw(700, 2, 64), draw(700, 2, 64)
    cu = ends(100, 300, 0, 250)

    def step() -> torch.Tensor:
        return fa_multi.attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=700, max_seqlen_k=700, causal=True
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for lengths in ((100, 300, 0, 250), (0, 0, 0, 700), (1, 1, 1, 1), (0, 0, 0, 0)):
        cu.copy_(ends(*lengths))
        got.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, step())
        assert not bool(got.isnan().any())


def test_packed_calls_on_two_streams_do_not_meet() -> None:
    """Tasks are handed out by a counter in device memory; each stream has its own."""
    q, cu = draw(4000, 8, 64), ends(1000, 500, 2500)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 2500, "max_seqlen_k": 2500}
    want = fa_multi.attention_varlen(q, q, q, causal=True, **lengths)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for n in range(20):
        with torch.cuda.stream(streams[n % 2]):
            results.append(fa_multi.attention_varlen(q, q, q, causal=True, **lengths))
    torch.cuda.synchronize()
    assert all(torch.equal(want, x) for x in results)


def test_many_sequences_most_of_them_empty() -> None:
    lengths = [0] * 999
    lengths[5], lengths[500], lengths[998] = 130, 1, 77
    q, cu = draw(sum(lengths), 2, 64), ends(*lengths)
    out = fa_multi.attention_varlen(
        q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5000, max_seqlen_k=5000, causal=True
    )
    begin = 0
    for n in (130, 1, 77):
        x = q[begin : begin + n][None]
        check(x, x, x, out[begin : begin + n][None], causal=True)
        begin += n


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_waits_for_nothing_and_allocates_its_result_alone(splits: int) -> None:
    q, k, v = draw(3, 1, 8, 64), draw(40, 16, 2, 64), draw(40, 16, 2, 64)
    table = torch.arange(36, device=DEVICE).view(3, 12).int()
    used = torch.tensor([5, 160, 90], dtype=torch.int32, device=DEVICE)

    def step() -> torch.Tensor:
        return fa_multi.attention_paged(q, k, v, block_table=table, cache_seqlens=used, num_splits=splits)

    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    want, before = step(), allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert allocations() == before + 1
    assert torch.equal(want, got)


@pytest.mark.parametrize(
    ("size", "hq", "hk", "d"),
    [
        pytest.param(1, 32, 8, 128, id="heads folded for small pages"),
        pytest.param(16, 32, 8, 64, id="heads folded for short rows"),
        pytest.param(16, 8, 8, 128, id="single heads"),
        pytest.param(16, 16, 4, 256, id="wide heads"),
    ],
)
def test_decode_in_every_form(size: int, hq: int, hk: int, d: int) -> None:
    lengths = (0, 1, 700, 64, 333, 15, 16, 129)
    *tensors, keywords = paged(lengths, size, hq=hq, hk=hk, d=d)
    q, k, v = (x.to(DEVICE) for x in tensors)
    keywords = {name: x.to(DEVICE) for name, x in keywords.items()}
    for splits in (0, 1, 3):
        out = fa_multi.attention_paged(q, k, v, num_splits=splits, **keywords)
        for b, n in enumerate(lengths):
            rows = [x[keywords["block_table"][b].long()].flatten(0, 1)[None, :n] for x in (k, v)]
            check(q[b : b + 1], *rows, out[b : b + 1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [40, 128])
def test_layouts_without_a_copy(d: int, causal: bool) -> None:
    batch, seq, heads = 2, 200, 4
    packed = draw(batch, seq, 3, heads, d)
    shared_head = draw(batch, seq, 1, d).expand(batch, seq, heads, d)
    cases = {
        "packed": packed.unbind(2),
        "any order": (draw(seq, heads, batch, d).permute(2, 0, 1, 3),) * 3,
        "one key head for all": (draw(batch, seq, heads, d), shared_head, shared_head),
        "one batch entry for all": (draw(1, seq, heads, d).expand(batch, seq, heads, d),) * 3,
        "odd strides": (draw(batch, seq, heads, d + 1)[..., :d],) * 3,
        "odd pointer": (draw(batch * seq * heads * d + 1)[1:].view(batch, seq, heads, d),) * 3,
        "unused strides": (draw(1, seq, 1, d).as_strided((1, seq, 1, d), (3, d, 5, 1)),) * 3,
    }
    for name, (q, k, v) in cases.items():
        out = fa_multi.attention(q, k, v, causal=causal)
        try:
            check(q, k, v, out, causal)
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("shift", [0, 1])
def test_results_into_any_buffer(shift: int) -> None:
    q = draw(2, 130, 3, 64)
    room = torch.full((q.numel() * 2 + 8,), float("nan"), device=DEVICE, dtype=q.dtype)
    out = room.as_strided(q.shape, (130 * 3 * 64 * 2, 3 * 64, 64, 1), shift)
    fa_multi.attention(q, q, q, out=out)
    check(q, q, q, out)
    assert int(torch.isfinite(room).sum()) == q.numel(), "wrote beside the buffer"


def test_sizes_layouts_and_lengths_compile_nothing_new() -> None:
    q, k = draw(1, 64, 4, 64), draw(1, 64, 2, 64)
    fa_multi.attention(q, k, k, causal=True)
    before = runtime.compilations()
    for batch, heads, group, seq_q, seq_k in (
        (1, 1, 1, 1, 1),
        (3, 8, 4, 333, 77),
        (2, 6, 3, 65, 1024),
        (5, 7, 7, 129, 1),
    ):
        q, k = draw(batch, seq_q, heads, 64), draw(batch, seq_k, heads // group, 64)
        fa_multi.attention(q, k, k, causal=True)
        qt, kt = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        fa_multi.attention(qt, kt, kt, causal=True, layout="bhsd")
    assert runtime.compilations() == before


def test_many_batch_entries() -> None:
    q, k, v = draw(70_000, 1, 1, 64), draw(70_000, 1, 1, 64), draw(70_000, 1, 1, 64)
    assert torch.equal(fa_multi.attention(q, k, v), v)


def test_offsets_beyond_32_bits() -> None:
    """More than 2^31 elements of out and q: the last rows are right."""
    seq, heads, d = 70_000, 256, 128
    q, k = draw(1, seq, heads, d), draw(1, 8, 1, d)
    out = fa_multi.attention(q, k, k)
    check(q[:, -100:, -2:], k, k, out[:, -100:, -2:])


@pytest.mark.parametrize("d", [64, 128, 256])
def test_bytes_beyond_the_tensors_do_not_matter(d: int) -> None:
    room = torch.full((1, 400, 2, d), float("nan"), device=DEVICE, dtype=torch.float16)
    room[:, :300] = torch.randn(1, 300, 2, d)
    x = room[:, :300]
    check(x, x, x, fa_multi.attention(x, x, x, causal=True), causal=True)
