"""The lanes a regression runs on, and comparison with the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa_multi
from fa_multi import reference
from fa_multi.accuracy import judge

LANES = [
    pytest.param("cpu"),
    pytest.param("npu-sim", marks=pytest.mark.sim),
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("npu", marks=pytest.mark.npu),
]


def run(lane: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Whichever entry point takes the options, on a lane; results on the CPU."""
    call = fa_multi.attention
    if "cu_seqlens_k" in options:
        call = fa_multi.attention_varlen
    elif "cache_seqlens" in options:
        call = fa_multi.attention_paged
    result = call(q, k, v, device=lane, **options)
    return tuple(x.cpu() for x in result) if isinstance(result, tuple) else result.cpu()


def agree(
    lane: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention on a lane, held to the oracle by the tolerance rule. Returns (out, lse)."""
    out, lse = run(lane, q, k, v, return_lse=True, **options)
    golden = reference.attention(q, k, v, **options)
    naive = reference.attention(q, k, v, dtype=q.dtype, **options)
    for x, g, n in zip((out, lse), golden, naive):
        verdict = judge(x, g, n)
        assert verdict.ok, str(verdict)
    return out, lse
