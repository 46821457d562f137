"""The operators, each one tile program built from a spec and a plan."""

from __future__ import annotations

from typing import Union

from ..addressing import tensors as attention_tensors
from ..plan import Plan
from ..spec import AttentionSpec
from ..tiles import Program, Tensor
from .combine import CombineSpec, combine, combine_tensors
from .forward import forward

Spec = Union[AttentionSpec, CombineSpec]

__all__ = ["CombineSpec", "Spec", "build", "combine", "forward", "tensors"]


def build(spec: Spec, plan: Plan) -> Program:
    """The program of a spec."""
    return combine(spec, plan) if isinstance(spec, CombineSpec) else forward(spec, plan)


def tensors(spec: Spec) -> dict[str, Tensor]:
    """The tensors of a spec's program by name, in the order in which a launch takes them."""
    return combine_tensors(spec) if isinstance(spec, CombineSpec) else attention_tensors(spec)
