"""Speed of decode against FlashAttention-3, on one NVIDIA GPU: one query per sequence, bf16, 32 query and 8 key heads
of 128. The result is bytes of keys and values over time; FA3 reads a contiguous cache in every row, and "read" is the
speed of a kernel that only reads the same bytes, in large copies in memory order.

A CUDA graph makes a call for each of several layers, as a decode step does; every layer has a cache of its own. All in
one process on the same inputs: verify, then time in alternating order, medians. Needs the fa3_fwd package for the FA3
column (left out where it is absent).

    python benchmarks/decode.py -o benchmarks/results/decode_h200.json
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from fa_multi.backends.cuda import runtime
from measuring import Run, in_graph, meta, ratios, reference, start, time_all, verify, write

import fa_multi

SHAPES = ((1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (64, 4096), (64, 8192), (128, 2048))
HEADS_Q, HEADS_K, DIM = 32, 8, 128
PAGES = (None, 1, 16, 64, 256)
LAYERS, LEAST_BYTES = 8, 256 << 20  # small caches: more layers, so that they are several times the L2


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

    def read(self) -> Run:
        """Nothing but the reading of keys and values."""
        text = Path(__file__).with_name("read_kernel.py").read_text()
        kernel = runtime.load("read", text, runtime.arch_of(self.k.device))
        blocks = torch.cuda.get_device_properties(self.k.device).multi_processor_count
        flat = [x.view(-1, 64) for x in (self.k, self.v)]
        return lambda: kernel(*flat, blocks)


def measure(batch: int, seq: int, rounds: int, milliseconds: float) -> list[dict[str, Any]]:
    """The rows of one shape, one for each page size."""
    size = batch * seq * HEADS_K * DIM * 2 * 2
    caches = [Cache(batch, seq) for _ in range(max(LAYERS, LEAST_BYTES // size))]
    first, group = caches[0], HEADS_Q // HEADS_K  # the heads of the last key head and sequence
    want = reference(first.q[-1, 0, -group:], first.k[-1, :, -1], first.v[-1, :, -1])
    rows = []
    for page in PAGES:
        calls = {"fa_multi": [c.call(page) for c in caches]}
        peers = [run for c in caches if (run := c.fa3())]
        if peers:
            calls["fa3"] = peers
        error = verify({name: of[0] for name, of in calls.items()}, want, (-1, 0, slice(-group, None)))
        calls["read"] = [c.read() for c in caches]
        times = time_all({name: in_graph(of) for name, of in calls.items()}, rounds, milliseconds)
        times = {name: t / len(caches) for name, t in times.items()}
        rows.append({
            "shape": [batch, HEADS_Q, HEADS_K, seq, DIM],
            "page": page,
            "dtype": "bfloat16",
            "gib": size / 2**30,
            "tbps": {name: round(size / t / 1e9, 3) for name, t in times.items()},
            "milliseconds": {name: round(t, 5) for name, t in times.items()},
            "rel_l2": float(f"{error:.1e}"),
        })  # fmt: skip
    return rows


def main() -> None:
    args = start(__doc__)
    rows = []
    print(f"{'B,S':>10} {'GiB':>6} {'page':>5} {'fa_multi':>9} {'fa3':>6} {'read':>6}  TB/s   of fa3, of read")
    for batch, seq in SHAPES:
        for row in measure(batch, seq, args.rounds, args.ms):
            rows.append(row)
            t = row["tbps"]
            of = " ".join(f"{t['fa_multi'] / t[peer]:.3f}" if peer in t else "  -  " for peer in ("fa3", "read"))
            columns = f"{row['gib']:6.2f} {row['page'] or '-':>5} {t['fa_multi']:9.2f} {t.get('fa3', math.nan):6.2f}"
            print(f"{f'{batch},{seq}':>10} {columns} {t['read']:6.2f}         {of}", flush=True)
    for peer in ("fa3", "read"):
        print(ratios(rows, "tbps", peer))
    if args.output:
        write(args.output, meta() | {"bytes": "batch seq heads_k (dim + dim_v) 2", "layers": LAYERS}, rows)


if __name__ == "__main__":
    main()
