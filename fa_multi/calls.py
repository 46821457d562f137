"""From checked arguments to a launch: a `Request` says what to compute, a `Call` is one with its kernel loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

import torch

from . import workspace
from .backends import Backend, Launch
from .programs import CombineSpec
from .spec import AttentionSpec

logger = logging.getLogger("fa_multi")

Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Request:
    """A call's meaning, free of its values.

    names: of the input tensors, in the order of the program's.
    arrange: user tensors to the program's views, without a copy. arrange_out: out or lse, likewise.
    out_shape, lse_shape: as the user sees them. sizes: run-time sizes that no tensor's shape gives.
    splits: tasks that share the keys of a row; more than 1 makes partial results and joins them.
    """

    spec: AttentionSpec
    names: tuple[str, ...]
    arrange: Callable[[Tensors], list[torch.Tensor]]
    arrange_out: Callable[[torch.Tensor], torch.Tensor]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    empty: bool
    sizes: Mapping[str, int] = field(default_factory=dict)
    splits: int = 1

    def kernel(self) -> AttentionSpec:
        """The spec of the kernel that is launched: of the partial results where the keys are split."""
        return self.spec if self.splits == 1 else replace(self.spec, split=True, return_lse=False)


class Call:
    """A request with its kernel loaded for one device. What the key of a call determines is settled here, since a call
    on a small tensor is host time and nothing else."""

    def __init__(self, request: Request, backend: Backend, target: torch.device, tensors: Tensors) -> None:
        self.request, self.target = request, target
        self.dtype = getattr(torch, request.spec.dtype)
        self.return_lse = request.spec.return_lse
        self.moves = tensors[0].device != target
        q = tensors[0]
        self.out_like_q = q.is_contiguous() and tuple(q.shape) == request.out_shape and not self.moves
        self.launch: Launch | None = None
        self.combine: Launch | None = None
        self.as_given = False
        if request.empty:
            return
        given = [x.to(target) for x in tensors]
        arranged = request.arrange(given)
        self.as_given = all(x is y for x, y in zip(given, arranged)) and request.arrange_out is as_it_is
        inputs = dict(zip(request.names, arranged))
        spec, sizes = request.spec, dict(request.sizes)
        if request.splits > 1:
            joined = CombineSpec(
                spec.dtype, spec.head_dim_v, spec.sink, spec.return_lse, few_rows=spec.addressing.pack_group
            )
            self.combine = backend.prepare(joined, {"sink": inputs["sink"]} if spec.sink else {}, {})
            inputs.pop("sink", None)
        self.launch = backend.prepare(request.kernel(), inputs, sizes)

    def __call__(self, tensors: Tensors, out: torch.Tensor | None, lse: torch.Tensor | None) -> Result:
        request = self.request
        if self.moves:
            tensors = [x.to(self.target) for x in tensors]
        if out is None:
            if self.out_like_q:
                out = torch.empty_like(tensors[0])
            else:
                out = torch.empty(request.out_shape, dtype=self.dtype, device=self.target)
        if self.return_lse and lse is None:
            lse = torch.empty(request.lse_shape, dtype=torch.float32, device=self.target)
        if self.launch is None:
            self._no_keys(tensors, out, lse)
        elif self.as_given and self.combine is None:
            self.launch(*tensors, out) if lse is None else self.launch(*tensors, out, lse)
        else:
            self._arranged(request.arrange(tensors), out, lse)
        if lse is not None and request.spec.sink and (self.launch is None or self.combine is not None):
            self._no_sink_in_spare_rows(tensors, lse)
        return (out, lse) if self.return_lse else out  # type: ignore[return-value]

    def _arranged(self, inputs: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None) -> None:
        assert self.launch is not None
        results = [self.request.arrange_out(x) for x in (out, lse) if x is not None]
        if self.combine is None:
            self.launch(*inputs, *results)
        else:
            self._split(inputs, results)

    def _split(self, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Partial results in fp32, then their combination, which alone knows the sink."""
        assert self.launch is not None
        assert self.combine is not None
        splits, (batch, rows, heads, dim) = self.request.splits, results[0].shape
        count = splits * batch * rows * heads
        room = workspace.partials(count * (dim + 1), self.target)
        partial = room[: count * dim].view(splits, batch, rows, heads, dim)
        partial_lse = room[count * dim : count * (dim + 1)].view(splits, batch, heads, rows)
        sink = [inputs.pop()] if self.request.spec.sink else []
        self.launch(*inputs, partial, partial_lse)
        self.combine(partial, partial_lse, *sink, *results)

    def _no_keys(self, tensors: Tensors, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        out.zero_()
        if lse is None:
            return
        lse.fill_(-math.inf)
        if self.request.spec.sink:  # all there is
            sink = dict(zip(self.request.names, tensors))["sink"].float()
            self.request.arrange_out(lse).copy_(sink[None, :, None].expand_as(self.request.arrange_out(lse)))

    def _no_sink_in_spare_rows(self, tensors: Tensors, lse: torch.Tensor) -> None:
        """Rows past the last packed sequence are no queries, so they have no sink either. What joins partial results
        does not know them."""
        ends = dict(zip(self.request.names, tensors)).get("cu_seqlens_q")
        if ends is not None:
            lse.masked_fill_(torch.arange(lse.shape[-1], device=lse.device) >= ends[-1], -math.inf)


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    """The `arrange_out` of a request whose results are laid out as the program's."""
    return x


def unit_last(x: torch.Tensor) -> torch.Tensor:
    """`x` itself if its last stride is 1, else a copy."""
    if x.stride(-1) == 1 or x.numel() == 0:
        return x
    logger.debug("copying a tensor of shape %s: its last stride is %d, not 1", tuple(x.shape), x.stride(-1))
    return x.contiguous()


_calls: dict[Any, Call] = {}
_MAX_CALLS = 4096


def call_key(tensors: Sequence[Any], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What a prepared call depends on: shapes, strides, dtypes, devices, alignment to 16 bytes, and the options with
    their types (1 == True == 1.0, but the checks tell them apart). None where an argument is no tensor."""
    try:
        where = 0
        parts: list[Any] = []
        for x in tensors:
            if x is not None:
                parts += (x.shape, x.stride(), x.dtype, x.device)
                where |= x.data_ptr()
            else:
                parts.append(None)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return (*parts, where & 15, *options, *map(type, options))


def find(key: tuple[Any, ...] | None) -> Call | None:
    """The call prepared under a key, if any."""
    try:
        return _calls.get(key)
    except TypeError:  # an option that cannot be hashed, such as a list; the checks say whether it is acceptable
        return None


def remember(key: tuple[Any, ...] | None, call: Call) -> Call:
    """Keep a prepared call if its key can be one; the oldest goes when there are too many."""
    try:
        hash(key)
    except TypeError:
        return call
    if key is not None:
        if len(_calls) >= _MAX_CALLS:
            del _calls[next(iter(_calls))]
        _calls[key] = call
    return call
