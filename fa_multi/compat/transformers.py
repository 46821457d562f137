"""Attention for Hugging Face transformers (5.x): `register()`, then `attn_implementation="fa_multi"`.

import fa_multi.compat.transformers
fa_multi.compat.transformers.register()
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fa_multi")
"""

from __future__ import annotations

from typing import Any

import torch

from ..api import attention, attention_varlen

NAME = "fa_multi"


def register(device: str | None = None) -> None:
    """Make `attn_implementation="fa_multi"` known to transformers. `device` as in `fa_multi.attention`.

    Raises ImportError, in one line with the remedy, where transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import flash_attention_mask
    except ImportError as error:
        raise ImportError('transformers 5 is needed: pip install "transformers>=5"') from error

    def forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return attention_forward(*args, **{**kwargs, "device": device})

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. query, key, value (batch, heads, seq, dim); attention_mask None, or (batch,
    seqlen_k) with 0 at padding. Returns (batch, seqlen_q, heads, dim)."""
    if dropout:
        raise ValueError(f"dropout is not supported by fa_multi, only 0.0 is accepted, got {dropout}")
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sink": s_aux,
        "device": device,
    }
    if sliding_window is not None:  # transformers counts the query's own position, we count what lies left of it
        options["window_size"] = (sliding_window - 1, -1 if causal else sliding_window - 1)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None or bool(attention_mask.bool().all()):
        out = attention(q, k, v, **options)
    else:
        out = _padded(q, k, v, attention_mask.bool(), options)
    assert isinstance(out, torch.Tensor)
    return out.to(query.device), None


def _padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Padding left out: the kept tokens of each sequence are packed, and the result is put back. Padding gives 0."""
    keep = keep[:, -k.shape[1] :]
    keep_q = keep[:, -q.shape[1] :]
    counts = [m.sum(-1, dtype=torch.int32) for m in (keep_q, keep)]
    cu = [torch.nn.functional.pad(c.cumsum(0, dtype=torch.int32), (1, 0)) for c in counts]
    packed = attention_varlen(
        q[keep_q], k[keep], v[keep], cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1], **options,
    )  # fmt: skip
    assert isinstance(packed, torch.Tensor)
    out = packed.new_zeros(*q.shape[:3], v.shape[3])
    out[keep_q.to(out.device)] = packed
    return out
