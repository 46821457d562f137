"""Run emitted kernels: in the CPU simulator ("npu-sim"), or on an Ascend NPU ("npu")."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from fa_multi.cache import store_text
from fa_multi.plan import Plan
from fa_multi.programs import Spec
from fa_multi.roles import Roles
from fa_multi.scalars import Var
from fa_multi.spec import AttentionSpec

from .. import Launch, Lowered, Work
from . import compiler, limits, planner, toolchain
from .emit import BUILDER, emit
from .lowering import ring_name
from .simulator.build import Param, load, parse_params
from .views import View, views

log = logging.getLogger(__name__)
TARGET = "pto"  # the C++ that the simulator runs; the same goes to the NPU


def lower(spec: Spec, arch: str) -> Lowered:
    """Program, roles and kernel text. Raises LimitError with the reason when there is no kernel for the spec."""
    roles = planner.planned(spec, arch)
    return Lowered(roles.program, roles, _source(spec, arch), "cores")


@functools.lru_cache(maxsize=256)
def _source(spec: Spec, arch: str) -> str:
    return emit(planner.planned(spec, arch), TARGET)


class AscendBackend:
    """What both Ascend lanes share: device-free planning and printing."""

    name = ""
    arch = ""

    def supports(self, spec: Spec, arch: str | None = None) -> str | None:
        return planner.refusal(spec)

    def plan(self, spec: Spec, arch: str | None = None) -> Plan:
        reason = planner.refusal(spec)
        if reason:
            raise ValueError(reason)
        return planner.planned(spec, arch or self.arch).plan

    def divide(
        self, spec: AttentionSpec, work: Work, splits: int, arch: str | None = None
    ) -> tuple[AttentionSpec, int]:
        return spec, splits or planner.choose_splits(spec, arch or self.arch, work)

    def lower(self, spec: Spec, arch: str | None = None) -> Lowered:
        return lower(spec, arch or self.arch)


class Simulated(AscendBackend):
    """The Ascend kernel in the vendor's CPU simulator: one cube and two vector threads per core, real flags."""

    name = "npu-sim"
    arch = "sim"

    def unavailable(self) -> str | None:
        return toolchain.status().reason

    def prepare(self, spec: Spec, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Launch:
        lowered = self.lower(spec)
        name = lowered.program.name
        kernel = load(compiler.lower(lowered.source, BUILDER, TARGET, name=name), name)
        roles, cores = lowered.roles, lowered.roles.plan.cores

        def launch(*tensors: torch.Tensor) -> None:
            call = Call(roles, tensors, sizes)
            # NaN everywhere that nothing wrote yet: a kernel that reads it shows
            rings = [torch.full(shape, float("nan"), dtype=dtype) for shape, dtype in ring_shapes(roles)]
            kernel.run(cores, *call.arguments(kernel.params, rings))
            call.finish()

        return launch


class Device(AscendBackend):
    """The same text on an NPU, through tilelang-ascend and torch_npu. Never run on hardware by its authors."""

    name = "npu"
    arch = "a2"

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed; use a machine with an Ascend NPU, or device='npu-sim'"
        if toolchain.compiler_home() is None:
            return f"tilelang-ascend is not importable; run: pip install tilelang-ascend=={toolchain.COMPILER_VERSION}"
        import torch_npu

        if torch_npu.npu.is_available():
            return None
        return "torch_npu finds no NPU; check the driver, or use device='npu-sim'"

    def prepare(self, spec: Spec, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Launch:
        import torch_npu

        lowered = self.lower(spec)
        entry, params = _compile_for_device(lowered.source, lowered.program.name)
        roles = lowered.roles
        where = next((x.device for x in inputs.values()), None)  # without inputs there is no ring either
        rings = [torch.empty(shape, dtype=dtype, device=where) for shape, dtype in ring_shapes(roles)]

        def launch(*tensors: torch.Tensor) -> None:
            call = Call(roles, tensors, sizes)
            arrays, scalars = call.arguments(params, rings)
            pointers, numbers = iter(arrays), iter(scalars)
            arguments = [
                ctypes.c_void_p(next(pointers).data_ptr())
                if p.kind == "tensor"
                else (ctypes.c_int64 if "64" in p.ctype else ctypes.c_int32)(next(numbers))
                for p in params
            ]
            entry(*arguments, ctypes.c_void_p(torch_npu.npu.current_stream().npu_stream))
            call.finish()

        return launch


@functools.lru_cache(maxsize=256)
def _compile_for_device(source: str, name: str) -> tuple[Callable[..., int], list[Param]]:
    """(C entry point, its parameters). The wrapper that tilelang makes takes run-time sizes from tensor shapes; ours
    are strides, so its library is called directly."""
    import tilelang

    path = store_text("ascend", name, source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = tilelang.compile(getattr(module, BUILDER)(), target=TARGET, pass_configs=compiler.PASS_CONFIGS)
    _, params = parse_params(kernel.get_kernel_source())
    return kernel.adapter.lib.call, params


# ---- arguments ------------------------------------------------------------------------------------------------------


def ring_shapes(roles: Roles) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every channel's ring in device memory, in the order of the kernel's arguments."""
    return [((roles.plan.cores, c.depth, *c.tile.shape), getattr(torch, c.tile.dtype)) for c in roles.channels]


ROW_COUNTS = ("seqlen_q", "seqlen_k", "max_seqlen_q", "total_q", "total_k")  # sizes that count rows


class Call:
    """One call's tensors and sizes as kernel arguments, by the names that `views.py` declares.

    tensors: those of the program, in its order, with a unit last stride; log-sum-exps contiguous.
    sizes: run-time sizes that no tensor's shape gives.
    Raises LimitError where sizes or strides do not fit the kernel's index arithmetic.
    """

    def __init__(self, roles: Roles, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]):
        self.roles = roles
        self.tensors: dict[str, torch.Tensor] = {}
        self.copied_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.numbers: dict[str, int] = dict(sizes)
        program = roles.program
        for declared, t in zip(program.tensors, tensors, strict=True):
            self.numbers |= {n.name: t.shape[i] for i, n in enumerate(declared.shape) if isinstance(n, Var)}
        self.views = views(program)
        for view, t in zip(self.views.values(), tensors):
            self._bind(view, t)
        for fill in program.fills:  # all rows: where the last sequence ends is known on the device alone
            self.tensors[fill.tensor.name].fill_(fill.value)
        rows = {name: self.numbers[name] for name in ROW_COUNTS if name in self.numbers}
        for declared in program.tensors:
            if declared.name == "block_table":
                rows["block_table"] = self._table_rows()
        limits.check_sizes(self.numbers, math.prod(n.eval(self.numbers) for _, n in program.axes), rows)

    def _table_rows(self) -> int:
        """Positions that a row of the block table has room for."""
        size = next(v for v in self.views.values() if "slot" in v.tensor.dims).tensor.shape[1].eval(self.numbers)
        return int(size) * self.numbers["table_width"]

    def _bind(self, view: View, t: torch.Tensor) -> None:
        name = view.tensor.name
        if view.form == "window":
            self._bind_window(view, t)
            return
        self.tensors[name] = t
        if view.form == "numbers" and t.dim() == 2:
            self.numbers |= {f"{name}_rows": t.shape[0], f"{name}_pitch": t.stride(0)}
        else:
            limits.check_flat(name, t.numel())
            self.numbers[f"{name}_len"] = t.numel()

    def _bind_window(self, view: View, t: torch.Tensor) -> None:
        name, dims = view.tensor.name, view.tensor.dims
        at = dims.index(view.row_axis)
        t = self.tensors[name] = self._addressable(view, t, at)
        strides = {d: t.stride(i) for i, d in enumerate(dims) if d != "dim"}
        if t.shape[at] == 1:  # the pitch of a single row is free, so make it wide enough
            strides[view.row_axis] = max(strides[view.row_axis], view.columns)
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
        limits.check_window(name, strides, view.row_axis, view.columns, span)
        self.numbers |= {view.stride(d): s for d, s in strides.items()}
        self.numbers[f"{name}_rows"] = limits.ROW_BASE + t.shape[at]

    def _addressable(self, view: View, t: torch.Tensor, row_axis: int) -> torch.Tensor:
        """The tensor itself, or a copy where its rows overlap: the kernel clamps columns to the row pitch."""
        if t.stride(-1) == 1 and (t.shape[row_axis] == 1 or t.stride(row_axis) >= view.columns):
            return t
        log.debug("%s with strides %s is copied: its rows overlap", view.tensor.name, t.stride())
        copy = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        if view.tensor.output:
            self.copied_back.append((t, copy))
        else:
            copy.copy_(t)
        return copy

    def arguments(self, params: Sequence[Param], rings: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
        """(tensors, scalars) in the order of the kernel's parameters."""
        named = {view.argument: self.tensors[name] for name, view in self.views.items()}
        named |= {ring_name(c): ring for c, ring in zip(self.roles.channels, rings)}
        tensors = [named[p.name] for p in params if p.kind == "tensor"]
        return tensors, [self.numbers[p.name] for p in params if p.kind == "scalar"]

    def finish(self) -> None:
        """Copy outputs back where the kernel could not write them in place."""
        for target, copy in self.copied_back:
            target.copy_(copy)
