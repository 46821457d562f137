"""The fp64 oracle: attention written out, with no tiles, no streaming and nothing shared with the kernels."""

from __future__ import annotations

import math

import torch


def visible(seqlen_q: int, seqlen_k: int, causal: bool) -> torch.Tensor:
    """(seqlen_q, seqlen_k) bool, True where the query sees the key. Causal aligns bottom-right."""
    i = torch.arange(seqlen_q)[:, None]
    j = torch.arange(seqlen_k)[None, :]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        mask &= j <= i + seqlen_k - seqlen_q
    return mask


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention computed naively in `dtype` on the CPU; float64 is the golden result, the input dtype the yardstick.

    Shapes as `fa_multi.attention`. Returns (out in `dtype` and the layout of q, lse (batch, heads, seqlen_q) in float64
    or, for lower precision, float32). A row without keys has out 0 and lse -inf. In float16 and bfloat16 every product
    is rounded to `dtype`, as torch does it.
    """
    q, k, v = (x.detach().cpu().to(dtype) for x in (q, k, v))
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lse = torch.full(q.shape[:-1], -math.inf, dtype=wide)
    mask = visible(q.shape[2], k.shape[2], causal)
    group = q.shape[1] // max(k.shape[1], 1)
    for b in range(q.shape[0]):  # one head at a time: a score matrix per head is all the memory it needs
        for h in range(q.shape[1]):
            scores = (q[b, h] @ k[b, h // group].T) * scale
            scores = scores.masked_fill(~mask, -math.inf)
            lse[b, h] = torch.logsumexp(scores.to(wide), -1)
            seen = mask.any(-1)
            out[b, h, seen] = torch.softmax(scores[seen], -1) @ v[b, h // group]
    return (out.transpose(1, 2) if layout == "bshd" else out), lse
