"""Running kernels: compile once, keep the library on disk under the hash of its text, launch with little in between."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fa_multi import workspace
from fa_multi.cache import digest, store_text
from fa_multi.plan import Plan
from fa_multi.programs import Spec, tensors
from fa_multi.scalars import Var
from fa_multi.spec import AttentionSpec

from .. import Launch, Lowered, Work
from . import emit, emit_ops, limits, planner, scheduling

KIND = "cuda"  # folder of the cache
TMA_ALIGNMENT = 16  # bytes, of a pointer and of every stride
_lock = threading.Lock()
_compilations = 0


def compilations() -> int:
    """How many kernels this process has compiled (not loaded from the cache)."""
    return _compilations


# --------------------------------------------------------------------------------------------- compile and load


def compile_text(name: str, text: str, arch: str) -> Path:
    """The library of a kernel text for an architecture, compiled if the cache does not have it. Needs nvcc, no GPU."""
    global _compilations
    source = store_text(KIND, name, text)
    library = source.parent / f"{name}_{digest(text, arch, _tilelang_version())}.so"
    if library.exists():
        return library
    with _lock:
        if not library.exists():
            _compile(source, arch, library)
            _compilations += 1
    return library


def _compile(source: Path, arch: str, library: Path) -> None:
    from tilelang.jit.kernel import JITKernel
    from tvm.target import Target

    module = import_text(source)
    kernel = JITKernel(
        module.build(),
        execution_backend="tvm_ffi",
        target=Target({"kind": "cuda", "arch": arch}),
        pass_configs=module.PASS_CONFIGS,
    )
    # Under another name first: a library that exists is whole. The compiler decides by suffix what it writes.
    partial = library.with_name(f"{library.stem}.{os.getpid()}.so")
    kernel.export_library(str(partial))
    os.replace(partial, library)


def import_text(source: Path) -> ModuleType:
    """The module of a kernel text; importing it needs TileLang and compiles nothing."""
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _tilelang_version() -> str:
    from importlib.metadata import version

    return version("tilelang")


@functools.cache
def load(name: str, text: str, arch: str) -> Callable[..., None]:
    """The kernel as a function of its arguments. It launches on the current stream."""
    library = compile_text(name, text, arch)
    import tilelang  # noqa: F401  (registers the loader of the library's device code)
    from tvm.runtime import load_module

    function: Callable[..., None] = load_module(str(library))["main"]
    return function


# --------------------------------------------------------------------------------------------- which kernel, and how


def legal_strides(x: torch.Tensor) -> tuple[int, ...]:
    """The strides of `x`. An axis of size 1 does not use its own, but TMA checks it: what it refuses is replaced."""
    unit = TMA_ALIGNMENT // x.element_size()
    spare = -(-x.shape[-1] // unit) * unit
    return tuple(
        spare if n == 1 and axis < x.dim() - 1 and (s <= 0 or s % unit) else s
        for axis, (n, s) in enumerate(zip(x.shape, x.stride()))
    )


def aligned(x: torch.Tensor) -> bool:
    """Do all rows start at multiples of 16 bytes?"""
    bytes_ = (s * x.element_size() for s in legal_strides(x)[:-1])
    return x.data_ptr() % TMA_ALIGNMENT == 0 and all(s % TMA_ALIGNMENT == 0 for s in bytes_)


def takes_tma(x: torch.Tensor) -> bool:
    """Can TMA read the tensor? It refuses a stride of 0 (an expanded axis)."""
    return aligned(x) and all(s > 0 for s in legal_strides(x)[:-1])


def prepare(spec: Spec, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Launch:
    """A launcher for inputs of these shapes, strides and alignment. The results' may differ from call to call."""
    described = tensors(spec)
    strided = [x for name, x in inputs.items() if emit_ops.strided(described[name])]
    device = strided[0].device if strided else torch.device("cuda", torch.cuda.current_device())
    return _Launcher(spec, inputs, sizes, device, arch_of(device), strided)


class _Launcher:
    """Calls the kernel that fits. `by_out` keeps it by the strides and alignment of the result, so that a call costs
    one look-up besides the launch."""

    def __init__(
        self, spec: Spec, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int], device: torch.device, arch: str,
        strided: list[torch.Tensor],
    ) -> None:  # fmt: skip
        self.spec, self.sizes, self.device, self.arch = spec, sizes, device, arch
        described = tensors(spec)
        self.shapes = {name: x.shape for name, x in inputs.items()}
        self.out = list(described).index("out")
        self.aligned, self.tma = all(map(aligned, strided)), all(map(takes_tma, strided))
        self.restrided = {
            n: (tuple(x.shape), legal_strides(x))
            for n, (name, x) in enumerate(inputs.items())
            if emit_ops.strided(described[name]) and legal_strides(x) != x.stride()
        }
        self.by_out: dict[tuple[Any, int], Launch] = {}
        if self.aligned:  # results are, as a rule; compile now
            self.kernel(self.tma, True)

    def __call__(self, *values: torch.Tensor) -> None:
        out = values[self.out]
        key = (out.stride(), out.data_ptr() & (TMA_ALIGNMENT - 1))
        launch = self.by_out.get(key)
        if launch is None:
            launch = self.by_out[key] = self.choose(out)
        launch(*values)

    def choose(self, out: torch.Tensor) -> Launch:
        function, extra, queued = self.kernel(self.tma and takes_tma(out), self.aligned and aligned(out))
        restrided = dict(self.restrided)
        if legal_strides(out) != out.stride():
            restrided[self.out] = (tuple(out.shape), legal_strides(out))
        if not (restrided or queued):
            return lambda *values: function(*values, *extra)

        def launch(*values: torch.Tensor) -> None:
            views = list(values)
            for n, (shape, strides) in restrided.items():
                views[n] = views[n].as_strided(shape, strides)
            counters = [workspace.counters(scheduling.TICKETS, self.device)] if queued else []
            function(*views, *extra, *counters)

        return launch

    def kernel(self, tma: bool, is_aligned: bool) -> tuple[Callable[..., None], list[int], bool]:
        """The kernel, loaded, its arguments behind the tensors, and whether counters come behind those."""
        lowered = emit.lower(self.spec, self.arch, is_aligned, tma)
        extra = [self.sizes[name] for name in emit_ops.scalar_arguments(lowered.program)]
        queued = False
        if lowered.form == "roles":
            extra.append(_blocks(lowered, self.shapes, self.sizes, self.device))
            queued = scheduling.queued(lowered.roles) is not None
        return load(self.spec.name(), lowered.source, self.arch), extra, queued


def _blocks(lowered: Lowered, shapes: Mapping[str, torch.Size], sizes: Mapping[str, int], device: torch.device) -> int:
    """Blocks of a persistent kernel: one per multiprocessor, but no more than there is work for."""
    assert isinstance(lowered.roles.plan, planner.CudaPlan)
    known = dict(sizes)
    for tensor in lowered.program.tensors:
        for n, size in zip(tensor.shape, shapes.get(tensor.name, ())):
            if isinstance(n, Var):
                known[n.name] = size
    units = 1
    for _, extent in lowered.program.axes:
        units *= int(extent.eval(known))
    most = min(units, _multiprocessors(device))
    return planner.even_blocks(units, most) if lowered.roles.plan.read_once else most


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def arch_of(device: torch.device) -> str:
    """The architecture of a device, as kernels are compiled for it."""
    return limits.arch_of(torch.cuda.get_device_capability(device))


def _default_arch() -> str:
    """Of the current device, if there is one that can run kernels."""
    if _unavailable() is None:
        return arch_of(torch.device("cuda", torch.cuda.current_device()))
    return limits.DEFAULT_ARCH


# --------------------------------------------------------------------------------------------- the backend


class CudaBackend:
    """NVIDIA GPUs from compute capability 8.0 on."""

    name = "cuda"

    def supports(self, spec: Spec, arch: str | None = None) -> str | None:
        return planner.refusal(spec) or (limits.unknown_arch(arch) if arch is not None else None)

    def unavailable(self) -> str | None:
        return _unavailable()

    def plan(self, spec: Spec, arch: str | None = None) -> Plan:
        return self.lower(spec, arch).roles.plan

    def divide(
        self, spec: AttentionSpec, work: Work, splits: int, arch: str | None = None
    ) -> tuple[AttentionSpec, int]:
        arch = arch or _default_arch()
        spec = planner.grouped(spec, work)
        folded = planner.folded(spec, work)
        if (
            folded is not None
            and emit.has_roles(folded, arch)
            and planner.prefers(folded, work, emit.has_roles(spec, arch))
        ):
            spec = folded
        return spec, splits or planner.choose_splits(spec, self.plan(spec, arch), work)

    def lower(self, spec: Spec, arch: str | None = None) -> Lowered:
        return emit.lower(spec, arch or _default_arch())

    def prepare(self, spec: Spec, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Launch:
        return prepare(spec, inputs, sizes)


@functools.cache
def _unavailable() -> str | None:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        return "no CUDA device: " + (
            "the driver sees none (nvidia-smi)" if built else f"this torch ({torch.__version__}) is built without CUDA"
        )
    reason = limits.unknown_arch(arch_of(torch.device("cuda", torch.cuda.current_device())))
    if reason:
        return reason
    if importlib.util.find_spec("tilelang") is None:
        return "TileLang is not installed: pip install 'fa_multi[cuda]'"
    return None
