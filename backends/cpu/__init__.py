"""The CPU lane: the tile program itself, executed with torch. It defines what a program means."""

from __future__ import annotations

import torch

from fa_multi.plan import Plan
from fa_multi.programs.forward import forward
from fa_multi.roles import cut
from fa_multi.spec import AttentionSpec

from .. import Launch, Lowered
from .interpreter import execute

# A score tile of this many elements, over all tasks in flight, stays in the second-level cache.
TILE_ELEMENTS = 1 << 20
BLOCK_M, BLOCK_N = 256, 512


class CpuBackend:
    """Executes tile programs with torch on the CPU; every spec, float32 included."""

    name = "cpu"

    def supports(self, spec: AttentionSpec, arch: str | None = None) -> str | None:
        return None

    def unavailable(self) -> str | None:
        return None

    def plan(self, spec: AttentionSpec, arch: str | None = None) -> Plan:
        return self._plan(spec, BLOCK_M, BLOCK_N)

    def _plan(self, spec: AttentionSpec, block_m: int, block_n: int) -> Plan:
        return Plan(block_m, block_n, spec.head_dim, spec.head_dim_v)

    def lower(self, spec: AttentionSpec, arch: str | None = None) -> Lowered:
        plan = self.plan(spec)
        program = forward(spec, plan)
        return Lowered(program, cut(program, plan, lambda op: "all", "shared"), str(program), "program")

    def prepare(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Launch:
        # Nothing is compiled here, so tiles need not be larger than the problem.
        program = forward(spec, self._plan(spec, min(q.shape[1], BLOCK_M), min(k.shape[1], BLOCK_N)))

        def launch(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
        ) -> None:
            sizes = {
                "batch": q.shape[0],
                "seqlen_q": q.shape[1],
                "heads_q": q.shape[2],
                "seqlen_k": k.shape[1],
                "heads_k": k.shape[2],
            }
            tensors = {"q": q, "k": k, "v": v, "out": out}
            if lse is not None:
                tensors["lse"] = lse
            execute(program, sizes, tensors, TILE_ELEMENTS)

        return launch


backend = CpuBackend()
