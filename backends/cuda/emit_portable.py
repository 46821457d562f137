"""The portable form: one role, a block of threads per task, pipelined loops, and no instruction that only one
architecture has. It takes any strides, so it also serves Hopper where TMA does not."""

from __future__ import annotations

from fa_multi.plan import Plan
from fa_multi.scalars import Const, Scalar
from fa_multi.tiles import Cast, Load, Loop, MaskTile, Mma, Op, Program, Store, Tile

from . import emit_ops as ops
from . import transfers
from .printing import Lines, Names, bracketed, scalar_text

THREADS = 128
UNROLL, UNROLL_ROW = 8, 16  # trips of a loop without products (of one row): so many loads are under way at once
HEADER = '''"""{title}

Portable form: one block of threads per task. Generated; the tile program it comes from:

{program}
"""

import tilelang.language as T

PASS_CONFIGS = {{"tl.enable_fast_math": True, "tl.disable_warp_specialized": True, "tl.disable_tma_lower": True}}


'''


def emit(program: Program, plan: Plan, aligned: bool, follows: bool) -> str:
    """The kernel module of the portable form. `aligned`: every pointer and stride is a multiple of 16 bytes, so rows
    can be copied 16 bytes at a time; else element by element. `follows`: see `emit_ops.FOLLOW`; from sm_90 on."""
    return _Kernel(program, plan, aligned, follows).text()


class _Kernel:
    def __init__(self, program: Program, plan: Plan, aligned: bool, follows: bool) -> None:
        self.program, self.plan, self.aligned, self.follows = program, plan, aligned, follows
        self.lines = Lines()
        self.shared = ops.operands(program)
        self.staging = ops.staging(program)
        self.fragments = ops.fragments(program)
        self.count = " * ".join(bracketed(scalar_text(n, {})) for _, n in program.axes)
        self.scalars = ops.TaskScalars(program, {v.name for v, _ in program.axes})

    def text(self) -> str:
        lines, program = self.lines, self.program
        with lines.block("def build():"):
            ops.declare_dynamic(lines, program)
            lines.add("full_row = T.GemmWarpPolicy.FullRow", "", "@T.prim_func", "def main(")
            lines.add(*(f"    {a}," for a in ops.arguments(program)))
            with lines.block("):"), lines.block(f"with T.Kernel({self.count}, threads={THREADS}) as task:"):
                self.body()
            lines.add("", "return main")
        return HEADER.format(title=program.name, program=program) + lines.text()

    def body(self) -> None:
        lines = self.lines
        lines.add(*(ops.FOLLOW if self.follows else ()))
        for tensor in self.program.tensors if self.aligned else ():
            ops.assume_aligned(lines, tensor)
        for t in self.shared:
            lines.add(f'{t} = T.alloc_shared(({_shape(t)}), "{t.dtype}")')
        for t in self.fragments:
            lines.add(f'{t} = T.alloc_fragment(({_shape(t)}), "{t.dtype}")')
        for fill in self.program.fills:
            transfers.fill_rows(lines, fill, "T.get_thread_binding()", THREADS, "task", self.count)
        transfers.declare_divided_rows(lines, self.program)
        self.decode()
        self.scalars.require(lines, [v for v, _ in self.program.lets], '{name} = T.alloc_var("int32", init={value})')
        if self.program.ragged is not None:
            with lines.block("if rows > 0:"):
                self.steps()
        else:
            self.steps()

    def decode(self) -> None:
        """Axes from the task number, the last running fastest. A block of rows counts down: late blocks see the most
        keys under a causal mask, and the longest task should not start last."""
        lines, rest = self.lines, "task"
        for n, (v, extent) in enumerate(reversed(self.program.axes)):
            if n == len(self.program.axes) - 1:
                lines.add(f'{v} = T.alloc_var("int32", init={rest})')
                break
            size = f"{v}_count"
            lines.add(f'{size} = T.alloc_var("int32", init={scalar_text(extent, {})})')
            lines.add(f'over_{v} = T.alloc_var("int32", init=T.truncdiv({rest}, {size}))')
            lines.add(f'{v} = T.alloc_var("int32", init={rest} - over_{v} * {size})')
            if v.name == "i":
                lines.add(f"{v} = {size} - 1 - {v}")
            rest = f"over_{v}"

    def steps(self) -> None:
        for op in self.program.body:
            if isinstance(op, Loop):
                start: Scalar = Const(0)
                for phase in op.phases:
                    self.phase(op, start, phase.stop, phase.masked)
                    start = phase.stop
            else:
                self.step(op, {})

    def phase(self, loop: Loop, start: Scalar, stop: Scalar, masked: bool) -> None:
        """One loop per phase, so that only masked tiles pay for the mask."""
        lines = self.lines
        first, last = scalar_text(start, {}), scalar_text(stop, {})
        trips = last if start == Const(0) else f"T.max({last} - ({first}), 0)"
        lines.add(f"# {'masked' if masked else 'wholly visible'} tiles")
        pipelined = any(isinstance(op, Mma) for op in loop.body)
        factor = UNROLL_ROW if self.plan.block_m == 1 else UNROLL
        header = f"T.Pipelined({trips}, num_stages=1)" if pipelined else f"T.unroll({trips}, unroll_factor={factor})"
        with lines.block(f"for t in {header}:"):
            lines.add(f"{loop.var} = t" + ("" if start == Const(0) else f" + {first}"))
            for op in loop.body:
                if masked or not isinstance(op, MaskTile):
                    self.step(op, {})

    def step(self, op: Op, names: Names) -> None:
        lines = self.lines
        if isinstance(op, Load):
            self.load(op, names)
        elif isinstance(op, Store):
            self.store(op, names)
        elif isinstance(op, Mma):
            options = ", transpose_B=True" if op.transpose_b else ""
            options += ", policy=full_row" + ("" if op.accumulate else ", clear_accum=True")
            lines.add(f"T.gemm({op.a}, {op.b}, {op.dst}{options})")
        elif isinstance(op, Cast) and op.dst not in self.fragments:
            if self.whole(op.dst):
                lines.add(f"T.copy({op.src}, {self.staging[op.dst]})")
        else:
            ops.print_tile_op(lines, op, names)

    def load(self, op: Load, names: Names) -> None:
        if transfers.is_plain(op.src, op.dst, self.program):
            self.lines.add(f"T.copy({transfers.block_text(op.src, op.dst, names)}, {op.dst}, disable_tma=True)")
        else:
            transfers.load_elements(self.lines, op, names)

    def whole(self, result: Tile) -> bool:
        """Does the result leave through shared memory of its own width?"""
        return result in self.staging and self.staging[result].shape == result.shape

    def store(self, op: Store, names: Names) -> None:
        rounded = next((o.src for o in self.program.body if isinstance(o, Cast) and o.dst == op.src), op.src)
        source = self.staging[op.src] if self.whole(op.src) else rounded
        if transfers.is_plain(op.dst, op.src, self.program):
            self.lines.add(f"T.copy({source}, {transfers.block_text(op.dst, op.src, names)}, disable_tma=True)")
        else:
            transfers.store_elements(self.lines, op, source.name, names)


def _shape(tile: Tile) -> str:
    return ", ".join(map(str, tile.shape)) + ("," if len(tile.shape) == 1 else "")
