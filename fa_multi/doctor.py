"""What this machine can do: lanes, compilers, caches, and what would enable the rest."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from . import api, backends
from .accuracy.environment import cann_version, environment, nvidia_driver, version
from .cache import cache_dir
from .cases import Case
from .stages import lowered_case


def examine() -> dict[str, Any]:
    """The findings, JSON-able.

    lanes: per lane, whether it `runs` here, prints its `source`, and `compiles` it (all bool), `about` (device and
    versions in a line) and `remedy` (None, or why it does not run and the command that would change that).
    versions, tools: name -> version or None. cache: path and bytes.
    """
    toolchain = _toolchain()
    nvcc = nvcc_version()
    compiles = {
        "cpu": True,
        "cuda": nvcc is not None and importlib.util.find_spec("tilelang") is not None,
        "npu": toolchain.can_lower,
        "npu-sim": toolchain.can_lower,
    }
    return {
        "lanes": {name: _lane(name, compiles[name]) for name in backends.LANES},
        "versions": {
            "fa_multi": version("fa_multi"),
            "python": environment("cpu")["python"],
            "torch": torch.__version__,
            "tilelang": version("tilelang"),
            "tilelang-ascend": toolchain.versions.get("tilelang-ascend") or version("tilelang-ascend"),
            "torch_npu": version("torch_npu"),
        },
        "tools": {
            "NVIDIA driver": nvidia_driver(),
            "nvcc": nvcc,
            "CANN": cann_version(),
            "clang++ for the simulator": toolchain.versions.get("clang++"),
        },
        "cache": {"path": str(cache_dir()), "bytes": folder_size(cache_dir())[1]},
    }


def _toolchain() -> Any:
    from .backends.ascend import toolchain

    return toolchain.status()


def _lane(name: str, compiles: bool) -> dict[str, Any]:
    reason = api.unavailable(name)
    found = environment(name)
    about = [found["device_name"], found.get("dsl"), found.get("driver") and f"driver {found['driver']}"]
    return {
        "runs": reason is None,
        "source": _prints(name),
        "compiles": compiles,
        "about": ", ".join(x for x in about if x) or "no device",
        "remedy": reason,
    }


def _prints(name: str) -> bool:
    try:
        return bool(lowered_case(Case("plain"), name).source)
    except (ValueError, RuntimeError):
        return False


def nvcc_version() -> str | None:
    """The version of the CUDA compiler on PATH or under CUDA_HOME, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    tool = shutil.which("nvcc") or (home and shutil.which("nvcc", path=str(Path(home, "bin"))))
    if not tool:
        return None
    try:
        text = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release ([\d.]+)", text)
    return found.group(1) if found else None


def folder_size(path: Path) -> tuple[int, int]:
    """(files, bytes) of a folder or a file, links not followed."""
    if path.is_symlink() or path.is_file():
        return 1, path.lstat().st_size
    files = size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            files += 1
            size += Path(folder, name).lstat().st_size
    return files, size
