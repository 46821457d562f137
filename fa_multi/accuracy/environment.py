"""What produced a result: versions and device names, as far as this machine tells."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import fa_multi


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def environment(device: str) -> dict[str, Any]:
    """Versions of everything a result on `device` depends on, and the device's name. None where it cannot be told."""
    lane = device.partition(":")[0]
    found: dict[str, Any] = {
        "lane": lane,
        "fa_multi": fa_multi.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    return found | {"cpu": _cpu, "cuda": _cuda, "npu": _npu, "npu-sim": _simulator}[lane](device)


def _cpu(device: str) -> dict[str, Any]:
    return {"device_name": cpu_name(), "driver": None, "dsl": None}


def cpu_name() -> str:
    """The processor's name."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _cuda(device: str) -> dict[str, Any]:
    there = torch.cuda.is_available()
    return {
        "device_name": torch.cuda.get_device_name(device) if there else None,
        "capability": "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if there else None,
        "driver": nvidia_driver(),
        "cuda": torch.version.cuda,
        "dsl": _named("tilelang"),
    }


def nvidia_driver() -> str | None:
    """The NVIDIA driver's version, or None."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def _npu(device: str) -> dict[str, Any]:
    npu: Any = getattr(torch, "npu", None)
    there = npu is not None and npu.is_available()
    return {
        "device_name": npu.get_device_name(device) if there else None,
        "driver": cann_version(),
        "torch_npu": version("torch_npu"),
        "dsl": _named("tilelang-ascend"),
    }


def cann_version() -> str | None:
    """The version of the CANN toolkit that the environment names, or None."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    for name in ("version.cfg", "version.info", "compiler/version.info"):
        file = Path(home or "", name)
        if home and file.is_file():
            found = re.search(r"(?:version|Version)\w*\s*=\s*\[?([\w.:-]+)", file.read_text(errors="replace"))
            if found:
                return found.group(1)
    return None


def _simulator(device: str) -> dict[str, Any]:
    from ..backends.ascend import toolchain

    versions = toolchain.status().versions
    dsl = versions.get("tilelang-ascend")
    return {
        "device_name": f"CPU simulator on {cpu_name()}",
        "driver": f"clang++ {versions['clang++']}" if "clang++" in versions else None,
        "dsl": f"tilelang-ascend {dsl}" if dsl else None,
    }


def _named(package: str) -> str | None:
    found = version(package)
    return f"{package} {found}" if found else None
