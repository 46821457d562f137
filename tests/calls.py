"""Small packed and paged calls, for tests that look at one rule at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]


def packed(
    q_lengths: Sequence[int], k_lengths: Sequence[int], spare: int = 0, hq: int = 4, hk: int = 2, d: int = 32
) -> Inputs:
    """q, k, v and keywords of `attention_varlen`; `spare` rows belong to no sequence."""
    cu = [torch.tensor([0, *n]).cumsum(0).int() for n in (q_lengths, k_lengths)]
    q = torch.randn(sum(q_lengths) + spare, hq, d).bfloat16()
    k, v = (torch.randn(sum(k_lengths) + spare, hk, d).bfloat16() for _ in range(2))
    keywords = {
        "cu_seqlens_q": cu[0],
        "cu_seqlens_k": cu[1],
        "max_seqlen_q": max(q_lengths),
        "max_seqlen_k": max(k_lengths),
    }
    return q, k, v, keywords


def paged(
    lengths: Sequence[int] = (0, 5, 70),
    size: int = 16,
    sq: int = 1,
    hq: int = 4,
    hk: int = 2,
    d: int = 32,
    spare: int = 3,
) -> Inputs:
    """q, k, v and keywords of `attention_paged`; pages in any order, `spare` of them unused."""
    width = -(-max(lengths) // size) + 1
    pages = len(lengths) * width + spare
    k, v = (torch.randn(pages, size, hk, d).bfloat16() for _ in range(2))
    table = torch.randperm(pages)[: len(lengths) * width].view(len(lengths), width).int()
    q = torch.randn(len(lengths), sq, hq, d).bfloat16()
    return q, k, v, {"block_table": table, "cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
