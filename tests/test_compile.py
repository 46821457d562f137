"""torch operators: fake and real agree, and torch.compile takes a call whole."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import fa_multi
from fa_multi import ops

CPU_AND_GPU = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def qkv(device="cpu", layout="bshd"):
    shapes = [(2, 7, 4, 32), (2, 9, 2, 32), (2, 9, 2, 64)]
    tensors = [torch.randn(s, device=device).half() for s in shapes]
    return tensors if layout == "bshd" else [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_attention_operator(device: str, layout: str, return_lse: bool) -> None:
    sink = torch.randn(4, device=device)
    opcheck(ops.attention, (*qkv(device, layout), None, sink, True, None, layout, return_lse, 3, -1, 0, 0.0))


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_varlen_and_paged_operators(device: str) -> None:
    q, k, v = qkv(device)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (7, 9))
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    opcheck(ops.attention_varlen, (*flat, cu_q, cu_k, None, None, None, 7, 9, True, None, True, -1, -1, 0, 0.0))
    table = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32, device=device)
    used = torch.tensor([5, 18], dtype=torch.int32, device=device)
    args = (q, k, v, table, used, None, None, None, None, 0, 0, True, None, True, -1, -1, 0, 0.0)
    opcheck(ops.attention_paged, args)


def step(q, k, v, sink, used):
    """Every entry point, in one graph."""
    a, lse = fa_multi.attention(q * 2, k, v, causal=True, return_lse=True, sink=sink)
    b = fa_multi.attention_paged(q, k, v, cache_seqlens=used, window_size=(4, None))
    return a + b, lse.exp()


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_compile_fullgraph(device: str) -> None:
    q, k, v = qkv(device)
    sink, used = torch.randn(4, device=device), torch.tensor([5, 9], dtype=torch.int32, device=device)
    expected = step(q, k, v, sink, used)
    got = torch.compile(step, fullgraph=True)(q, k, v, sink, used)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)


def test_compiled_call_keeps_the_checks() -> None:
    q, k, v = qkv()
    compiled = torch.compile(lambda q, k, v: fa_multi.attention(q, k, v), backend="eager")
    with pytest.raises(Exception, match="q must have a multiple of k's 2 heads, got 3"):
        compiled(q[:, :, :3], k, v)
