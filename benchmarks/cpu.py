"""The CPU lane against torch SDPA on the same cores: `make bench-cpu`. Medians of alternating runs, kept as JSON."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fa_multi
from fa_multi.cache import write_atomic

SHAPE = (1, 8, 4096, 64)  # batch, heads, seq, dim
REPEATS = 7


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def row(dtype: torch.dtype, causal: bool) -> dict[str, object]:
    q, k, v = (torch.randn(SHAPE).to(dtype) for _ in range(3))
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "fa_multi": lambda: fa_multi.attention(q, k, v, causal=causal, layout="bhsd"),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
    }
    results = {name: call() for name, call in calls.items()}  # warm, and the same answer before any timing
    torch.testing.assert_close(results["fa_multi"], results["torch"], rtol=2e-2, atol=2e-2)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(REPEATS):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            times[name].append(seconds(calls[name]))
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {"shape": SHAPE, "dtype": str(dtype).removeprefix("torch."), "causal": causal, "seconds": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/cpu.json"))
    output = parser.parse_args().output
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for causal in (False, True):
            rows.append(row(dtype, causal))
            ours, theirs = (rows[-1]["seconds"][name] for name in ("fa_multi", "torch"))  # type: ignore[index]
            line = f"fa_multi {ours:.3f} s, torch {theirs:.3f} s: {ours / theirs:.2f}x"
            print(f"{rows[-1]['dtype']:9} causal={causal!s:5} {line}")
    meta = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
