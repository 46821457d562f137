"""Speed of prefill attention against FlashAttention-3 and cuDNN, on one NVIDIA GPU: bf16, the 18 usual shapes.

All in one process on the same inputs: verify, then time in alternating order, medians. Ratios are the result; absolute
TFLOPS belong to the GPU named. Needs the fa3_fwd package for the FA3 column (left out where it is absent).

    python benchmarks/prefill.py -o benchmarks/results/prefill_h200.json
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from measuring import Run, meta, ratios, reference, start, time_all, verify, write
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_multi

SEQUENCES = ((8, 2048), (4, 4096), (1, 16384))  # (batch, length)
HEADS = {128: 16, 64: 32, 256: 8}  # by head dim: 2048 columns in all
SHAPES = [(b, HEADS[d], s, d, causal) for d in HEADS for causal in (False, True) for b, s in SEQUENCES]


def contestants(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Run]:
    """Everything that computes the same, by name. Inputs are (batch, seq, heads, dim)."""
    bhsd = [x.transpose(1, 2) for x in (q, k, v)]

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*bhsd, is_causal=causal).transpose(1, 2)

    runs: dict[str, Run] = {"fa_multi": lambda: fa_multi.attention(q, k, v, causal=causal)}
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        pass
    else:
        runs["fa3"] = lambda: flash_attn_func(q, k, v, causal=causal)
    return runs | {"cudnn": cudnn}


def host_microseconds() -> float:
    """Host time of one call on a tiny shape, everything included."""
    q = torch.randn(1, 16, 1, 128, device="cuda", dtype=torch.bfloat16)
    samples = []
    for _ in range(7):
        fa_multi.attention(q, q, q)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            fa_multi.attention(q, q, q)
        samples.append((time.perf_counter() - begin) / 200 * 1e6)
        torch.cuda.synchronize()
    return statistics.median(samples)


def measure(shape: tuple[int, int, int, int, bool], rounds: int, milliseconds: float) -> dict[str, Any]:
    """One row of the result."""
    batch, heads, seq, dim, causal = shape
    q, k, v = (torch.randn(batch, seq, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    runs = contestants(q, k, v, causal)
    rows = min(512, seq)
    want = reference(q[-1, -rows:, -1], k[-1, :, -1], v[-1, :, -1], causal)
    error = verify(runs, want, (-1, slice(-rows, None), -1))
    times = time_all(runs, rounds, milliseconds)
    flops = 4 * batch * heads * seq * seq * dim / (2 if causal else 1)
    return {
        "shape": [batch, heads, seq, dim],
        "causal": causal,
        "dtype": "bfloat16",
        "tflops": {name: round(flops / t / 1e9, 1) for name, t in times.items()},
        "milliseconds": {name: round(t, 4) for name, t in times.items()},
        "rel_l2": float(f"{error:.1e}"),
    }


def main() -> None:
    args = start(__doc__)
    host = round(host_microseconds(), 1)  # first: once FA3 has run in a process, every launch of it takes 9 us longer
    rows = []
    print(f"{'B,H,S,D':>18} {'':6} {'fa_multi':>9} {'fa3':>7} {'cudnn':>7}  TFLOPS   of fa3")
    for shape in SHAPES:
        row = measure(shape, args.rounds, args.ms)
        rows.append(row)
        t = row["tflops"]
        ratio = f"{t['fa_multi'] / t['fa3']:.3f}" if "fa3" in t else "-"
        name = ",".join(map(str, row["shape"]))
        columns = f"{t['fa_multi']:9.0f} {t.get('fa3', math.nan):7.0f} {t['cudnn']:7.0f}"
        print(f"{name:>18} {'causal' if row['causal'] else 'full':6} {columns}          {ratio}", flush=True)
    for peer in ("fa3", "cudnn"):
        print(ratios(rows, "tflops", peer))
    print(f"host time of one call: {host} us")
    if args.output:
        about = {"flops": "4 batch heads seq^2 dim, halved when causal", "host_microseconds": host}
        write(args.output, meta() | about, rows)


if __name__ == "__main__":
    main()
