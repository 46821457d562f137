"""Backends, one room per machine. All import on a machine that has neither device nor DSL.

A lane is where an attention call runs: "cpu", "cuda", "npu" or "npu-sim" (the Ascend kernel in the CPU simulator).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fa_multi.plan import Plan
from fa_multi.programs import Spec
from fa_multi.roles import Roles
from fa_multi.spec import AttentionSpec
from fa_multi.tiles import Program

# launch(*tensors): the tensors of the spec's program (`programs.tensors`), in that order: inputs, then results. q, k, v
# and out have a unit last stride and any other strides; all sizes are at least 1.
Launch = Callable[..., None]


@dataclass(frozen=True)
class Lowered:
    """A spec on its way to a device. `program`: the tile program; `roles`: its roles and channels; `source`: the kernel
    text that runs; `form`: which form of the backend it is ("program", "roles", "portable", "cores")."""

    program: Program
    roles: Roles
    source: str
    form: str


@dataclass(frozen=True)
class Work:
    """What there is to do against a cache, as far as the host knows: up to `queries` queries and `keys` keys for each
    of `batch` sequences. foldable: do the key heads of consecutive positions lie one after the other?"""

    batch: int
    queries: int
    keys: int
    heads_q: int
    heads_k: int
    foldable: bool

    def tasks(self, spec: AttentionSpec, block_m: int) -> int:
        """Tasks of `spec` in blocks of `block_m` rows, before the keys are split."""
        tiled = 1 if spec.addressing.fold_heads > 1 else self.heads_k if spec.addressing.pack_group else self.heads_q
        return self.batch * tiled * -(-self.queries * (self.heads_q // tiled) // block_m)


class Backend(Protocol):
    """What every lane offers. All but `prepare` work on any machine."""

    name: str

    def supports(self, spec: Spec, arch: str | None = None) -> str | None:
        """None, or in one line why this lane has no kernel for the spec."""

    def unavailable(self) -> str | None:
        """None, or in one line why this machine cannot run the lane, with the remedy."""

    def plan(self, spec: Spec, arch: str | None = None) -> Plan:
        """Tile sizes and overlap for an architecture."""

    def divide(
        self, spec: AttentionSpec, work: Work, splits: int, arch: str | None = None
    ) -> tuple[AttentionSpec, int]:
        """The spec in the addressing that suits the work best, and how many tasks share the keys of a row: `splits`, or
        a choice where that is 0."""

    def lower(self, spec: Spec, arch: str | None = None) -> Lowered:
        """Program, roles and kernel text for an architecture (the lane's default if None)."""

    def prepare(self, spec: Spec, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Launch:
        """A launcher for inputs of these shapes, strides and alignment; compiles or loads what it needs. `sizes`: the
        run-time sizes that no tensor's shape gives."""


LANES = {
    "cpu": ("fa_multi.backends.cpu", "backend"),
    "cuda": ("fa_multi.backends.cuda", "backend"),
    "npu": ("fa_multi.backends.ascend", "device"),
    "npu-sim": ("fa_multi.backends.ascend", "simulated"),
}


def get(lane: str) -> Backend:
    """The backend of a lane; KeyError names an unknown one."""
    module, attribute = LANES[lane]
    backend: Backend = getattr(importlib.import_module(module), attribute)
    return backend
