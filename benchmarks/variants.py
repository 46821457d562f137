"""Speed of packed and of windowed prefill, on one NVIDIA GPU: packed sequences against the dense kernel at equal work,
and against FlashAttention-3; windows against their width. bf16; FLOPs count visible pairs of query and key alone.

All in one process on the same inputs: verify, then time in alternating order, medians. Needs the fa3_fwd package for
the FA3 column (left out where it is absent).

    python benchmarks/variants.py -o benchmarks/results/variants_h200.json
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from measuring import Run, meta, reference, start, time_all, verify, write

import fa_multi

HEADS = {128: 16, 64: 32, 256: 8}  # by head dim: 2048 columns in all
EQUAL = ((2048,) * 8, (4096,) * 4)
MIXED = ((256, 3840, 1024, 2048, 512, 3072, 1536, 4096), (100, 1, 5000, 333, 2222, 64, 1777, 4000, 2887))
WINDOW_SEQ, WINDOWS = 16384, (256, 512, 1024, 2048, 4096, 8192, 16384)


def pairs(queries: int, causal: bool, window: int | None = None) -> int:
    """Visible pairs of one sequence of equal query and key lengths."""
    if not causal:
        return queries * queries
    width = min(window or queries, queries)
    return width * (width + 1) // 2 + (queries - width) * width


def varlen(lengths: tuple[int, ...], dim: int, causal: bool, rounds: int, milliseconds: float) -> dict[str, Any]:
    """Packed sequences, and dense ones of as many pairs where all lengths are equal."""
    heads, total, longest = HEADS[dim], sum(lengths), max(lengths)
    q, k, v = (torch.randn(total, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    runs: dict[str, Run] = {"fa_multi": lambda: fa_multi.attention_varlen(q, k, v, causal=causal, **ends)}
    try:
        from fa3_fwd_interface import flash_attn_varlen_func
    except ImportError:
        pass
    else:
        runs["fa3"] = lambda: flash_attn_varlen_func(q, k, v, causal=causal, **ends)
    rows = min(lengths[-1], 256)
    mine = slice(total - lengths[-1], total)
    want = reference(q[-rows:, -1], k[mine, -1], v[mine, -1], causal, None)
    error = verify(runs, want, (slice(-rows, None), -1))
    if len(set(lengths)) == 1:
        dense = [x.view(len(lengths), longest, heads, dim) for x in (q, k, v)]
        runs["dense"] = lambda: fa_multi.attention(*dense, causal=causal)
    flops = 4 * heads * dim * sum(pairs(n, causal) for n in lengths)
    about = {"kind": "varlen", "lengths": list(lengths), "heads": heads, "dim": dim, "causal": causal}
    return about | _measured(runs, flops, rounds, milliseconds) | {"rel_l2": float(f"{error:.1e}")}


def windowed(window: int, dim: int, rounds: int, milliseconds: float) -> dict[str, Any]:
    """One causal sequence with a window of so many keys, a query's own included."""
    heads, seq = HEADS[dim], WINDOW_SEQ
    q, k, v = (torch.randn(1, seq, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    sides = (window - 1, 0)
    runs: dict[str, Run] = {"fa_multi": lambda: fa_multi.attention(q, k, v, causal=True, window_size=sides)}
    want = reference(q[0, -256:, -1], k[0, :, -1], v[0, :, -1], True, window)
    error = verify(runs, want, (0, slice(-256, None), -1))
    flops = 4 * heads * dim * pairs(seq, True, window)
    about = {"kind": "window", "shape": [1, heads, seq, dim], "window": window}
    return about | _measured(runs, flops, rounds, milliseconds) | {"rel_l2": float(f"{error:.1e}")}


def _measured(runs: dict[str, Run], flops: int, rounds: int, milliseconds: float) -> dict[str, Any]:
    times = time_all(runs, rounds, milliseconds)
    return {
        "dtype": "bfloat16",
        "tflops": {name: round(flops / t / 1e9, 1) for name, t in times.items()},
        "milliseconds": {name: round(t, 4) for name, t in times.items()},
    }


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    t = row["tflops"]
    what = f"window {row['window']}" if row["kind"] == "window" else ",".join(map(str, row["lengths"]))
    dim = row["dim"] if row["kind"] == "varlen" else row["shape"][3]
    mask = "full" if row.get("causal") is False else "causal"
    against = [f"{peer} {t[peer]:.0f} ({t['fa_multi'] / t[peer]:.3f})" for peer in ("dense", "fa3") if peer in t]
    return (
        f"{what[:42]:>42} D{dim:<4}{mask:7}{row['milliseconds']['fa_multi']:9.3f} ms {t['fa_multi']:5.0f} TFLOPS   "
        + ("   ".join(against))
    )


def main() -> None:
    args = start(__doc__)
    rows = []
    for lengths, dim, causal in itertools.product((*EQUAL, *MIXED), HEADS, (False, True)):
        rows.append(varlen(lengths, dim, causal, args.rounds, args.ms))
        print(line(rows[-1]), flush=True)
    for dim, window in itertools.product((128, 64), WINDOWS):
        rows.append(windowed(window, dim, args.rounds, args.ms))
        print(line(rows[-1]), flush=True)
    if args.output:
        write(args.output, meta() | {"flops": "4 dim per visible pair and head"}, rows)


if __name__ == "__main__":
    main()
