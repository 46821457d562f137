"""What the GPU benchmarks share: timing in alternating order, graphs, what it was measured on, results as JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fa_multi
from fa_multi.cache import write_atomic

Run = Callable[[], Any]


def start(doc: str | None) -> argparse.Namespace:
    """What the user asked for: output, rounds, ms. Ends the program where there is no GPU, with the reason."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file for the rows")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each library per row (default 7)")
    parser.add_argument("--ms", type=float, default=20.0, help="work per measurement in milliseconds (default 20)")
    args = parser.parse_args()
    reason = fa_multi.unavailable("cuda")
    if reason:
        raise SystemExit(f"the cuda lane cannot run here: {reason}")
    torch.manual_seed(0)
    return args


def time_all(runs: dict[str, Run], rounds: int, milliseconds: float) -> dict[str, float]:
    """Median milliseconds of each, in alternating order, each measurement over at least `milliseconds` of work."""
    repeats = {name: max(3, math.ceil(milliseconds / max(_time(run, 2), 1e-2))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(rounds):
        for name in list(runs) if n % 2 == 0 else reversed(runs):
            times[name].append(_time(runs[name], repeats[name]))
    return {name: statistics.median(t) for name, t in times.items()}


def _time(run: Run, repeats: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def in_graph(calls: Sequence[Run]) -> Run:
    """One replay of a CUDA graph that makes all calls, one after the other."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error; NaN where there is any."""
    return float((got.double() - want).norm() / want.norm())


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, window: int | None = None
) -> torch.Tensor:
    """Attention of one head's last rows in fp64: q (rows, dim), k and v (keys, dim)."""
    scores = q.double() @ k.double().T / math.sqrt(q.shape[1])
    if causal:
        position = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        key = torch.arange(len(k), device=q.device)[None]
        scores.masked_fill_((key > position) | (key <= position - (window or len(k))), -math.inf)
    return torch.softmax(scores, -1) @ v.double()


def verify(runs: dict[str, Run], want: torch.Tensor, where: Any) -> float:
    """Largest relative L2 error of all, at a place of the result; ends the program where one is wrong."""
    worst = 0.0
    for name, run in runs.items():
        result = run()
        error = relative_error((result[0] if isinstance(result, tuple) else result)[where], want)
        if not error < 5e-3:
            raise SystemExit(f"{name} is wrong: relative L2 error {error:.1e}")
        worst = max(worst, error)
    return worst


def meta() -> dict[str, Any]:
    """What the numbers were measured on and with."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.date.today().isoformat(),
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "versions": {name: _version(name) for name in ("tilelang", "fa3_fwd")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def ratios(rows: Sequence[dict[str, Any]], unit: str, against: str) -> str:
    """Geometric mean and smallest ratio to a peer, in a unit where more is better."""
    found = [r[unit]["fa_multi"] / r[unit][against] for r in rows if against in r[unit]]
    if not found:
        return f"{against}: not here"
    mean = math.exp(statistics.fmean(map(math.log, found)))
    return f"fa_multi / {against}: geometric mean {mean:.3f}, smallest {min(found):.3f}, of {len(found)} rows"


def write(path: Path, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """The results of one run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"meta": about, "rows": list(rows)}, indent=1) + "\n")
    print(f"wrote {path}")
