"""What a case becomes on the way to a device, stage by stage."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .api import lower
from .arguments import parse_device
from .backends import Lowered
from .backends.cuda import limits
from .cases import DTYPES, Case

Stage = Callable[[Lowered, str], Any]


def lowered_case(case: Case, device: str, arch: str | None = None, return_lse: bool = False) -> Lowered:
    """Program, roles and kernel text of a case; needs no device. ValueError, in one line, if the lane has no kernel."""
    q, k, v = (torch.empty(shape, dtype=DTYPES[case.dtype], device="meta") for shape in case.shapes().values())
    if case.lengths:
        q, k, v = case.inputs()
    elif case.layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lower(q, k, v, device=device, arch=arch, return_lse=return_lse, **case.kwargs(), **case.extras())


def lowered_stage(
    case: Case, device: str, stage: str, arch: str | None = None, return_lse: bool = False
) -> str | bytes:
    """One stage of a case.

    stage: "program" (the tile program), "roles", "source" (the kernel text), and what the lane's compiler makes of it:
    "lowered" (CUDA C++ on cuda, Ascend C on npu and npu-sim), "pto" (npu, npu-sim), "cubin" (cuda; bytes).
    arch: of the lane; None is its default, "sm_90a" for the compiled stages of cuda.
    Raises ValueError for a stage that the lane does not have, RuntimeError, with the remedy, without its compiler.
    """
    lane, _ = parse_device(device, None)
    compiled = _COMPILED.get(lane, {})
    if stage not in ("program", "roles", "source", *compiled):
        offered = ", ".join(("program", "roles", "source", *compiled))
        raise ValueError(f"--stage must be one of {offered} for {lane}, got {stage!r}")
    if lane == "cuda" and stage in compiled and arch is None:
        arch = limits.DEFAULT_ARCH
    found = lowered_case(case, device, arch, return_lse)
    if stage in compiled:
        result: str | bytes = compiled[stage](found, arch or "")
        return result
    return {"program": str(found.program), "roles": str(found.roles), "source": found.source}[stage]


def _need(tool: str, there: bool, remedy: str) -> None:
    if not there:
        raise RuntimeError(f"this stage needs {tool}, which is not there; {remedy}")


def _cuda_text(found: Lowered, arch: str) -> str:
    _need("tilelang", importlib.util.find_spec("tilelang") is not None, "run: pip install 'fa_multi[cuda]'")
    from .backends.cuda import inspection

    return inspection.lower(found.program.name, found.source, arch)[0]


def _cubin(found: Lowered, arch: str) -> bytes:
    _need("tilelang", importlib.util.find_spec("tilelang") is not None, "run: pip install 'fa_multi[cuda]'")
    _need("nvcc", shutil.which("nvcc") is not None, "install the CUDA toolkit and put nvcc on PATH")
    from .backends.cuda import inspection

    return inspection.compile_cubin(found.program.name, found.source, arch).cubin


def _ascend(target: str) -> Stage:
    def text(found: Lowered, arch: str) -> str:
        from .backends.ascend import compiler

        return compiler.lower(found.source, target=target, name=found.program.name)

    return text


_ASCEND: Mapping[str, Stage] = {"lowered": _ascend("ascendc"), "pto": _ascend("pto")}
_COMPILED: Mapping[str, Mapping[str, Stage]] = {
    "cuda": {"lowered": _cuda_text, "cubin": _cubin},
    "npu": _ASCEND,
    "npu-sim": _ASCEND,
}
