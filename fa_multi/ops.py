"""The entry points as torch operators, so that `torch.compile(fullgraph=True)` takes them whole. `fa_multi.attention`
and its siblings call these by themselves while torch is compiling; in eager mode they go straight to the kernel.

Each returns (out, lse); lse has no elements where it was not asked for. The fake implementations give the shapes,
strides and dtypes of the real ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import api


def _pair(result: Any, q: Tensor) -> tuple[Tensor, Tensor]:
    return result if isinstance(result, tuple) else (result, q.new_empty(0, dtype=torch.float32))


@torch.library.custom_op("fa_multi::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    layout: str,
    return_lse: bool,
    left: int,
    right: int,
    block_causal: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    result = api.attention(
        q, k, v, alibi_slopes=alibi_slopes, sink=sink, causal=causal, softmax_scale=softmax_scale, layout=layout,
        return_lse=return_lse, window_size=(left, right), block_causal=block_causal, softcap=softcap,
    )  # fmt: skip
    return _pair(result, q)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Any, sink: Any, causal: bool, softmax_scale: Any, layout: str,
      return_lse: bool, *rest: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, heads = (1, 2) if layout == "bshd" else (2, 1)
    lse = (q.shape[0], q.shape[heads], q.shape[rows]) if return_lse else (0,)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(lse, dtype=torch.float32)


@torch.library.custom_op("fa_multi::attention_varlen", mutates_args=())
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    left: int,
    right: int,
    block_causal: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    result = api.attention_varlen(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, alibi_slopes=alibi_slopes,
        sink=sink, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, softmax_scale=softmax_scale,
        return_lse=return_lse, window_size=(left, right), block_causal=block_causal, softcap=softcap,
    )  # fmt: skip
    return _pair(result, q)


@attention_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, alibi_slopes: Any,
      sink: Any, max_seqlen_q: int, max_seqlen_k: int, causal: bool, softmax_scale: Any, return_lse: bool,
      *rest: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    lse = (q.shape[1], q.shape[0]) if return_lse else (0,)
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), q.new_empty(lse, dtype=torch.float32)


@torch.library.custom_op("fa_multi::attention_paged", mutates_args=())
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    max_seqlen_q: int | None,
    num_splits: int,
    fixed_split_size: int,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    left: int,
    right: int,
    block_causal: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    result = api.attention_paged(
        q, k_cache, v_cache, block_table=block_table, cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q,
        alibi_slopes=alibi_slopes, sink=sink, max_seqlen_q=max_seqlen_q, num_splits=num_splits,
        fixed_split_size=fixed_split_size, causal=causal, softmax_scale=softmax_scale, return_lse=return_lse,
        window_size=(left, right), block_causal=block_causal, softcap=softcap,
    )  # fmt: skip
    return _pair(result, q)


@attention_paged.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Any, cache_seqlens: Any, cu_seqlens_q: Any,
      alibi_slopes: Any, sink: Any, max_seqlen_q: Any, num_splits: int, fixed_split_size: int, causal: bool,
      softmax_scale: Any, return_lse: bool, *rest: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    packed = q.dim() == 3
    lse = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    return out, q.new_empty(lse if return_lse else (0,), dtype=torch.float32)
