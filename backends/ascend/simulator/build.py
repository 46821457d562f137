"""Compile emitted `pto` text for the CPU: once as the cube core, once as the vector core. Cached by content."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fa_multi.cache import cache_dir, write_atomic

from .. import toolchain
from ..toolchain import ToolchainError
from . import run

_HERE = Path(__file__).resolve().parent
_FLAGS = ("-std=c++23", "-O2", "-w", "-fPIC", "-pthread")
# the host's half-precision instructions make a run ten times faster, at no cost in compile time; -O3 gains nothing
_KERNEL_FLAGS = (*_FLAGS, "-march=native", "-ffp-contract=off", "-D__CPU_SIM", "-D__STDCPP_BFLOAT16_T__=1")
CORES = ("cube", "vector")
_PRELUDE = """#include "sim_pre.h"
#include <pto/pto-inst.hpp>
#include "sim_fix.h"
#define __CCE_AICORE__ 220
#if SIM_CORE == 0
#define __DAV_C220_CUBE__ 1
#else
#define __DAV_C220_VEC__ 1
#endif
"""


@dataclass(frozen=True)
class Param:
    """One parameter of the emitted kernel. kind: "tensor" or "scalar"; ctype: its C type, as text."""

    name: str
    kind: str
    ctype: str


class SimKernel:
    """A compiled kernel. `params` lists what `run` wants, in order: tensors and scalars of the C++ signature."""

    def __init__(self, params: Sequence[Param], cube: ctypes.CDLL, vector: ctypes.CDLL):
        self.params = tuple(params)
        self.tensor_names = tuple(p.name for p in params if p.kind == "tensor")
        self.scalar_names = tuple(p.name for p in params if p.kind == "scalar")
        self._libraries = cube, vector

    def run(
        self,
        blocks: int,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[int] = (),
        timeout: float = 20.0,
        together: int = 1,
        delay_us: tuple[int, int] = (0, 0),
    ) -> run.SimReport:
        """Run the kernel over `blocks` cores and write into `tensors` in place.

        tensors: one CPU tensor per tensor parameter; its data_ptr is what the kernel gets, so strides are the caller's
        business. scalars: ints, one per scalar parameter. timeout: seconds a core may wait for one flag.
        together: how many blocks run side by side (all of them for kernels that synchronize across blocks).
        delay_us: microseconds added to every cross-core set of the cube and of the vector cores, to shake the order.

        Raises SimulationError for a deadlock, a wrong flag, a flag left set, or memory outside the tensors.
        """
        if len(tensors) != len(self.tensor_names):
            raise ValueError(
                f"tensors: the kernel takes {len(self.tensor_names)} {self.tensor_names}, got {len(tensors)}"
            )
        if len(scalars) != len(self.scalar_names):
            raise ValueError(
                f"scalars: the kernel takes {len(self.scalar_names)} {self.scalar_names}, got {len(scalars)}"
            )
        for name, tensor in zip(self.tensor_names, tensors):
            if tensor.device.type != "cpu":
                raise ValueError(f"tensor {name} is on {tensor.device}; the simulator takes CPU tensors")
        cube, vector = self._libraries
        entries = [ctypes.cast(library.sim_entry, ctypes.c_void_p) for library in (cube, vector)]
        return run.run(host_library(), entries, blocks, tensors, scalars, timeout, together, delay_us)


def parse_params(text: str) -> tuple[str, list[Param]]:
    """(kernel name, its parameters without the flag base address) of emitted `pto` text."""
    found = re.search(r'extern "C" __global__ AICORE void (\w+)\(([^)]*)\)', text)
    if not found:
        raise ValueError("no kernel in the text: expected what target 'pto' emits")
    params = []
    for word in (w.strip() for w in found.group(2).split(",")):
        ctype, _, name = word.rpartition(" ")
        if name != "ffts_Addr":
            pointer = "*" in word
            name = name.lstrip("*").removesuffix("_raw").removesuffix("_handle")
            params.append(Param(name, "tensor" if pointer else "scalar", ctype))
    return found.group(1), params


def load(pto_text: str, name: str = "kernel") -> SimKernel:
    """Compile emitted `pto` text, or take it from the cache. name: what errors call it.

    Raises ToolchainError when the simulator is not set up or clang++ refuses the text.
    """
    kernel, params = parse_params(pto_text)
    source = pto_text.split('extern "C" void call(')[0] + _entry(kernel, params)
    host_library()  # the kernel libraries find their hooks in it
    libraries = _compile(source, name)
    return SimKernel(params, *(ctypes.CDLL(str(path)) for path in libraries))


def _entry(kernel: str, params: Sequence[Param]) -> str:
    arguments, counts = [], {"tensor": 0, "scalar": 0}
    for p in params:
        i = counts[p.kind]
        counts[p.kind] += 1
        arguments.append(f"a[{i}]" if p.kind == "tensor" else f"({p.ctype})s[{i}]")
    arguments.append("0")  # the flag base address comes last
    call = f"{kernel}({', '.join(arguments)});"
    return f'\nextern "C" void sim_entry(uint8_t** a, int64_t* s) {{ sim_poison_memory(); {call} }}\n'


@functools.cache
def _shims_digest() -> str:
    files = sorted(p for p in (_HERE / "include").rglob("*") if p.is_file())
    return hashlib.sha256(b"\0".join(p.read_bytes() for p in files)).hexdigest()


@functools.cache
def _processor() -> str:
    """What -march=native depends on: a cache that moves to another machine must not be used there."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^(flags|Features)\s*:.*$", info.read_text() if info.exists() else "", re.M)
    return found.group(0) if found else platform.processor()


def _digest(*parts: str) -> str:
    """Identifies a library: its own parts, and everything that all of them depend on."""
    found = toolchain.require(simulator=True)
    common = (_shims_digest(), *_KERNEL_FLAGS, found.versions["clang++"], toolchain.version(), _processor())
    return hashlib.sha256("\0".join((*parts, *common)).encode()).hexdigest()[:32]


def _command(core: int, *arguments: str) -> list[str]:
    found = toolchain.require(simulator=True)
    home = found.paths["tilelang"]
    includes = [_HERE / "include", home / "3rdparty/pto-isa/include", home / "src"]
    clang = str(found.paths["clang++"])
    return [clang, *_KERNEL_FLAGS, f"-DSIM_CORE={core}", *(f"-I{i}" for i in includes), *arguments]


def _compile(source: str, name: str) -> list[Path]:
    """[cube library, vector library] of a kernel."""
    key = _digest(source)

    def command(core: int, text: Path, out: Path) -> list[str]:
        return _command(core, "-shared", "-include-pch", str(headers[core]), str(text), "-o", str(out))

    folder = toolchain.cache_dir() / "simulator"
    targets = [folder / f"{key}.{core}.so" for core in CORES]
    headers = [] if all(t.exists() for t in targets) else _headers()
    return _build(targets, source, ".cpp", command, name)


def _headers() -> list[Path]:
    """The simulator's headers, parsed once per kind of core: they are a third of the time of every kernel."""
    home = toolchain.require(simulator=True).paths["tilelang"]
    key = _digest(_PRELUDE, str(home), str(_HERE))  # the result remembers where it came from
    prelude = cache_dir("ascend", "simulator") / f"headers-{key}.h"

    def command(core: int, text: Path, out: Path) -> list[str]:
        # setting up again gives the same headers new times
        return _command(core, "-Xclang", "-fno-pch-timestamp", "-x", "c++-header", str(prelude), "-o", str(out))

    targets = [prelude.with_suffix(f".{core}.pch") for core in CORES]
    if not all(t.exists() for t in targets):
        write_atomic(prelude, _PRELUDE)
    return _build(targets, "", ".h", command, "headers")


def _build(
    targets: list[Path], source: str, suffix: str, command: Callable[[int, Path, Path], list[str]], name: str
) -> list[Path]:
    """Compile `source` for both kinds of core at once, into files that appear complete or not at all."""
    if all(t.exists() for t in targets):
        return targets
    targets[0].parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build.", dir=targets[0].parent) as temp:
        text = Path(temp) / f"source{suffix}"
        text.write_text(source)
        outs = [Path(temp) / t.name for t in targets]
        jobs = [
            subprocess.Popen(command(core, text, out), stderr=subprocess.PIPE, text=True)
            for core, out in enumerate(outs)
        ]
        for log, job in [(job.communicate()[1], job) for job in jobs]:
            if job.returncode:
                first = next((x for x in log.splitlines() if "error" in x), log[-300:] or f"exit {job.returncode}")
                raise ToolchainError(f"clang++ refused kernel {name}: {first.strip()}")
        for out, target in zip(outs, targets):
            out.replace(target)
    return targets


_host_lock = threading.Lock()
_host: ctypes.CDLL | None = None


def host_library() -> ctypes.CDLL:
    """The host side (threads and flags), compiled once and loaded where the kernels find its symbols."""
    global _host
    with _host_lock:
        if _host is None:
            _host = ctypes.CDLL(str(_compile_host()), mode=ctypes.RTLD_GLOBAL)
            _host.sim_run.restype = ctypes.c_int
        return _host


def _compile_host() -> Path:
    home = toolchain.require(simulator=True)
    source = _HERE / "host.cpp"
    key = hashlib.sha256(source.read_bytes() + home.versions["clang++"].encode()).hexdigest()[:32]
    target = toolchain.cache_dir() / "simulator" / f"host-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".host.", dir=target.parent) as temp:
        out = Path(temp) / "host.so"
        command = [str(home.paths["clang++"]), *_FLAGS, "-shared", str(source), "-o", str(out)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise ToolchainError(f"clang++ refused the simulator's host side: {result.stderr.strip()[-500:]}")
        out.replace(target)
    return target
