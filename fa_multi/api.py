"""The user's entry points. Arguments are checked once for all lanes and become a request; the contract lives here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from . import arguments as check
from . import backends, requests
from .arguments import Device, parse_device, refuse_grad
from .backends import Backend, Lowered, Work
from .calls import Call, Request, Result, call_key, find, remember
from .programs import CombineSpec
from .requests import Lengths, Options


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    device: Device = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    block_causal: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Result:
    """Exact attention, out = softmax(softmax_scale * q k^T) v per head, with fp32 sums. Forward only.

    Query i of seqlen_q stands at key position p = i + seqlen_k - seqlen_q (bottom-right, as FlashAttention since 2.1).
    All masks given apply together.

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim); (batch, heads_q, seqlen_q, head_dim) with layout "bhsd".
    k : (batch, seqlen_k, heads_k, head_dim), heads_q a multiple of heads_k (GQA, MQA).
    v : (batch, seqlen_k, heads_k, head_dim_v).
        float16, bfloat16, or (CPU only) float32. Any strides: a unit last stride is used in place, anything else is
        copied once. Head dims are multiples of 8 up to 256; every length may be 0.
    causal : query i sees keys up to p.
    softmax_scale : > 0; default 1 / sqrt(head_dim).
    layout : "bshd" or "bhsd", of q, k, v and out.
    return_lse : also return the log-sum-exp of the scaled scores.
    device : where to run; default where q is. "cpu", "cuda[:n]", "npu[:n]", or "npu-sim" for the Ascend kernel in the
        CPU simulator. Inputs elsewhere are moved there, and the result stays there (for "npu-sim": on the CPU).
    window_size : (left, right): keys from p - left to p + right, both inclusive; -1 or None is no limit.
    block_causal : n > 0: the keys of p's own block of n keys, and all before it.
    softcap : c > 0: scores become c * tanh(score / c), before any bias.
    alibi_slopes : (heads_q,) or (batch, heads_q): adds -slope * |p - j| to the score of key j.
    sink : (heads_q,), one more logit per head in natural units, in the denominator only. -inf is none, +inf gives 0.
    out, lse : buffers for the results, like what is returned; `lse` needs return_lse.

    Returns
    -------
    out : like q, with head_dim_v columns; contiguous in `layout`. A query that sees no key gives 0.
    lse : (batch, heads_q, seqlen_q) float32, natural log, sink included; -inf for a query that sees no key (with a
        sink: the sink). Only with return_lse.

    Raises
    ------
    ValueError, TypeError : an argument is not acceptable; the message says which, its value, and what is.
    RuntimeError : the device is not there, in one line with the remedy.

    Examples
    --------
    >>> q, k, v = (torch.randn(2, 128, 8, 64, dtype=torch.bfloat16) for _ in range(3))
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 128, 8, 64])
    """
    refuse_grad(q=q, k=k, v=v, alibi_slopes=alibi_slopes, sink=sink)
    if torch.compiler.is_compiling():
        result = torch.ops.fa_multi.attention(
            q, k, v, alibi_slopes, sink, causal, softmax_scale, layout, return_lse, *_sides(window_size),
            block_causal, float(softcap),
        )  # fmt: skip
        return _compiled(result, q, device, return_lse, out, lse)
    options = (causal, softmax_scale, layout, return_lse, device, window_size, block_causal, softcap)
    key = call_key((q, k, v, alibi_slopes, sink), options)
    tensors = [q, k, v] if alibi_slopes is None and sink is None else _given(q, k, v, alibi_slopes, sink)

    def request() -> Request:
        common = Options(causal, softmax_scale, return_lse, window_size, block_causal, softcap, alibi_slopes, sink)
        return requests.dense(q, k, v, layout, common)

    return _run(key, request, device, tensors, out, lse)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    device: Device = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    block_causal: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Result:
    """Attention over sequences packed one after another. Options as in `attention`; nothing waits for the device.

    Parameters
    ----------
    q : (total_q, heads_q, head_dim). k : (total_k, heads_k, head_dim). v : (total_k, heads_k, head_dim_v).
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32 on q's device: sequence b is rows [cu[b], cu[b + 1]). Sequences may
        be empty; rows past the last one get 0 and -inf, and k and v may hold anything there.
    max_seqlen_q, max_seqlen_k : upper bounds of the lengths; changing them compiles nothing.
    seqused_k : (batch,) int32: only so many keys of each sequence count.

    Returns
    -------
    out : (total_q, heads_q, head_dim_v). lse : (heads_q, total_q) float32, only with return_lse.
    """
    refuse_grad(q=q, k=k, v=v, alibi_slopes=alibi_slopes, sink=sink)
    if torch.compiler.is_compiling():
        result = torch.ops.fa_multi.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink, max_seqlen_q, max_seqlen_k, causal,
            softmax_scale, return_lse, *_sides(window_size), block_causal, float(softcap),
        )  # fmt: skip
        return _compiled(result, q, device, return_lse, out, lse)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k)
    common = Options(causal, softmax_scale, return_lse, window_size, block_causal, softcap, alibi_slopes, sink)
    key = call_key(
        (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink),
        ("varlen", max_seqlen_q, max_seqlen_k, device, *common.values()),
    )
    tensors = [q, k, v, *lengths.tensors(), *common.numbers()]

    def request() -> Request:
        check.check_count("max_seqlen_k", max_seqlen_k, 0)
        return requests.varlen(q, k, v, lengths, max_seqlen_q, common)

    return _run(key, request, device, tensors, out, lse)


def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    num_splits: int = 0,
    fixed_split_size: int = 0,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    device: Device = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    block_causal: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Result:
    """Attention against a key-value cache: decode, speculative decode, chunked prefill. Options as in `attention`.

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with cu_seqlens_q.
    k_cache, v_cache : (pages, page_size, heads_k, dim) with a block_table, for any page size; else
        (batch, seqlen, heads_k, dim).
    block_table : (batch, width) int32: page j of sequence b is block_table[b, j]. Entries past a sequence's length, and
        cache slots past it, may hold anything.
    cache_seqlens : (batch,) int32, keys of each sequence, the new ones included. Needed with a block_table.
    cu_seqlens_q : (batch + 1,) int32, for packed q; max_seqlen_q is then an upper bound (default total_q).
    num_splits : tasks that share the keys of a row; 0 chooses. More than there are key tiles is allowed.
    fixed_split_size : > 0: split by this many keys each, so that a result does not depend on its batch mates.

    Returns
    -------
    out : like q, with v's head dim. lse : (batch, heads_q, seqlen_q), or (heads_q, total_q) with cu_seqlens_q.
    """
    refuse_grad(q=q, k_cache=k_cache, v_cache=v_cache, alibi_slopes=alibi_slopes, sink=sink)
    if torch.compiler.is_compiling():
        result = torch.ops.fa_multi.attention_paged(
            q, k_cache, v_cache, block_table, cache_seqlens, cu_seqlens_q, alibi_slopes, sink, max_seqlen_q,
            num_splits, fixed_split_size, causal, softmax_scale, return_lse, *_sides(window_size), block_causal,
            float(softcap),
        )  # fmt: skip
        return _compiled(result, q, device, return_lse, out, lse)
    lengths = Lengths(cu_seqlens_q, None, cache_seqlens, block_table)
    common = Options(causal, softmax_scale, return_lse, window_size, block_causal, softcap, alibi_slopes, sink)
    key = call_key(
        (q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, block_table, alibi_slopes, sink),
        ("paged", max_seqlen_q, num_splits, fixed_split_size, device, *common.values()),
    )
    tensors = [q, k_cache, v_cache, *lengths.tensors(), *common.numbers()]

    def request() -> Request:
        whole = requests.paged(q, k_cache, v_cache, lengths, max_seqlen_q, common)
        lane, _ = parse_device(device, q)
        work = _work(whole, q, k_cache, v_cache, lengths)
        return _divided(whole, backends.get(lane), work, num_splits, fixed_split_size)

    return _run(key, request, device, tensors, out, lse)


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets, from the results over each. See `merge_state_list`."""
    return merge_state_list([out_a, out_b], [lse_a, lse_b])


def merge_state_list(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention results over disjoint key sets (shared prefixes, context parallelism); fp32 inside.

    Parameters
    ----------
    outs : each (batch, seq, heads, dim) or (total, heads, dim), of one shape, dtype and device.
    lses : each (batch, heads, seq) or (heads, total) float32, natural log, as `attention` returns it.

    Returns
    -------
    (out, lse), like the parts. The empty result (0, -inf) changes nothing, and merging empties gives the empty. At most
    one part may carry a sink: it would count twice.
    """
    check.check_states(outs, lses)
    dims = outs[0].dim()
    partial = torch.stack([x.float() for x in outs])
    partial_lse = torch.stack(lses)
    if dims == 3:
        partial, partial_lse = partial.unsqueeze(1), partial_lse.unsqueeze(1)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    if out.numel():
        spec = CombineSpec(check.DTYPES[out.dtype], out.shape[-1])
        lane, _ = parse_device(None, out)
        launch = backends.get(lane).prepare(spec, {}, {})
        launch(partial, partial_lse, *((out.unsqueeze(0), lse.unsqueeze(0)) if dims == 3 else (out, lse)))
    return out, lse


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, device: Device = None, **options: Any) -> str | None:
    """None if the lane of a device takes these arguments, else the reason in one line.

    Arguments as `attention`, or as `attention_varlen` or `attention_paged` (told by cu_seqlens_q, cache_seqlens and
    block_table), without buffers. Nothing runs, and the device need not exist (see `unavailable`); tensors may be on
    the "meta" device.
    """
    try:
        lane, _ = parse_device(device, q)
        return backends.get(lane).supports(_request(q, k, v, dict(options))[0].spec)
    except (TypeError, ValueError) as error:
        return str(error)


def lower(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    device: Device = None,
    arch: str | None = None,
    **options: Any,
) -> Lowered:
    """What a call would run on a device, from the tile program to the kernel text; needs no device and no DSL.

    Arguments as `supports`; where the keys are split, the kernel of the partial results. `arch` picks a target of the
    lane ("sm_80", "sm_90a", "sm_100a", "sm_120a"). Returns an object with `.program` (printable), `.roles` (roles and
    channels, printable) and `.source` (the kernel text).
    """
    lane, _ = parse_device(device, q)
    request, cached = _request(q, k, v, dict(options))
    backend = backends.get(lane)
    reason = backend.supports(request.spec, arch)
    if reason:
        raise ValueError(reason)
    if cached is not None:
        request = _divided(request, backend, *cached, arch)
    return backend.lower(request.kernel(), arch)


def unavailable(device: str) -> str | None:
    """None if this machine can run the device's lane, else why not, with the remedy, in one line."""
    lane, _ = parse_device(device, None)
    return backends.get(lane).unavailable()


# ------------------------------------------------------------------------------------------------- helpers


def _sides(window_size: tuple[int | None, int | None]) -> tuple[int, int]:
    """-1 for no limit: operators take plain ints."""
    left, right = window_size
    return (-1 if left is None else left, -1 if right is None else right)


def _compiled(
    result: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    device: Device,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> Result:
    """What an operator returned, as the entry point would."""
    if device is not None and torch.device(device).type != q.device.type:
        raise ValueError(f"device must be None or q's {q.device} under torch.compile, got {device!r}")
    results = [x if buffer is None else buffer.copy_(x) for x, buffer in zip(result, (out, lse))]
    return (results[0], results[1]) if return_lse else results[0]


def _given(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [x for x in tensors if x is not None]


def _request(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]
) -> tuple[Request, tuple[Work, int, int] | None]:
    """The request of the entry point that takes these keyword arguments, and of one against a cache what `_divided`
    needs."""
    common = {f.name: given.pop(f.name, f.default) for f in fields(Options)}
    lengths = {f.name: given.pop(f.name, None) for f in fields(Lengths)}
    paged = "cache_seqlens" in given or lengths["block_table"] is not None
    if paged:
        lengths["seqused_k"] = given.pop("cache_seqlens", None)
    options, layout = Options(**common), given.pop("layout", "bshd")
    max_seqlen_q, splits = given.pop("max_seqlen_q", None), [given.pop(n, 0) for n in _SPLIT_OPTIONS]
    given.pop("max_seqlen_k", None)
    if given:
        raise TypeError(f"unexpected argument {min(given)!r}")
    if paged:
        request = requests.paged(q, k, v, Lengths(**lengths), max_seqlen_q, options)
        return request, (_work(request, q, k, v, Lengths(**lengths)), splits[0], splits[1])
    if lengths["cu_seqlens_q"] is not None:
        bound = q.shape[0] if max_seqlen_q is None else max_seqlen_q
        return requests.varlen(q, k, v, Lengths(**lengths), bound, options), None
    return requests.dense(q, k, v, layout, options), None


_SPLIT_OPTIONS = ("num_splits", "fixed_split_size")


def _run(
    key: tuple[Any, ...] | None,
    request: Callable[[], Request],
    device: Device,
    tensors: list[torch.Tensor],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> Result:
    """The call of a key, prepared from `request` the first time."""
    call = find(key)
    if call is None:
        call = remember(key, _prepare(request(), device, tensors))
    if out is not None or lse is not None:
        _check_buffers(call, out, lse)
    return call(tensors, out, lse)


def _prepare(request: Request, device: Device, tensors: list[torch.Tensor]) -> Call:
    lane, target = parse_device(device, tensors[0])
    backend = backends.get(lane)
    reason = backend.supports(request.spec)
    if reason:
        raise ValueError(reason)
    reason = backend.unavailable()
    if reason:
        raise RuntimeError(reason)
    if tensors[0].device.type == "meta":
        raise ValueError('q is on device "meta": it has no values; use supports() or lower()')
    return Call(request, backend, target, tensors)


def _check_buffers(call: Call, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    request = call.request
    if out is not None:
        check.check_buffer("out", out, request.out_shape, call.dtype, call.target)
    if lse is not None:
        if not request.spec.return_lse:
            raise ValueError("lse is given, but return_lse is False")
        check.check_buffer("lse", lse, request.lse_shape, torch.float32, call.target)


def _work(request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths) -> Work:
    """Only host-known bounds are used, so that nothing waits for the device."""
    packed = lengths.cu_seqlens_q is not None
    batch = len(lengths.cu_seqlens_q) - 1 if lengths.cu_seqlens_q is not None else q.shape[0]
    queries = request.sizes["max_seqlen_q"] if packed else q.shape[1]
    keys = k.shape[1] * (1 if lengths.block_table is None else lengths.block_table.shape[1])
    return Work(batch, queries, keys, q.shape[-2], k.shape[2], requests.foldable(k) and requests.foldable(v))


def _divided(
    request: Request, backend: Backend, work: Work, num_splits: int, fixed_split_size: int, arch: str | None = None
) -> Request:
    """Decide which heads share tiles, and how many tasks share the keys."""
    check.check_count("num_splits", num_splits, 0)
    check.check_count("fixed_split_size", fixed_split_size, 0)
    if fixed_split_size and num_splits:
        raise ValueError(f"fixed_split_size must be 0 where num_splits is given, got {fixed_split_size}")
    if fixed_split_size:  # then nothing may depend on the size of the batch
        block_n = backend.plan(request.spec, arch).block_n
        tiles = -(-fixed_split_size // block_n)
        num_splits = max(1, -(-work.keys // (tiles * block_n)))
        return replace(request, splits=num_splits, sizes={**request.sizes, "splits": num_splits, "split_tiles": tiles})
    spec, num_splits = backend.divide(request.spec, work, num_splits, arch)
    request = requests.readdressed(request, spec)
    if num_splits == 1:
        return request
    return replace(request, splits=num_splits, sizes={**request.sizes, "splits": num_splits, "split_tiles": 1})
