"""The CPU lane: the tile program itself, executed with torch. It defines what a program means."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fa_multi.plan import Plan
from fa_multi.programs import CombineSpec, Spec, build, tensors
from fa_multi.roles import cut
from fa_multi.scalars import Var
from fa_multi.spec import AttentionSpec

from .. import Launch, Lowered, Work
from .interpreter import execute

# A score tile of this many elements, over all tasks in flight, stays in the second-level cache.
TILE_ELEMENTS = 1 << 20
BLOCK_M, BLOCK_N = 256, 512


class CpuBackend:
    """Executes tile programs with torch on the CPU; every spec, float32 included."""

    name = "cpu"

    def supports(self, spec: Spec, arch: str | None = None) -> str | None:
        return None

    def unavailable(self) -> str | None:
        return None

    def plan(self, spec: Spec, arch: str | None = None) -> Plan:
        return self._plan(spec, BLOCK_M, BLOCK_N)

    def divide(
        self, spec: AttentionSpec, work: Work, splits: int, arch: str | None = None
    ) -> tuple[AttentionSpec, int]:
        return spec, splits or 1  # every core is busy with one task already

    def _plan(self, spec: Spec, block_m: int, block_n: int) -> Plan:
        dim = spec.head_dim
        return Plan(block_m, block_n, dim, dim if isinstance(spec, CombineSpec) else spec.head_dim_v)

    def lower(self, spec: Spec, arch: str | None = None) -> Lowered:
        plan = self.plan(spec)
        program = build(spec, plan)
        return Lowered(program, cut(program, plan, lambda op: "all", "shared"), str(program), "program")

    def prepare(self, spec: Spec, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Launch:
        # Nothing is compiled here, so tiles need not be larger than the problem.
        rows = inputs["q"].shape[1] if "q" in inputs else BLOCK_M
        keys = inputs["k"].shape[1] if "k" in inputs and "block_table" not in inputs else BLOCK_N
        program = build(spec, self._plan(spec, min(max(rows, 1), BLOCK_M), min(max(keys, 1), BLOCK_N)))
        arguments = tensors(spec)

        def launch(*values: torch.Tensor) -> None:
            known = dict(sizes)
            for tensor, x in zip(arguments.values(), values):
                known.update((n.name, x.shape[i]) for i, n in enumerate(tensor.shape) if isinstance(n, Var))
            execute(program, known, dict(zip(arguments, values)), TILE_ELEMENTS)

        return launch


backend = CpuBackend()
