"""One attention call to be compared: its tensors and options, cut by heads so that large cases need little memory."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

import fa_multi

from .. import reference
from ..cases import Case
from ..random import fingerprint

# Options that only hide keys: without them every key is visible.
MASK_OPTIONS = ("causal", "window_size", "block_causal")
# Tensors whose last axis is the query head.
HEAD_OPTIONS = ("sink", "alibi_slopes")
# Options that add something to a score by where its row stands.
POSITION_OPTIONS = ("alibi_slopes",)
# Elements of one piece; the float64 temporaries of a comparison are a small multiple of it.
_PIECE = 1 << 21


@dataclass
class Problem:
    """tensors: q, k, v in the layout that `options` names, and further tensors that are keyword arguments of
    `fa_multi.attention`. options: its other keyword arguments (JSON values). case: the case, if it is one."""

    name: str
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    case: Case | None = None

    @classmethod
    def of(cls, case: Case, seed: int) -> Problem:
        """A case with its inputs drawn."""
        q, k, v = case.inputs(seed)
        return cls(case.name, {"q": q, "k": k, "v": v}, case.kwargs(), case)

    @property
    def layout(self) -> str:
        return str(self.options.get("layout", "bshd"))

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.tensors["q"], self.tensors["k"], self.tensors["v"]

    def extra(self) -> dict[str, torch.Tensor]:
        """Tensors that are passed by keyword."""
        return {n: t for n, t in self.tensors.items() if n not in ("q", "k", "v")}

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """A view (batch, heads, seq, dim) of a tensor in the problem's layout."""
        return x.transpose(1, 2) if self.layout == "bshd" else x

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(batch, heads_q, heads_k, seqlen_q)."""
        q, k = self.by_head(self.tensors["q"]), self.by_head(self.tensors["k"])
        return q.shape[0], q.shape[1], k.shape[1], q.shape[2]

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

    def pieces(self) -> Iterator[tuple[int, slice, slice]]:
        """(batch entry, query heads, key heads): groups of whole key heads with about `_PIECE` output elements."""
        batch, heads_q, heads_k, rows = self.sizes
        if not heads_k:
            return
        group = heads_q // heads_k
        each = max(1, group * rows * self.tensors["v"].shape[-1])
        step = max(1, _PIECE // each)
        for b in range(batch):
            for first in range(0, heads_k, step):
                last = min(first + step, heads_k)
                yield b, slice(first * group, last * group), slice(first, last)

    def golden(
        self, batch: int, heads_q: slice, heads_k: slice, dtype: torch.dtype = torch.float64
    ) -> dict[str, torch.Tensor]:
        """The reference in `dtype` for some heads: out (heads, rows, dim), lse and mass (heads, rows, 1), as float64.

        mass is what the weights of a row sum to: the output for a v of ones, computed as one more column.
        """
        q, k, v = (self.by_head(t)[batch : batch + 1] for t in self.qkv())
        q, k, v = q[:, heads_q], k[:, heads_k], v[:, heads_k]
        with_ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        out, lse = reference.attention(q, k, with_ones, dtype=dtype, **self.reference_options(heads_q, batch))
        return {"out": out[0, ..., :-1].double(), "lse": lse[0].double()[..., None], "mass": out[0, ..., -1:].double()}

    def reference_options(self, heads_q: slice, batch: int = 0) -> dict[str, Any]:
        """Keyword arguments of the reference for views (1, some query heads, seq, dim)."""
        extra = {n: t[..., heads_q] if n in HEAD_OPTIONS else t for n, t in self.extra().items()}
        extra |= {n: t[batch] for n, t in extra.items() if n in HEAD_OPTIONS and t.dim() == 2}
        return {**self.options, **extra, "layout": "bhsd"}

    def scale(self) -> float:
        """Root mean square of v: an output is a weighted mean of v, so this is the scale of outputs. 1 if v is 0."""
        squares, count = 0.0, 0
        for part in self.by_head(self.tensors["v"]).unbind(0):
            squares += float(part.double().square().sum())
            count += part.numel()
        return (squares / count) ** 0.5 if squares and math.isfinite(squares) else 1.0


def load_inputs(path: Path, options: Mapping[str, Any]) -> list[Problem]:
    """Problems from a safetensors file saved from a user's model.

    Tensors named q, k, v, or NAME.q, NAME.k, NAME.v for several calls in one file; further tensors (lengths, tables,
    sink) under the names of the keyword arguments of `fa_multi.attention`. Options come from the file's metadata (JSON
    values by argument name) and from `options`, which wins. Raises ValueError naming what is missing or not an argument.
    """
    groups: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(str(path), framework="pt") as f:
            metadata = f.metadata() or {}
            for key in f.keys():  # noqa: SIM118
                prefix, tensor = ("", key) if not re.search(r"[./]", key) else re.split(r"[./](?=[^./]*$)", key)
                groups.setdefault(prefix, {})[tensor] = f.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--inputs {str(path)!r} cannot be read as safetensors: {error}") from None
    if not groups:
        raise ValueError(f"--inputs {str(path)!r} has no tensors; it must have q, k and v")
    accepted = set(inspect.signature(fa_multi.attention).parameters) - {"return_lse", "device", "out", "lse"}
    chosen = {**{n: parse_option(v) for n, v in metadata.items() if n in accepted}, **options}
    for name in chosen:
        if name not in accepted - {"q", "k", "v"}:
            raise ValueError(
                f"--set {name}: not an option; options are {', '.join(sorted(accepted - {'q', 'k', 'v'}))}"
            )
    return [_problem(path, prefix, tensors, chosen, accepted) for prefix, tensors in groups.items()]


def _problem(
    path: Path, prefix: str, tensors: dict[str, torch.Tensor], options: dict[str, Any], accepted: set[str]
) -> Problem:
    missing = [n for n in ("q", "k", "v") if n not in tensors]
    if missing:
        where = f" under {prefix!r}" if prefix else ""
        raise ValueError(f"--inputs {str(path)!r} has no tensor {missing[0]!r}{where}; it has {', '.join(tensors)}")
    unknown = [n for n in tensors if n not in accepted]
    if unknown:
        raise ValueError(
            f"--inputs {str(path)!r}: {unknown[0]!r} is not an argument of fa_multi.attention, "
            f"which takes {', '.join(sorted(accepted))}"
        )
    return Problem(re.sub(r"[^\w.-]", "_", prefix or path.stem, flags=re.ASCII), tensors, dict(options))


def parse_option(text: str) -> Any:
    """An option's value: JSON, or the text itself where it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
