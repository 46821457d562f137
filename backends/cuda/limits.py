"""What the architectures offer, and what a kernel may use of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fa_multi.tiles import Tile

KIB = 1024

# Shared memory a block may have, by architecture (CUDA C++ Programming Guide, technical specifications).
SHARED_BYTES = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_87": 163 * KIB,
    "sm_89": 99 * KIB,
    "sm_90a": 227 * KIB,
    "sm_100a": 227 * KIB,
    "sm_103a": 227 * KIB,
    "sm_110a": 227 * KIB,
    "sm_120a": 99 * KIB,
    "sm_121a": 99 * KIB,
}
DEFAULT_ARCH = "sm_90a"
ROLES_ARCH = "sm_90a"  # the one with wgmma: only there does the role form exist

# Barriers and the alignment of the tiles take a little more than the tiles themselves.
SHARED_RESERVE = KIB


L2_BYTES = 32 << 20  # of the L2, for keys and values that are read again: of the H100's 50 MB, with room for the rest


def registers(groups: int, columns: int) -> tuple[int, int]:
    """Registers of a thread of the loader and of the compute warpgroups (setmaxnreg), for an accumulator of so many
    columns. Together at most what the block is launched with, 168 a thread for three warpgroups, 128 for four; more
    than that would wait for ever. 24 are few for the loader, so it has 40 where the accumulator leaves room, and with
    one compute warpgroup there is room for all."""
    if groups == 3:
        return 32, 160
    if groups == 1:
        return 96, 232
    return (24, 240) if columns > 192 else (40, 232)


def follows(arch: str) -> bool:
    """Can a kernel be launched before the one in front of it is done, and wait inside? From compute capability 9.0."""
    return arch.endswith("a")


class LimitError(ValueError):
    """A kernel does not fit; the message says what, how much, and what the limit is."""


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture name of a compute capability; from 9.0 on with the features of that chip alone ("a")."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def unknown_arch(arch: str) -> str | None:
    """None, or why there are no kernels for an architecture."""
    if arch in SHARED_BYTES:
        return None
    digits = re.fullmatch(r"sm_(\d+)\d[a-z]?", arch)
    if digits and int(digits[1]) < 8:
        return f"the cuda lane needs compute capability 8.0 or later (bfloat16 matrix units), got {arch}"
    return f"arch must be one of {', '.join(SHARED_BYTES)}, got {arch!r}"


def check_shared(rings: Iterable[tuple[Tile, int]], arch: str) -> None:
    """Raise LimitError unless the shared tiles, each with its number of slots, fit."""
    parts = [(tile, slots, tile.bytes * slots) for tile, slots in rings]
    total, limit = sum(size for *_, size in parts) + SHARED_RESERVE, SHARED_BYTES[arch]
    if total > limit:
        listed = ", ".join(f"{tile} {slots} x {tile.bytes}" for tile, slots, _ in parts)
        raise LimitError(f"shared memory of {arch}: {total} bytes needed ({listed}), the limit is {limit}")
