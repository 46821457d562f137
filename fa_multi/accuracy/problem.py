"""One attention call to be compared: its tensors and options, cut by sequence and head so that little memory is needed.

A problem is a call of `fa_multi.attention`, `attention_varlen` or `attention_paged`; which, follows from its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Union

import torch

import fa_multi

from .. import reference
from ..cases import Case
from ..philox import fingerprint

Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]

# Options that only hide keys: without them every key is visible.
MASK_OPTIONS = ("causal", "window_size", "block_causal")
# Tensors whose last axis is the query head.
HEAD_OPTIONS = ("sink", "alibi_slopes")
# Options that add something to a score by where its row stands.
POSITION_OPTIONS = ("alibi_slopes",)
# Keyword arguments that change how a result is computed, and not what it is.
_IMMATERIAL = ("layout", "max_seqlen_q", "max_seqlen_k", "num_splits", "fixed_split_size")
# Elements of one piece; the float64 temporaries of a comparison are a small multiple of it.
_PIECE = 1 << 21


@dataclass
class Problem:
    """tensors: the call's three positional arguments (q, k, v; q, k_cache, v_cache for a paged call), and tensors that
    are keyword arguments. options: the other keyword arguments (JSON values). case: the case, if it is one."""

    name: str
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    case: Case | None = None

    @classmethod
    def of(cls, case: Case, seed: int) -> Problem:
        """A case with its inputs drawn."""
        arguments = dict(zip(case.argument_names(), case.inputs(seed)))
        return cls(case.name, {**arguments, **case.extras(seed)}, case.kwargs(), case)

    # ------------------------------------------------------------------------------------------------ the call

    @property
    def kind(self) -> str:
        """ "dense", "packed" or "paged"."""
        return kind_of(self.tensors)

    @property
    def names(self) -> tuple[str, str, str]:
        """Names of the positional arguments."""
        return ("q", "k_cache", "v_cache") if self.kind == "paged" else ("q", "k", "v")

    def arguments(self) -> dict[str, Any]:
        """Everything that the call takes by keyword, `device` and `return_lse` apart."""
        options = {n: tuple(x) if isinstance(x, list) else x for n, x in self.options.items()}
        extra = {n: t for n, t in self.tensors.items() if n not in self.names}
        return {**options, **extra}

    def call(self, device: str, return_lse: bool, ones: bool = False) -> Result:
        """Run it; with `ones`, for values of 1 in place of v."""
        q, k, v = (self.tensors[n] for n in self.names)
        run = FUNCTIONS[self.kind]()
        return run(q, k, torch.ones_like(v) if ones else v, device=device, return_lse=return_lse, **self.arguments())

    def inputs_record(self) -> dict[str, Any]:
        """dtype, shape, strides and SHA-256 of every input."""
        return {
            name: {
                "dtype": str(t.dtype).removeprefix("torch."),
                "shape": list(t.shape),
                "strides": list(t.stride()),
                "sha256": fingerprint(t),
            }
            for name, t in self.tensors.items()
        }

    # ----------------------------------------------------------------------------------------------- sequences

    @property
    def heads_first(self) -> bool:
        """Whether q and out have the head axis before the sequence axis."""
        return self.options.get("layout") == "bhsd"

    @property
    def packed(self) -> bool:
        """Whether q and out are (total, heads, dim)."""
        return "cu_seqlens_q" in self.tensors

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(sequences, query heads, key heads, rows of the longest sequence)."""
        q, k = self.tensors["q"], self.tensors[self.names[1]]
        if self.packed:
            lengths = self.tensors["cu_seqlens_q"].diff()
            return len(lengths), q.shape[1], k.shape[-2], int(lengths.max()) if len(lengths) else 0
        seq, head = (2, 1) if self.heads_first else (1, 2)
        return q.shape[0], q.shape[head], k.shape[1] if self.heads_first else k.shape[-2], q.shape[seq]

    def query_rows(self, batch: int) -> slice:
        """Where the rows of a sequence lie along the sequence axis of q."""
        if not self.packed:
            return slice(0, self.sizes[3])
        starts = self.tensors["cu_seqlens_q"]
        return slice(int(starts[batch]), int(starts[batch + 1]))

    def sequence(self, batch: int, heads_q: slice, heads_k: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of some heads of one sequence, (1, heads, seq, dim), valid rows only."""
        q = self.part("out", self.tensors["q"], batch, heads_q)
        k, v = (self._keys(self.tensors[n], batch, heads_k) for n in self.names[1:])
        return q[None], k[None], v[None]

    def _keys(self, x: torch.Tensor, batch: int, heads: slice) -> torch.Tensor:
        """Keys or values of a sequence, (heads, seq, dim)."""
        t = self.tensors
        if self.heads_first:
            return x[batch, heads]
        if self.kind == "packed":
            first, last = int(t["cu_seqlens_k"][batch]), int(t["cu_seqlens_k"][batch + 1])
            last = first + int(t["seqused_k"][batch]) if "seqused_k" in t else last
            return x[first:last, heads].transpose(0, 1)
        length = int(t["cache_seqlens"][batch]) if "cache_seqlens" in t else None
        if "block_table" in t:
            assert length is not None
            pages = t["block_table"][batch, : -(-length // x.shape[1])].long()
            return x[pages][:, :, heads].flatten(0, 1)[:length].transpose(0, 1)
        return x[batch, :length, heads].transpose(0, 1)

    def part(self, name: str, x: Any, batch: int, heads: slice) -> torch.Tensor:
        """Some heads of one sequence of a result, (heads, rows, cols); LSE and mass have cols = 1.

        x : "out", like q; or "lse" or "mass", (batch, heads, seq) or (heads, total): a tensor, or a stored one that is
            read by slicing.
        """
        rows = self.query_rows(batch)
        if name == "out":
            if self.packed:
                return x[rows, heads].transpose(0, 1)
            return (
                x[batch : batch + 1, heads][0]
                if self.heads_first
                else x[batch : batch + 1, :, heads][0].transpose(0, 1)
            )
        return x[heads, rows][..., None] if self.packed else x[batch : batch + 1, heads][0][..., None]

    def mass_of(self, out: torch.Tensor) -> torch.Tensor:
        """The first column of an output in the axes of LSE."""
        column = out[..., 0]
        return column if self.heads_first and not self.packed else column.transpose(-1, -2)

    def pieces(self) -> Iterator[tuple[int, slice, slice]]:
        """(sequence, query heads, key heads): groups of whole key heads with about `_PIECE` output elements."""
        batch, heads_q, heads_k, rows = self.sizes
        if not heads_k:
            return
        group = heads_q // heads_k
        step = max(1, _PIECE // max(1, group * rows * self.tensors[self.names[2]].shape[-1]))
        for b in range(batch):
            for first in range(0, heads_k, step):
                last = min(first + step, heads_k)
                yield b, slice(first * group, last * group), slice(first, last)

    def heads_of(self, head: int) -> tuple[slice, slice]:
        """(query heads, key heads): a query head and its key head."""
        _, heads_q, heads_k, _ = self.sizes
        key_head = head // (heads_q // heads_k)
        return slice(head, head + 1), slice(key_head, key_head + 1)

    # ---------------------------------------------------------------------------------------------- references

    def golden(
        self, batch: int, heads_q: slice, heads_k: slice, dtype: torch.dtype = torch.float64
    ) -> dict[str, torch.Tensor]:
        """The reference in `dtype` for some heads: out (heads, rows, dim), lse and mass (heads, rows, 1), as float64.

        mass is what the weights of a row sum to: the output for a v of ones, computed as one more column.
        """
        q, k, v = self.sequence(batch, heads_q, heads_k)
        with_ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        out, lse = reference.attention(q, k, with_ones, dtype=dtype, **self.reference_options(heads_q, batch))
        return {"out": out[0, ..., :-1].double(), "lse": lse[0].double()[..., None], "mass": out[0, ..., -1:].double()}

    def reference_options(self, heads_q: slice, batch: int = 0) -> dict[str, Any]:
        """Keyword arguments of the reference for views (1, some query heads, seq, dim) of a sequence."""
        options = {n: x for n, x in self.options.items() if n not in _IMMATERIAL}
        extra = {n: self.tensors[n][..., heads_q] for n in HEAD_OPTIONS if n in self.tensors}
        extra = {n: t[batch] if t.dim() == 2 else t for n, t in extra.items()}
        return {**options, **extra, "layout": "bhsd"}

    def mask_options(self) -> dict[str, Any]:
        """The options that hide keys."""
        return {n: self.options[n] for n in MASK_OPTIONS if n in self.options}

    def scale(self) -> float:
        """Root mean square of v: an output is a weighted mean of v, so this is the scale of outputs. 1 if v is 0."""
        squares, count = 0.0, 0
        for batch, heads_q, heads_k in self.pieces():
            part = self.sequence(batch, heads_q, heads_k)[2]
            squares += float(part.double().square().sum())
            count += part.numel()
        return (squares / count) ** 0.5 if squares and math.isfinite(squares) else 1.0


def kind_of(tensors: dict[str, torch.Tensor]) -> str:
    """Which call tensors of these names are for: "paged", "packed" or "dense"."""
    if "k_cache" in tensors:
        return "paged"
    return "packed" if "cu_seqlens_q" in tensors else "dense"


# looked up when used, so that a test or a tool may put another implementation in place
FUNCTIONS: dict[str, Callable[[], Callable[..., Result]]] = {
    "dense": lambda: fa_multi.attention,
    "packed": lambda: fa_multi.attention_varlen,
    "paged": lambda: fa_multi.attention_paged,
}
