"""Run a compiled kernel in the simulator's threads and read back what the flags did."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

CROSS_FLAGS = 11  # ids 0..10
CORES = ("AIC", "AIV0", "AIV1")
_REPORT_BYTES = 1 << 16
_lock = threading.Lock()  # the host side keeps the flags of one run at a time


class SimulationError(RuntimeError):
    """The kernel broke a rule that hardware punishes with a hang or with wrong numbers. The message is the report."""


@dataclass(frozen=True)
class SimReport:
    """What one run did. seconds: wall time. flags: {core: {flag id: (sets, waits)}} of block 0, used flags only."""

    seconds: float
    flags: dict[str, dict[int, tuple[int, int]]]


def run(
    host: ctypes.CDLL,
    entries: Sequence[ctypes.c_void_p],
    blocks: int,
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[int],
    timeout: float,
    together: int,
    delay_us: tuple[int, int],
) -> SimReport:
    """See SimKernel.run. entries: the compiled (cube, vector) entry points."""
    pointers = (ctypes.c_void_p * max(1, len(tensors)))(*[t.data_ptr() for t in tensors])
    numbers = (ctypes.c_int64 * max(1, len(scalars)))(*[int(s) for s in scalars])
    counts = (ctypes.c_int * (len(CORES) * CROSS_FLAGS * 2))()
    text = ctypes.create_string_buffer(_REPORT_BYTES)
    with _lock:
        start = time.perf_counter()
        bad = host.sim_run(
            entries[0],
            entries[1],
            ctypes.c_int(blocks),
            ctypes.c_int(together),
            pointers,
            numbers,
            ctypes.c_double(timeout),
            ctypes.c_int(delay_us[0]),
            ctypes.c_int(delay_us[1]),
            text,
            ctypes.c_int(_REPORT_BYTES),
            counts,
        )
        seconds = time.perf_counter() - start
    if bad:
        lines = text.value.decode(errors="replace").strip().splitlines()
        more = [f"... and {len(lines) - 12} more lines"] if len(lines) > 12 else []
        raise SimulationError("the simulated kernel failed: " + "\n".join(lines[:12] + more))
    return SimReport(seconds, _flags(counts))


def _flags(counts: ctypes.Array[ctypes.c_int]) -> dict[str, dict[int, tuple[int, int]]]:
    flags: dict[str, dict[int, tuple[int, int]]] = {core: {} for core in CORES}
    for c, core in enumerate(CORES):
        for f in range(CROSS_FLAGS):
            i = (c * CROSS_FLAGS + f) * 2
            if counts[i] or counts[i + 1]:
                flags[core][f] = counts[i], counts[i + 1]
    return flags
