"""The fp64 oracle: attention written out, with no tiles, no streaming and nothing shared with the kernels."""

from __future__ import annotations

import math

import torch

Window = tuple["int | None", "int | None"]


def visible(
    seqlen_q: int, seqlen_k: int, causal: bool = False, window: Window = (None, None), block_causal: int = 0
) -> torch.Tensor:
    """(seqlen_q, seqlen_k) bool, True where the query sees the key. Positions align bottom-right."""
    p = torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
    j = torch.arange(seqlen_k)[None, :]
    left, right = (None if w is None or w < 0 else w for w in window)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        mask &= j <= p
    if left is not None:
        mask &= j >= p - left
    if right is not None:
        mask &= j <= p + right
    if block_causal:
        mask &= torch.div(j, block_causal, rounding_mode="floor") <= torch.div(p, block_causal, rounding_mode="floor")
    return mask


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    window_size: Window = (None, None),
    block_causal: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention computed naively in `dtype` on the CPU; float64 is the golden result, the input dtype the yardstick.

    Shapes and options as `fa_multi.attention`. Returns (out in `dtype` and the layout of q, lse (batch, heads,
    seqlen_q) in float64 or, for lower precision, float32). A row without keys has out 0 and lse -inf, or the sink. In
    float16 and bfloat16 every product is rounded to `dtype`, as torch does it.
    """
    q, k, v = (x.detach().cpu().to(dtype) for x in (q, k, v))
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.full(q.shape[:-1], -math.inf, dtype=wide)
    mask = visible(q.shape[2], k.shape[2], causal, window_size, block_causal)
    group = q.shape[1] // max(k.shape[1], 1)
    slopes = None if alibi_slopes is None else alibi_slopes.detach().cpu().to(wide).expand(q.shape[0], q.shape[1])
    for b in range(q.shape[0]):  # one head at a time: a score matrix per head is all the memory it needs
        for h in range(q.shape[1]):
            scores = (q[b, h] @ k[b, h // group].T) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores - (slopes[b, h] * distance(*mask.shape)).to(dtype)
            scores = scores.masked_fill(~mask, -math.inf)
            if sink is not None:  # a key of its own, whose value is zero
                extra = sink.detach().cpu()[h].to(dtype).expand(len(scores), 1)
                scores = torch.cat([scores, extra], -1)
            lse[b, h] = torch.logsumexp(scores.to(wide), -1)
            seen = mask.any(-1)
            weights = torch.softmax(scores[seen], -1)
            weights = torch.zeros_like(weights) if sink is not None and sink[h] == math.inf else weights
            out[b, h, seen] = weights[:, : mask.shape[1]] @ v[b, h // group]
    return (out.transpose(1, 2) if layout == "bshd" else out), lse


def distance(seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """|p - j| as float64, the distance that ALiBi slopes multiply."""
    p = torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
    return (p - torch.arange(seqlen_k)[None, :]).abs().double()
