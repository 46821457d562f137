"""What the hardware and the compiler cannot do. The compiler checks none of this (it crashes, or emits wrong code), so
everything here is checked before any text is emitted. Sources: the pinned compiler's templates and its capacity table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .instructions import DTYPE_BYTES, Buffer

CAPACITY = {"L1": 524032, "L0A": 65536, "L0B": 65536, "L0C": 131072, "UB": 196352}  # bytes, A2 and A3
ALIGNMENT = {"L1": 32, "L0C": 64, "UB": 32}  # bytes
EVENTS = 8  # ids per directed pair of pipes
RESERVED_EVENTS = frozenset({0, 1})  # the templates of gemm and of partial copies use these themselves
CROSS_FLAGS = 11  # ids 0..10 between cube and vector; the rest belongs to sync_all
OUTSTANDING = 15  # sets of one cross flag that the hardware counts
FRACTAL = 16  # rows and columns of a matrix fragment
L0_SLICE = 128  # columns of K that one step of gemm_v0 takes
ROW_BASE = 1 << 30  # added to every row index, see emit.py
MAX_ROWS = ROW_BASE - 1
INT32 = 1 << 31
MAX_GROUP = 1 << 14  # heads that share a tile: a row's query is found by a division in fp32


class LimitError(ValueError):
    """A kernel would exceed the hardware or hit a compiler fault. The message names what, how much, and the limit."""


def check_buffers(buffers: Iterable[Buffer], reserved: dict[str, int]) -> None:
    """Every buffer aligned and inside its memory. reserved: bytes per memory that the compiler takes behind them."""
    for b in buffers:
        limit = CAPACITY[b.memory] - reserved.get(b.memory, 0)
        if b.offset % ALIGNMENT[b.memory]:
            raise LimitError(
                f"buffer {b.name} starts at byte {b.offset} of {b.memory}, which takes multiples of "
                f"{ALIGNMENT[b.memory]}"
            )
        if b.offset + b.bytes > limit:
            raise LimitError(
                f"{b.memory} is full: buffer {b.name} ends at byte {b.offset + b.bytes}, the limit is "
                f"{limit}; use smaller tiles"
            )
        if b.memory == "UB" and len(b.shape) > 1 and b.shape[-1] * DTYPE_BYTES[b.dtype] % 32:
            raise LimitError(f"buffer {b.name}: rows of {b.shape[-1]} {b.dtype} are not a multiple of 32 bytes")


def check_gemm(name: str, m: int, n: int, k: int, dtype: str) -> None:
    """Shape limits of gemm_v0: fragments, the split of K, and the L0 memories it owns."""
    if dtype not in ("float16", "bfloat16"):
        raise LimitError(f"product {name}: {dtype} operands are not supported, only float16 and bfloat16")
    for label, size in (("M", m), ("N", n), ("K", k)):
        if size % FRACTAL:
            raise LimitError(f"product {name}: {label} = {size} is not a multiple of {FRACTAL}")
    if k > L0_SLICE and k % L0_SLICE:
        raise LimitError(
            f"product {name}: K = {k} is above {L0_SLICE} and not a multiple of it; the compiler takes a "
            "wrong offset for the tail"
        )
    slices = 2 if k > L0_SLICE else 1  # the ascendc template keeps two slices
    for label, rows in (("L0A", m), ("L0B", n)):
        size = slices * rows * min(k, L0_SLICE) * DTYPE_BYTES[dtype]
        if size > CAPACITY[label]:
            raise LimitError(f"product {name}: {label} would need {size} bytes, it has {CAPACITY[label]}")


def check_sizes(sizes: Mapping[str, int], tasks: int, rows: Mapping[str, int]) -> None:
    """Run-time limits of the 32-bit scalars of a kernel: rows, positions and task numbers.

    sizes: the program's run-time sizes. tasks: the number of them. rows: what counts rows or positions, by name.
    """
    for name, value in rows.items():
        if value > MAX_ROWS:
            raise LimitError(f"{name} = {value} is above {MAX_ROWS}")
    if tasks >= INT32:
        raise LimitError(f"{tasks} tasks do not fit 32 bits; split the batch")
    group = sizes.get("heads_q", 1) // max(1, sizes.get("heads_k", 1))
    if group > MAX_GROUP:
        raise LimitError(f"{group} query heads share a key head, the kernel counts to {MAX_GROUP}")


def check_window(name: str, strides: Mapping[str, int], row_axis: str, columns: int, span: int) -> None:
    """A tensor of rows. strides: by axis, in elements. row_axis: the one along which rows run; its stride is the pitch.
    span: elements from the first to the last."""
    pitch = strides[row_axis]
    if min(strides.values()) < 0:
        raise LimitError(f"tensor {name}: negative strides are not supported; pass a contiguous copy")
    if pitch < columns or span > pitch * ROW_BASE:
        raise LimitError(
            f"tensor {name}: a stride of {pitch} along axis {row_axis} cannot address {span} elements; "
            "pass a contiguous copy"
        )


def check_flat(name: str, elements: int) -> None:
    """A contiguous tensor of single values, addressed in 32 bits."""
    if elements >= INT32:
        raise LimitError(f"tensor {name}: {elements} elements do not fit 32 bits; split the batch")
