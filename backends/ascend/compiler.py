"""Kernel text in, Ascend C++ text out: a disk cache in front of one long-lived compiler process."""

from __future__ import annotations

import atexit
import collections
import functools
import hashlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from fa_multi.cache import cache_dir, write_atomic

from . import toolchain
from .toolchain import ToolchainError

TARGETS = ("pto", "ascendc")
# expert mode: the text says everything, and no pass of the compiler adds buffers, flags or barriers to it
PASS_CONFIGS = {
    "tl.ascend_auto_sync": False,
    "tl.ascend_memory_planning": False,
    "tl.ascend_auto_cv_combine": False,
    "tl.ascend_auto_cross_core_sync": False,
}
START_TIMEOUT = 300.0  # seconds; the import alone takes 10-20 s under emulation
LOWER_TIMEOUT = 180.0  # seconds for one kernel
# Of this process's environment, the compiler sees only these: NVIDIA's TileLang, once imported, points variables of the
# same names (TVM_LIBRARY_PATH, PYTHONPATH, TL_TEMPLATE_PATH) at its own libraries.
PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL")


class CompilerError(ToolchainError):
    """The Ascend compiler refused a kernel, crashed on it, or did not answer in time.

    details: the traceback or the end of the compiler's log; may be empty.
    """

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


@functools.cache
def _driver_version() -> str:
    worker = Path(toolchain.worker_command()[0][-1])
    return hashlib.sha256(worker.read_bytes()).hexdigest()[:16]


def cache_key(source_text: str, builder: str, target: str, platform: str, pass_configs: Mapping[str, object]) -> str:
    """Hex digest over everything that can change the C++ text."""
    parts = [toolchain.version(), _driver_version(), source_text, builder, target, platform, dict(pass_configs)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def lower(
    source_text: str,
    builder: str = "build",
    target: str = "pto",
    platform: str = "A2",
    pass_configs: Mapping[str, object] | None = None,
    name: str | None = None,
) -> str:
    """C++ text of one kernel.

    source_text: a Python module in the tilelang-ascend DSL. builder: its module-level function, called without
    arguments, that returns the T.prim_func. target: "pto" (what the simulator runs) or "ascendc". platform: "A2" or
    "A3". pass_configs: the compiler's switches, all off by default. name: what errors call the kernel.

    Same arguments give the same text, from the disk cache when it was ever lowered before.
    Raises CompilerError, or ToolchainError when the compiler is not set up.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {TARGETS}, got {target!r}")
    configs: Mapping[str, object] = PASS_CONFIGS if pass_configs is None else pass_configs
    key = cache_key(source_text, builder, target, platform, configs)
    cached = cache_dir("ascend", "lowered") / f"{key}.cpp"
    if cached.is_file():
        return cached.read_text(encoding="utf-8")
    toolchain.require()
    request = {
        "source": source_text,
        "builder": builder,
        "target": target,
        "platform": platform,
        "pass_configs": dict(configs),
    }
    text = worker().ask(request, name or f"{builder} ({key[:8]}, {target})")
    write_atomic(cached, text)
    return text


class Worker:
    """The compiler process: started by the first request, again after a crash or a time-out, killed at exit."""

    def __init__(self) -> None:
        self.starts = 0
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._log: collections.deque[str] = collections.deque(maxlen=60)
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any], name: str, timeout: float = LOWER_TIMEOUT) -> str:
        """C++ text for one request (see lower_worker.py). One request at a time; safe from several threads."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            answer = self._exchange(json.dumps(request), name, timeout)
        if "error" in answer:
            first = answer["error"].strip().splitlines()
            message = " | ".join(x.strip() for x in (first[:1] + first[-1:] if len(first) > 1 else first))
            raise CompilerError(f"the Ascend compiler refused kernel {name}: {message}", answer.get("trace", ""))
        return answer["ok"]

    def stop(self) -> None:
        """End the process; the next request starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> None:
        self.stop()
        command, extra = toolchain.worker_command()
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self._answers, self._log = queue.Queue(), collections.deque(maxlen=60)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**env, **extra},
        )
        self.starts += 1
        for stream, sink in ((self._process.stdout, self._answers.put), (self._process.stderr, self._log.append)):
            threading.Thread(target=_pump, args=(stream, sink), daemon=True).start()
        self._read("its start", START_TIMEOUT)

    def _exchange(self, line: str, name: str, timeout: float) -> dict[str, str]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it died just now: reading reports how
        return self._read(f"kernel {name}", timeout)

    def _read(self, what: str, timeout: float) -> dict[str, str]:
        assert self._process is not None
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.stop()
            raise CompilerError(
                f"the Ascend compiler gave no answer on {what} in {timeout:.0f} s and was stopped", "".join(self._log)
            ) from None
        if line:
            answer: dict[str, str] = json.loads(line)
            return answer
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        self._process = None
        raise CompilerError(
            f"the Ascend compiler crashed ({how}) on {what}; it does so without a message when a buffer "
            "exceeds its memory: check the capacities first",
            "".join(self._log),
        )


def _pump(stream: IO[str], sink: Callable[[str], None]) -> None:
    for line in stream:
        sink(line)
    sink("")  # end of file


_worker: Worker | None = None
_owner = 0


def worker() -> Worker:
    """This process's compiler worker (not started yet, if nothing was lowered)."""
    global _worker, _owner
    if _worker is None or _owner != os.getpid():  # after a fork the parent's pipes are not ours to use
        _worker, _owner = Worker(), os.getpid()
        atexit.register(_worker.stop)
    return _worker
