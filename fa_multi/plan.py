"""How a program is cut into tiles and overlapped: numbers a backend chooses, none of which changes what is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Plan:
    """Tile sizes and overlap.

    block_m, block_n: query rows and keys of a tile.
    head_dim, head_dim_v: columns of the tiles on chip; at least the spec's, the rest is zero.
    depth: slots of the ring of a channel, by tile name (1 where a tile is not named).
    skew: tiles that the score half of the loop runs ahead of the output half.
    signal_interval: tiles that one ready or free signal stands for (Ascend).
    groups: compute warpgroups of a block (Hopper), each owning block_m / groups rows; they take turns if `ping_pong`.
    cores: blocks that share the tasks in a persistent loop; 0 gives one block per task.
    """

    block_m: int
    block_n: int
    head_dim: int
    head_dim_v: int
    depth: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    skew: int = 0
    signal_interval: int = 1
    groups: int = 1
    ping_pong: bool = False
    cores: int = 0

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        depth = ",".join(f"{k}:{v}" for k, v in sorted(self.depth.items()))
        return (
            f"tile {self.block_m}x{self.block_n}, head dims {self.head_dim}/{self.head_dim_v}, depth {depth or 1}, "
            f"skew {self.skew}, signal every {self.signal_interval}, groups {self.groups}"
            f"{' ping-pong' if self.ping_pong else ''}, cores {self.cores or 'one per task'}"
        )
