"""What the compiler makes of a kernel text: CUDA source, and a cubin with its use of the chip. Needs nvcc, no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fa_multi.cache import store_text

from . import runtime


@dataclass(frozen=True)
class Report:
    """registers: per thread at launch. spill_bytes: stores to local memory. shared_bytes: static and dynamic together.
    warnings: lines of ptxas that say that products were serialized."""

    cubin: bytes
    registers: int
    spill_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...]


def lower(name: str, text: str, arch: str) -> tuple[str, int]:
    """CUDA source of a kernel text, and its dynamic shared memory in bytes."""
    from tilelang import tvm
    from tilelang.engine.lower import lower as tilelang_lower

    module = runtime.import_text(store_text(runtime.KIND, name, text))
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(opt_level=3, config=module.PASS_CONFIGS), target:
        artifact = tilelang_lower(module.build(), target=target)
    sizes = re.findall(r'dyn_shared_memory_buf"?\s*:\s*(?:T\.int32\()?(\d+)', str(artifact.device_mod))
    return artifact.kernel_source, max(map(int, sizes), default=0)


def compile_cubin(name: str, text: str, arch: str) -> Report:
    """Compile a kernel text to a cubin, with the flags that running it would use."""
    import tilelang

    source, dynamic = lower(name, text, arch)
    root = Path(tilelang.__file__).parent
    includes = [f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include"]
    with tempfile.TemporaryDirectory() as folder:
        file, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        file.write_text(source)
        flags = ["-std=c++17", "-O3", "--use_fast_math", "--expt-relaxed-constexpr", "-Xptxas", "-v", f"-arch={arch}"]
        done = subprocess.run(
            ["nvcc", "-cubin", *flags, *includes, str(file), "-o", str(cubin)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"nvcc does not accept {name} for {arch}: {done.stderr[-2000:]}")
        data = cubin.read_bytes()

    def number(pattern: str) -> int:
        return max(map(int, re.findall(pattern, done.stderr + done.stdout)), default=0)

    return Report(
        data,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores"),
        shared_bytes=number(r"(\d+) bytes smem") + dynamic,
        warnings=tuple(line for line in done.stderr.splitlines() if re.search(r"C75\d\d|wgmma.*serializ", line)),
    )
