"""The Ascend compiler and the host compiler of the simulator: where they are, what is missing, how to get them.

tilelang-ascend is published as one aarch64 wheel. On aarch64 it is used as installed. On x86-64 `setup` unpacks it,
with the arm64 libraries it needs and a static user-mode emulator, into the cache directory: no root, no container,
nothing installed into the running Python. The simulator needs clang++ >= 17, which `setup` installs with apt-get where
it may.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa_multi.cache import cache_root

COMPILER_VERSION = "0.1.4"  # tilelang-ascend; the forms that emit.py prints were tried with this one
CLANG_MIN = 17  # older ones reject a static_assert(false) in the simulator headers
DEBIAN_SUITE = "trixie"  # the wheel needs glibc >= 2.38
MIRROR_ENV = "FA_MULTI_DEBIAN_MIRROR"

_HERE = Path(__file__).resolve().parent
_ARM64 = _HERE / "arm64"
_DEBS = (
    *("libc6", "libstdc++6", "libgcc-s1", "zlib1g", "libexpat1", "libffi8", "libssl3t64", "libsqlite3-0", "libbz2-1.0"),
    *("liblzma5", "libncursesw6", "libtinfo6", "libreadline8t64", "libuuid1", "libzstd1"),
    *("python3.13", "python3.13-minimal", "libpython3.13-minimal", "libpython3.13-stdlib"),
)
_PIP_PLATFORMS = (
    "manylinux_2_28_aarch64",
    "manylinux_2_27_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux2014_aarch64",
    "any",
)


class ToolchainError(RuntimeError):
    """The Ascend compiler, or the compiler of the simulator, is missing or failed. The message carries the remedy."""


@dataclass(frozen=True)
class ToolchainStatus:
    """What this machine can do for Ascend without an NPU.

    ready: kernels can be lowered and simulated. can_lower: kernels can be lowered to C++ text.
    reason: None when ready, else one line that names what is missing and the remedy.
    paths: name -> path of what was found ("clang++", "python", "tilelang", "emulator").
    versions: name -> version text.
    """

    ready: bool
    can_lower: bool
    reason: str | None
    paths: dict[str, Path] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def cache_dir() -> Path:
    """The folder that holds everything this backend may delete and make again (FA_MULTI_CACHE overrides it)."""
    return cache_root() / "ascend"


def is_native() -> bool:
    """Whether the published compiler runs here without emulation."""
    return platform.machine() in ("aarch64", "arm64")


def _requirement_files() -> list[Path]:
    return [_ARM64 / "requirements-compiler.txt", _ARM64 / "requirements-py313.txt"]


@functools.cache
def version() -> str:
    """Names the compiler and all that decides its text: part of every cache key and of the folder name."""
    recipe = "\n".join([DEBIAN_SUITE, *sorted(_DEBS), *(f.read_text() for f in _requirement_files())])
    return f"{COMPILER_VERSION}-{hashlib.sha256(recipe.encode()).hexdigest()[:10]}"


def arm64_dir() -> Path:
    """Where `setup` puts the emulated arm64 environment. It exists only complete: setup renames it into place."""
    return cache_dir() / f"arm64-{version()}"


def compiler_home() -> Path | None:
    """The `tilelang` package folder of tilelang-ascend (it ships the simulator headers), or None if not there."""
    if is_native():
        spec = importlib.util.find_spec("tilelang")
        home = Path(spec.origin).parent if spec and spec.origin else None
    else:
        home = arm64_dir() / "site" / "tilelang"
    # NVIDIA's tilelang has the same import name; only the Ascend one ships these headers
    return home if home and (home / "3rdparty" / "pto-isa" / "include").is_dir() else None


def worker_command() -> tuple[list[str], dict[str, str]]:
    """(command line, extra environment) that starts the compiler worker on this machine."""
    worker = str(_ARM64 / "lower_worker.py")
    if is_native():
        return [sys.executable, worker], {}
    root, site = arm64_dir() / "root", arm64_dir() / "site"
    emulator, python = arm64_dir() / "qemu/usr/bin/qemu-aarch64", root / "usr/bin/python3.13"
    env = {"QEMU_LD_PREFIX": str(root), "PYTHONPATH": f"{_ARM64 / 'torch_stub'}:{site}", "PYTHONDONTWRITEBYTECODE": "1"}
    return [str(emulator), str(python), worker], env


def _clang_version(path: str) -> int:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r"clang version (\d+)", text)
    return int(found.group(1)) if found else 0


@functools.cache
def _find_clang(path_env: str) -> tuple[Path, int] | None:
    for name in ("clang++", *(f"clang++-{v}" for v in range(25, CLANG_MIN - 1, -1))):
        found = shutil.which(name, path=path_env)
        if found and (major := _clang_version(found)) >= CLANG_MIN:
            return Path(found), major
    return None


def find_clang() -> tuple[Path, int] | None:
    """(path, major version) of a clang++ that can build the simulator, or None."""
    return _find_clang(os.environ.get("PATH", os.defpath))


def status() -> ToolchainStatus:
    """What is there now. Cheap (a few file look-ups; `clang++ --version` once a process); changes nothing."""
    paths: dict[str, Path] = {}
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    reasons = []
    home, clang = compiler_home(), find_clang()
    if home:
        paths["tilelang"], versions["tilelang-ascend"] = home, COMPILER_VERSION
        paths["python"] = Path(sys.executable) if is_native() else arm64_dir() / "root/usr/bin/python3.13"
        if not is_native():
            paths["emulator"] = arm64_dir() / "qemu/usr/bin/qemu-aarch64"
    elif is_native():
        reasons.append(f"tilelang-ascend is not importable; run: pip install tilelang-ascend=={COMPILER_VERSION}")
    elif sys.platform != "linux" or platform.machine() != "x86_64":
        reasons.append("the Ascend compiler runs on Linux aarch64, or emulated on Linux x86-64; use such a machine")
    else:
        reasons.append("the Ascend compiler is not set up; run: fa-multi sim setup")
    if clang:
        paths["clang++"], versions["clang++"] = clang[0], str(clang[1])
    else:
        reasons.append(f"no clang++ >= {CLANG_MIN}; run: apt-get install clang-19 (or put one on PATH)")
    reason = "; ".join(reasons) or None
    return ToolchainStatus(ready=not reasons, can_lower=home is not None, reason=reason, paths=paths, versions=versions)


def require(simulator: bool = False) -> ToolchainStatus:
    """The status, or ToolchainError with the remedy when lowering (or, if asked, simulating) cannot work."""
    found = status()
    if not found.can_lower or (simulator and not found.ready):
        raise ToolchainError(found.reason)
    return found


def setup(progress: Callable[[str], None] = print) -> ToolchainStatus:
    """Make lowering and simulation work on this machine; what is already there is left alone.

    progress: called with one line of text before each long step.
    Raises ToolchainError, in one line with the remedy, when a step cannot be done here.
    """
    if compiler_home() is None:
        if is_native():
            raise ToolchainError(status().reason)
        _setup_arm64(progress)
    if find_clang() is None:
        _install_clang(progress)
    found = status()
    progress("ready: kernels can be lowered and simulated" if found.ready else f"not ready: {found.reason}")
    return found


# ---- the emulated arm64 environment --------------------------------------------------------------------------------


def _run(command: list[str], what: str, remedy: str, **kwargs: Any) -> None:
    result = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if result.returncode:
        lines = [x for x in (result.stderr or result.stdout).strip().splitlines() if x.strip()] or ["no message"]
        errors = [x for x in lines if "rror" in x or x.startswith("E:")] or lines
        raise ToolchainError(f"{what} failed: {errors[-1].strip()}; {remedy}")


def _debian_mirror() -> str:
    """The Debian mirror to use: the user's, else the first one that this machine's apt is configured with."""
    if mirror := os.environ.get(MIRROR_ENV):
        return mirror
    folder = Path("/etc/apt")
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("debian*"))]
    for file in files:
        if not file.is_file():
            continue
        lines = [x for x in file.read_text().splitlines() if not x.lstrip().startswith("#")]
        for url in re.findall(r"https?://[^\s\]]+", "\n".join(lines)):
            if url.rstrip("/").endswith("/debian"):
                return url
    raise ToolchainError(f"no Debian mirror is configured on this machine; set {MIRROR_ENV} to the URL of one")


def _setup_arm64(progress: Callable[[str], None]) -> None:
    """Build the environment in a folder of its own, then rename it into place: it is never seen half done."""
    for tool in ("apt-get", "dpkg"):
        if not shutil.which(tool):
            raise ToolchainError(f"{tool} is needed to unpack the Ascend compiler; use a Debian or Ubuntu machine")
    target = arm64_dir()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as temp:
        build = Path(temp) / "build"
        build.mkdir()
        os.chmod(temp, 0o755)
        _unpack_debian(build, Path(temp), progress)
        _unpack_wheels(build, Path(temp), progress)
        if not target.exists():  # another process may have been first
            build.rename(target)


def _unpack_debian(build: Path, work: Path, progress: Callable[[str], None]) -> None:
    """arm64 libraries and Python into build/root, the static emulator into build/qemu; signatures checked by apt."""
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    if not keyring.exists():
        raise ToolchainError("Debian's signing keys are missing; run: apt-get install debian-archive-keyring")
    apt = work / "apt"
    for name in ("lists/partial", "cache/archives/partial", "debs"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    mirror = _debian_mirror()
    (apt / "sources.list").write_text(f"deb [arch=arm64,amd64 signed-by={keyring}] {mirror} {DEBIAN_SUITE} main\n")
    options = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "APT::Architecture": "arm64",
        "Dir::State::Lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        "Dir::State::status": apt / "status",
        "APT::Sandbox::User": "root",
    }
    command = [
        "apt-get",
        "-qq",
        *(f"-o{k}={v}" for k, v in options.items()),
        "-oAPT::Architectures::=arm64",
        "-oAPT::Architectures::=amd64",
    ]
    remedy = f"check the network, or name another Debian mirror with {MIRROR_ENV}"
    progress(f"reading the package lists of Debian {DEBIAN_SUITE}")
    _run([*command, "update"], "apt-get update", remedy)
    progress(f"downloading {len(_DEBS)} arm64 packages and the emulator")
    _run([*command, "download", *_DEBS, "qemu-user:amd64"], "apt-get download", remedy, cwd=apt / "debs")
    for deb in sorted((apt / "debs").glob("*.deb")):
        where = build / ("qemu" if deb.name.startswith("qemu-user_") else "root")
        _run(["dpkg", "-x", str(deb), str(where)], f"unpacking {deb.name}", "free some disk space and try again")
    (build / "root/lib").symlink_to("usr/lib")  # merged /usr: the loader is asked for at /lib


def _unpack_wheels(build: Path, work: Path, progress: Callable[[str], None]) -> None:
    """The compiler wheel and the wheels it imports, pinned by version and hash, into build/site."""
    wheels, site = work / "wheels", build / "site"
    site.mkdir()
    common = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--disable-pip-version-check",
        "-d",
        str(wheels),
        "--implementation",
        "cp",
    ]
    compiler, needs = _requirement_files()
    remedy = "check the network and pip's configuration"
    progress(f"downloading tilelang-ascend {COMPILER_VERSION}")
    _run(
        [*common, "--python-version", "3.11", "--platform", "manylinux2014_aarch64", "-r", str(compiler)],
        "pip download tilelang-ascend",
        remedy,
    )
    progress("downloading the wheels it imports")
    platforms = [x for p in _PIP_PLATFORMS for x in ("--platform", p)]
    abis = [x for a in ("cp313", "abi3", "none") for x in ("--abi", a)]
    _run([*common, "--python-version", "3.13", *platforms, *abis, "-r", str(needs)], "pip download", remedy)
    progress("unpacking")
    for wheel in sorted(wheels.glob("*.whl")):
        shutil.unpack_archive(wheel, site, "zip")
    # the compiler imports distutils, gone from Python since 3.12
    shutil.copytree(site / "setuptools/_distutils", site / "distutils")


def _install_clang(progress: Callable[[str], None]) -> None:
    by_hand = f"install clang++ >= {CLANG_MIN} (apt-get install clang-19) and put it on PATH"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise ToolchainError(f"the simulator needs clang++ >= {CLANG_MIN} and it cannot be installed here; {by_hand}")
    progress("installing clang-19 with apt-get")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "-qq", "update"], "apt-get update", by_hand, env=env)
    _run(
        ["apt-get", "-qq", "install", "-y", "--no-install-recommends", "clang-19", "libstdc++-12-dev"],
        "apt-get install clang-19",
        by_hand,
        env=env,
    )
    _find_clang.cache_clear()
