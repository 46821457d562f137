"""FlashAttention's functions, argument for argument (FlashAttention 2.8). What fa_multi does not do raises by name.

from fa_multi.compat.flash_attn import flash_attn_func
"""

from __future__ import annotations

from typing import Any

import torch

from ..api import attention, attention_paged, attention_varlen


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As `flash_attn.flash_attn_func`: q, k, v (batch, seqlen, heads, dim). With return_attn_probs: (out, lse, None).

    `deterministic` is accepted: the forward pass always is.
    """
    _refuse(dropout_p=dropout_p)
    result = attention(
        q, k, v, causal=causal, softmax_scale=softmax_scale, window_size=(window_size[0], window_size[1]),
        softcap=softcap, alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """As `flash_attn.flash_attn_varlen_func`: packed q, k, v, or pages of k and v with a block_table."""
    _refuse(dropout_p=dropout_p)
    options: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "causal": causal,
        "softmax_scale": softmax_scale,
        "window_size": (window_size[0], window_size[1]),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "return_lse": return_attn_probs,
    }
    if block_table is not None:
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        result = attention_paged(q, k, v, block_table=block_table, cache_seqlens=lengths, **options)
    else:
        result = attention_varlen(q, k, v, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k, **options)
    return (*result, None) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """As `flash_attn.flash_attn_with_kvcache`, for a cache that already holds the new keys.

    k, v (appending), rotary_*, cache_batch_idx and cache_leftpad are not supported and raise. `rotary_interleaved` only
    says how rotary_* would be applied.
    """
    _refuse(
        k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
    )  # fmt: skip
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    return attention_paged(
        q, k_cache, v_cache, block_table=block_table, cache_seqlens=cache_seqlens, softmax_scale=softmax_scale,
        causal=causal, window_size=(window_size[0], window_size[1]), softcap=softcap, alibi_slopes=alibi_slopes,
        num_splits=num_splits, return_lse=return_softmax_lse,
    )  # fmt: skip


def _refuse(**arguments: Any) -> None:
    """Raise for an argument that fa_multi does not implement and that is not at its neutral value."""
    for name, value in arguments.items():
        neutral = value == 0.0 if name == "dropout_p" else value is None
        if not neutral:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise ValueError(f"{name} is not supported by fa_multi, only its default is accepted, got {got}")
