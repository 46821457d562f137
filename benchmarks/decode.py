"""Speed of decode against FlashAttention-3, on one NVIDIA GPU: one query per sequence, bf16, 32 query and 8 key heads
of 128, in CUDA graphs. The result is bytes of keys and values over time; FA3 reads a contiguous cache in every row.

All in one process on the same inputs: verify, then time in alternating order, medians. Caches that fit into the L2 are
rotated. Needs the fa3_fwd package for the FA3 column (left out where it is absent).

    python benchmarks/decode.py -o benchmarks/results/decode_h200.json
"""

from __future__ import annotations

import math
from typing import Any

import torch
from measuring import Run, in_graph, meta, ratios, reference, start, time_all, verify, write

import fa_multi

SHAPES = ((1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (64, 4096), (64, 8192), (128, 2048))
HEADS_Q, HEADS_K, DIM = 32, 8, 128
PAGES = (None, 16, 64, 256)
ROTATION = 256 << 20  # bytes, several times the L2


class Cache:
    """One cache of random keys and values, contiguous, and as shuffled pages of any size."""

    def __init__(self, batch: int, seq: int) -> None:
        self.batch, self.seq = batch, seq
        self.q = torch.randn(batch, 1, HEADS_Q, DIM, device="cuda", dtype=torch.bfloat16)
        self.k, self.v = (torch.randn(batch, seq, HEADS_K, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.lengths = torch.full((batch,), seq, dtype=torch.int32, device="cuda")

    def call(self, page: int | None) -> Run:
        """Our call."""
        if page is None:
            return lambda: fa_multi.attention_paged(self.q, self.k, self.v, cache_seqlens=self.lengths)
        count = self.batch * self.seq // page
        table = torch.randperm(count, device="cuda", dtype=torch.int32).view(self.batch, -1)
        pools = []
        for x in (self.k, self.v):
            pool = torch.empty(count, page, HEADS_K, DIM, device="cuda", dtype=x.dtype)
            pool[table.flatten().long()] = x.view(count, page, HEADS_K, DIM)
            pools.append(pool)
        return lambda: fa_multi.attention_paged(self.q, *pools, block_table=table, cache_seqlens=self.lengths)

    def fa3(self) -> Run | None:
        """FlashAttention-3's."""
        try:
            from fa3_fwd_interface import flash_attn_with_kvcache
        except ImportError:
            return None
        return lambda: flash_attn_with_kvcache(self.q, self.k, self.v, cache_seqlens=self.lengths)


def measure(batch: int, seq: int, page: int | None, rounds: int, milliseconds: float) -> dict[str, Any]:
    """One row of the result."""
    size = batch * seq * HEADS_K * DIM * 2 * 2
    caches = [Cache(batch, seq) for _ in range(-(-ROTATION // size))]
    calls = {"fa_multi": [c.call(page) for c in caches]}
    peers = [run for c in caches if (run := c.fa3())]
    if peers:
        calls["fa3"] = peers
    first, group = caches[0], HEADS_Q // HEADS_K  # the heads of the last key head and sequence
    want = reference(first.q[-1, 0, -group:], first.k[-1, :, -1], first.v[-1, :, -1])
    error = verify({name: of[0] for name, of in calls.items()}, want, (-1, 0, slice(-group, None)))
    times = time_all({name: in_graph(of) for name, of in calls.items()}, rounds, milliseconds)
    times = {name: t / len(caches) for name, t in times.items()}
    return {
        "shape": [batch, HEADS_Q, HEADS_K, seq, DIM],
        "page": page,
        "dtype": "bfloat16",
        "gib": size / 2**30,
        "tbps": {name: round(size / t / 1e9, 3) for name, t in times.items()},
        "milliseconds": {name: round(t, 5) for name, t in times.items()},
        "rel_l2": float(f"{error:.1e}"),
    }


def main() -> None:
    args = start(__doc__)
    rows = []
    print(f"{'B,S':>10} {'GiB':>6} {'page':>5} {'fa_multi':>9} {'fa3':>6}  TB/s   of fa3 (contiguous)")
    for batch, seq in SHAPES:
        for page in PAGES:
            row = measure(batch, seq, page, args.rounds, args.ms)
            rows.append(row)
            t = row["tbps"]
            ratio = f"{t['fa_multi'] / t['fa3']:.3f}" if "fa3" in t else "-"
            columns = f"{row['gib']:6.2f} {page or '-':>5} {t['fa_multi']:9.2f} {t.get('fa3', math.nan):6.2f}"
            print(f"{f'{batch},{seq}':>10} {columns}         {ratio}", flush=True)
    print(ratios(rows, "tbps", "fa3"))
    if args.output:
        write(args.output, meta() | {"bytes": "batch seq heads_k (dim + dim_v) 2"}, rows)


if __name__ == "__main__":
    main()
