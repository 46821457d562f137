"""Bad input: every refusal names the argument, its value and what would be accepted."""

from __future__ import annotations

import logging
import math

import pytest
import torch

import fa_multi


def qkv(sq=4, sk=6, hq=4, hk=2, d=32, dv=None, b=2, dtype=torch.bfloat16):
    return (
        torch.randn(b, sq, hq, d).to(dtype),
        torch.randn(b, sk, hk, d).to(dtype),
        torch.randn(b, sk, hk, dv or d).to(dtype),
    )


def changed(index, change):
    tensors = list(qkv())
    tensors[index] = change(tensors[index])
    return tensors


BAD = {
    "rank of q": (changed(0, lambda x: x[0]), {}, ValueError, r"q must have 4 dimensions, got shape \(4, 4, 32\)"),
    "rank of v": (changed(2, lambda x: x[None]), {}, ValueError, "v must have 4 dimensions"),
    "head dim of k": (changed(1, lambda x: x[..., :24]), {}, ValueError, "k must have q's head dim 32, got 24"),
    "heads": (qkv(hq=5, hk=2), {}, ValueError, "q must have a multiple of k's 2 heads, got 5"),
    "no key heads": (
        [*changed(1, lambda x: x[:, :, :0])[:2], qkv()[2][:, :, :0]],
        {},
        ValueError,
        "k's 0 heads, got 4",
    ),
    "heads of v": (changed(2, lambda x: x[:, :, :1]), {}, ValueError, "v must have k's number of heads 2, got 1"),
    "length of v": (changed(2, lambda x: x[:, :5]), {}, ValueError, "v must have k's sequence length 6, got 5"),
    "batch of k": (changed(1, lambda x: x[:1]), {}, ValueError, "k must have q's batch size 2, got 1"),
    "batch of v": (changed(2, lambda x: x[:1]), {}, ValueError, "v must have q's batch size 2, got 1"),
    "dtype of k": (
        changed(1, lambda x: x.half()),
        {},
        TypeError,
        "k must have q's dtype torch.bfloat16, got torch.float16",
    ),
    "device of v": (changed(2, lambda x: x.to("meta")), {}, ValueError, "v must be on q's device cpu, got meta"),
    "integers": ([x.int() for x in qkv()], {}, TypeError, "q must be float16, bfloat16 or .* float32, got torch.int32"),
    "float64": ([x.double() for x in qkv()], {}, TypeError, "q must be float16, .* got torch.float64"),
    "head dim 12": (qkv(d=12), {}, ValueError, "q must have a head dim that is a multiple of 8 from 8 to 256, got 12"),
    "head dim 264": (qkv(d=264), {}, ValueError, "q must have a head dim .* got 264"),
    "head dim 0": (qkv(d=0), {}, ValueError, "q must have a head dim .* got 0"),
    "head dim of v": (qkv(dv=20), {}, ValueError, "v must have a head dim .* got 20"),
    "NaN scale": (qkv(), {"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite and > 0, got nan"),
    "inf scale": (qkv(), {"softmax_scale": math.inf}, ValueError, "softmax_scale must be finite and > 0, got inf"),
    "zero scale": (qkv(), {"softmax_scale": 0}, ValueError, "softmax_scale must be finite and > 0, got 0"),
    "negative scale": (qkv(), {"softmax_scale": -1.0}, ValueError, "softmax_scale must be finite and > 0, got -1.0"),
    "text scale": (qkv(), {"softmax_scale": "1"}, TypeError, "softmax_scale must be a number or None, got str"),
    "tensor scale": (qkv(), {"softmax_scale": torch.tensor(1.0)}, TypeError, "softmax_scale must be a number or None"),
    "layout": (qkv(), {"layout": "sbhd"}, ValueError, r"layout must be one of \('bshd', 'bhsd'\), got 'sbhd'"),
    "causal": (qkv(), {"causal": 1.5}, TypeError, "causal must be a bool, got 1.5"),
    "return_lse": (qkv(), {"return_lse": None}, TypeError, "return_lse must be a bool, got None"),
    "device name": (qkv(), {"device": "tpu"}, ValueError, "device must be None, \"cpu\".* got 'tpu'"),
    "device type": (qkv(), {"device": "meta"}, ValueError, "device must be None, \"cpu\".* got 'meta'"),
    "device number": (qkv(), {"device": 3}, TypeError, 'device must be None, "cpu".* got int'),
    "not a tensor": ([None, *qkv()[1:]], {}, TypeError, "q must be a torch.Tensor, got NoneType"),
    "k not a tensor": ([qkv()[0], 3, qkv()[2]], {}, TypeError, "k must be a torch.Tensor, got int"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    tensors, kwargs, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        fa_multi.attention(*tensors, **kwargs)
    reason = fa_multi.supports(*tensors, **kwargs)
    assert reason is not None
    with pytest.raises(kind, match=message):
        fa_multi.lower(*tensors, **kwargs)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_requires_grad_is_refused(index: int) -> None:
    tensors = list(qkv(dtype=torch.float32))
    tensors[index].requires_grad_()
    with pytest.raises(ValueError, match=f"{'qkv'[index]} requires grad, and fa_multi has no backward yet"):
        fa_multi.attention(*tensors)
    with torch.no_grad():
        fa_multi.attention(*tensors)


def test_grad_is_refused_also_after_the_call_was_prepared() -> None:
    q, k, v = qkv(dtype=torch.float32)
    fa_multi.attention(q, k, v)
    with pytest.raises(ValueError, match="q requires grad"):
        fa_multi.attention(q.requires_grad_(), k, v)


def test_true_is_not_one() -> None:
    """True == 1 as a dictionary key, yet only one of them is a flag."""
    q, k, v = qkv()
    fa_multi.attention(q, k, v, causal=True)
    with pytest.raises(TypeError, match="causal must be a bool, got 1"):
        fa_multi.attention(q, k, v, causal=1)


def test_keyword_only() -> None:
    with pytest.raises(TypeError):
        fa_multi.attention(*qkv(), True)


@pytest.mark.parametrize(
    ("sq", "sk", "b", "h"), [(0, 5, 1, 2), (5, 0, 1, 2), (0, 0, 1, 2), (5, 5, 0, 2), (5, 5, 1, 0), (0, 0, 0, 0)]
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_zero_sizes(sq: int, sk: int, b: int, h: int, layout: str) -> None:
    q, k, v = qkv(sq=sq, sk=sk, b=b, hq=2 * h, hk=h, dv=64)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = fa_multi.attention(q, k, v, layout=layout, return_lse=True)
    assert out.shape == (*q.shape[:3], 64)
    assert lse.shape == (b, 2 * h, sq)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("device", ["cuda", "npu", "npu:0"])
def test_absent_device_is_one_clear_line(device: str) -> None:
    lane = device.partition(":")[0]
    reason = fa_multi.unavailable(lane)
    if reason is None:
        pytest.skip(f"this machine has {lane}")
    with pytest.raises(RuntimeError) as error:
        fa_multi.attention(*qkv(), device=device)
    assert str(error.value) == reason
    assert "\n" not in reason


def test_copies_only_without_unit_stride(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="fa_multi")
    q, k, v = qkv()
    fa_multi.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    assert not caplog.records
    strided = torch.stack([q, q], -1)[..., 0]
    assert torch.equal(fa_multi.attention(strided, k, v), fa_multi.attention(q, k, v))
    assert any("last stride is 2" in r.message for r in caplog.records)


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu", "npu-sim"])
def test_supports_and_lower_need_no_device(device: str) -> None:
    q, k, v = (x.to("meta") for x in qkv(d=64))
    assert fa_multi.supports(q, k, v, causal=True, device=device) is None
    lowered = fa_multi.lower(q, k, v, causal=True, device=device)
    assert "program attention_bfloat16_d64_causal" in str(lowered.program)
    assert "role " in str(lowered.roles)
    assert lowered.source
