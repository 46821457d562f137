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


class Backend(Protocol):
    """What every lane offers. All but `prepare` work on any machine."""

    name: str

    def supports(self, spec: Spec, arch: str | None = None) -> str | None:
        """None, or in one line why this lane has no kernel for the spec."""

    def unavailable(self) -> str | None:
        """None, or in one line why this machine cannot run the lane, with the remedy."""

    def plan(self, spec: Spec, arch: str | None = None) -> Plan:
        """Tile sizes and overlap for an architecture."""

    def choose_splits(self, spec: Spec, rows: int, keys: int) -> int:
        """Tasks that should share the keys of a row, for `rows` rows of queries over batch and heads (each task's block
        counted as full) and up to `keys` keys each."""

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
