"""torch's scaled_dot_product_attention, with torch's meaning (PyTorch 2.x): causal is top-left, a True in a mask keeps.

from fa_multi.compat.sdpa import scaled_dot_product_attention
"""

from __future__ import annotations

import torch

from ..api import attention, attention_paged


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`: (batch, heads, seq, dim) in and out.

    attn_mask : bool, True keeps, broadcastable to (batch, heads, seqlen_q, seqlen_k). It must be a mask of intervals
        that the kernels know: everything, the first n keys of each batch entry (padding), or a causal mask, aligned at
        the top left or the bottom right. Looking at it waits for the device. Anything else is a ValueError.
    """
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p is not supported by fa_multi, only 0.0 is accepted, got {dropout_p}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"key must have query's {query.shape[1]} heads unless enable_gqa, got {key.shape[1]}")
    if attn_mask is not None:
        if is_causal:
            raise ValueError("attn_mask must be None where is_causal is True")
        return _masked(query, key, value, attn_mask, scale)
    if is_causal:
        return _causal_top_left(query, key, value, scale)
    return _plain(query, key, value, scale, causal=False)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool) -> torch.Tensor:
    out = attention(q, k, v, layout="bhsd", causal=causal, softmax_scale=scale)
    assert isinstance(out, torch.Tensor)
    return out


def _causal_top_left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Query i sees keys up to i: keys past the last query are seen by none, and queries past the last key see all."""
    square = min(q.shape[2], k.shape[2])
    head = _plain(q[:, :, :square], k[:, :, :square], v[:, :, :square], scale, causal=True)
    if square == q.shape[2]:
        return head
    return torch.cat([head, _plain(q[:, :, square:], k, v, scale, causal=False)], dim=2)


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None) -> torch.Tensor:
    if mask.dtype != torch.bool:
        raise ValueError(f"attn_mask must be bool (True keeps), got {mask.dtype}")
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[2], k.shape[2]
    mask = (
        mask.expand(batch, q.shape[1], seqlen_q, seqlen_k)
        if mask.dim() == 4
        else mask.expand(batch, 1, seqlen_q, seqlen_k)
    )
    if not bool((mask == mask[:, :1]).all()):
        raise ValueError("attn_mask must be the same for every head")
    rows = mask[:, 0]
    if bool(rows.all()):
        return _plain(q, k, v, scale, causal=False)
    ones = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=mask.device)
    if torch.equal(rows, ones.tril().expand_as(rows)):
        return _causal_top_left(q, k, v, scale)
    if torch.equal(rows, ones.tril(seqlen_k - seqlen_q).expand_as(rows)):
        return _plain(q, k, v, scale, causal=True)
    lengths = rows[:, 0].sum(-1)
    prefix = torch.arange(seqlen_k, device=mask.device) < lengths[:, None]
    if not torch.equal(rows, prefix[:, None].expand_as(rows)):
        raise ValueError(
            "attn_mask must keep everything, the first n keys of each batch entry, or a causal triangle; "
            "use fa_multi.attention's causal, window_size or block_causal for other intervals"
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = attention_paged(q, k, v, cache_seqlens=lengths.int(), softmax_scale=scale)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)
