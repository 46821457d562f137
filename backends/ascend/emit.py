"""Kernel text in the tilelang-ascend DSL, printed from the roles of a program.

Expert mode: explicit scopes, buffers with pinned addresses, flags; no pass of the compiler adds any. The kernel's
arguments are the program's tensors as `views.py` declares them, the rings of the channels as
`ring_x: T.Tensor([cores, depth, rows, columns])`, and the run-time sizes of the program as int32 scalars.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_multi.roles import Roles
from fa_multi.tiles import Program

from . import hazards
from .instructions import If, Instr, Loop, Node, lines
from .limits import CROSS_FLAGS, OUTSTANDING, LimitError
from .lowering import RoleCode, lower_roles, ring_name
from .views import text, views

BUILDER = "build"  # the module-level function of the printed text
_ALLOC = {"L1": "alloc_L1", "L0C": "alloc_L0C", "UB": "alloc_ub"}
_SCOPE = {"cube": "C", "vector": "V"}


def emit(roles: Roles, target: str = "pto") -> str:
    """The kernel as a Python module whose `build()` returns the T.prim_func.

    roles: cut with memory "global" into "cube" and "vector". target: the C++ it is meant for, "pto" or "ascendc" (they
    differ in how a row vector is broadcast). Raises LimitError or HazardError; the text is only printed when the proof
    of `hazards.verify` holds.
    """
    _check_channels(roles)
    codes = lower_roles(roles, target)
    return "\n".join(_module(roles, codes)) + "\n"


def scheduled(code: RoleCode, roles: Roles) -> list[Node]:
    """A role's whole life on one core, with flags and barriers, and proven."""
    task: list[Node] = [If("rows > 0", code.task)] if roles.program.ragged is not None else code.task
    loop = Loop(
        "t", f"(tasks - cid + {roles.plan.cores - 1}) // {roles.plan.cores}", _decode(roles.program, roles) + task
    )
    nodes = hazards.insert([*code.before, loop, *code.after])
    hazards.verify(nodes)
    return nodes


def _check_channels(roles: Roles) -> None:
    if roles.plan.cores < 1:
        raise LimitError("plan.cores is 0; an Ascend kernel is a persistent loop over a number of cores")
    if 2 * len(roles.channels) > CROSS_FLAGS:
        raise LimitError(
            f"{len(roles.channels)} channels need {2 * len(roles.channels)} cross-core flags, there are {CROSS_FLAGS}"
        )
    for c in roles.channels:
        if c.depth // c.signal_interval > OUTSTANDING:
            raise LimitError(
                f"channel {c.tile}: {c.depth // c.signal_interval} free signals can be outstanding, the "
                f"hardware counts to {OUTSTANDING}; use a smaller depth or a larger signal_interval"
            )


def _decode(program: Program, roles: Roles) -> list[Node]:
    """Task number -> axes, the last one fastest and from its end (longest first under a causal mask); task scalars."""
    nodes: list[Node] = [Instr(f"task = cid + t * {roles.plan.cores}")]
    for n, (axis, extent) in enumerate(reversed(program.axes)):
        size = f"({text(extent)})"
        last = n + 1 == len(program.axes)
        nodes.append(Instr(f"{axis} = {'task' if last else f'task % {size}'}"))
        if not n:
            nodes.append(Instr(f"{axis} = {size} - 1 - {axis}"))
        if not last:
            nodes.append(Instr(f"task = task // {size}"))
    return nodes + [Instr(f"{name} = {text(value)}") for name, value in program.lets]


def _module(roles: Roles, codes: list[RoleCode]) -> Iterator[str]:
    program, plan = roles.program, roles.plan
    yield f'"""{program.name}: {plan}."""'
    yield ""
    yield "from tilelang import language as T"
    yield ""
    yield ""
    yield f"def {BUILDER}():"
    for view in views(program).values():
        for name in view.symbols():
            yield f'    {name} = T.symbolic("{name}")'
    yield ""
    yield "    @T.prim_func"
    yield "    def main("
    yield from (f"        {line}," for line in _parameters(roles))
    yield "    ):"
    yield f"        with T.Kernel({plan.cores}, is_npu=True) as (cid, vid):"
    buffers = [b for code in codes for b in code.buffers]
    for b in buffers:
        yield f'            {b.name} = T.{_ALLOC[b.memory]}({list(b.shape)}, "{b.dtype}")'
    yield f"            T.annotate_address({{{', '.join(f'{b.name}: {b.offset}' for b in buffers)}}})"
    for name, dtype in _locals(program, codes).items():
        yield f'            {name} = T.alloc_var("{dtype}", init={0 if dtype == "int32" else 0.0})'
    yield f"            tasks = {' * '.join(f'({text(n)})' for _, n in program.axes)}"
    for code in codes:
        yield f'            with T.Scope("{_SCOPE[code.role]}"):'
        yield "                base = 0"
        yield from lines(_spaced(scheduled(code, roles)), 4)
    yield ""
    yield "    return main"


def _spaced(nodes: list[Node]) -> list[Node]:
    """Drop branches that became empty."""
    return [n for n in nodes if not isinstance(n, (If, Loop)) or n.body]


def _parameters(roles: Roles) -> Iterator[str]:
    program, plan = roles.program, roles.plan
    for view in views(program).values():
        yield view.declaration()
    for c in roles.channels:
        shape = [plan.cores, c.depth, *c.tile.shape]
        yield f'{ring_name(c)}: T.Tensor({shape}, "{c.tile.dtype}")'
    for name in program.sizes():
        yield f"{name}: T.int32"


def _locals(program: Program, codes: list[RoleCode]) -> dict[str, str]:
    names = ["task", *(v.name for v, _ in program.axes), *(v.name for v, _ in program.lets), "base"]
    return dict.fromkeys(names, "int32") | {n: dtype for code in codes for n, dtype in code.locals}
