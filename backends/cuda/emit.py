"""From a spec to kernel text: the program is built, cut into roles, checked, and printed in the form that fits."""

from __future__ import annotations

import functools
from dataclasses import replace

from fa_multi.check import check
from fa_multi.overlap import overlap
from fa_multi.programs import Spec, build
from fa_multi.roles import Roles, cut
from fa_multi.spec import AttentionSpec
from fa_multi.tiles import Load, Loop, Program

from .. import Lowered
from . import emit_ops, emit_portable, emit_roles, limits, planner, transfers


@functools.lru_cache(maxsize=256)
def lower_roles(spec: AttentionSpec, plan: planner.CudaPlan | None = None) -> Lowered:
    """The role form (Hopper), with the planner's plan unless another is given."""
    plan = plan or planner.roles_plan(spec)
    program = build(spec, plan)
    roles = cut(program, plan, functools.partial(planner.role_of, plan), memory="shared", skew={"compute": plan.skew})
    compute = overlap(roles.role("compute"), plan.late_rescale)
    roles = replace(roles, roles=tuple(compute if r.role == "compute" else r for r in roles.roles))
    depth = {c.tile: c.depth for c in roles.channels}
    limits.check_shared(((t, depth.get(t, 1)) for t in emit_ops.operands(program)), limits.ROLES_ARCH)
    check(roles)
    return Lowered(program, roles, emit_roles.emit(roles), "roles")


@functools.lru_cache(maxsize=256)
def lower_portable(spec: Spec, arch: str, aligned: bool) -> Lowered:
    """The portable form. `aligned`: see `emit_portable.emit`."""
    plan = planner.portable_plan(spec, arch)
    program = build(spec, plan)
    limits.check_shared(((t, 1) for t in emit_ops.operands(program)), arch)
    roles = _one_role(program, plan)
    return Lowered(program, roles, emit_portable.emit(program, plan, aligned, limits.follows(arch)), "portable")


def lower(spec: Spec, arch: str, aligned: bool = True, tma: bool = True) -> Lowered:
    """The best form for an architecture. `tma`: TMA takes the tensors; `aligned`: see `emit_portable.emit`."""
    if tma and has_roles(spec, arch):
        assert isinstance(spec, AttentionSpec)
        return lower_roles(spec)
    return lower_portable(spec, arch, aligned)


def _one_role(program: Program, plan: planner.Plan) -> Roles:
    return cut(program, plan, lambda op: "all", memory="shared")


def has_roles(spec: Spec, arch: str) -> bool:
    """Is there a role form? It needs Hopper's instructions, and a loop whose loads are boxes that TMA copies."""
    if arch != limits.ROLES_ARCH or not isinstance(spec, AttentionSpec):
        return False
    loop = next(op for op in build(spec, planner.roles_plan(spec)).body if isinstance(op, Loop))
    return all(transfers.box_rows(op.src, op.dst) for op in loop.body if isinstance(op, Load))
