"""Device memory that a call needs besides its results, kept for the next call.

Each thread has its own per stream, since calls on a stream run in order. A CUDA graph under capture gets memory of its
own, which the graph keeps: it may be replayed when the kept one has been replaced, or beside calls that use it.
"""

from __future__ import annotations

import threading

import torch


class _Rooms(threading.local):
    """Of one thread, by use, device and stream."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.device, int], torch.Tensor] = {}


_rooms = _Rooms()


def partials(numel: int, device: torch.device) -> torch.Tensor:
    """At least `numel` float32, with anything in them."""
    return _room("partials", numel, torch.float32, device)


def counters(numel: int, device: torch.device) -> torch.Tensor:
    """`numel` int32, zero as long as every kernel that counts with them sets them back."""
    return _room("counters", numel, torch.int32, device)


def _room(use: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    make = torch.zeros if use == "counters" else torch.empty
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return make(numel, dtype=dtype, device=device)
    key = (use, device, _stream(device))
    room = _rooms.kept.get(key)
    if room is None or room.numel() < numel:
        room = _rooms.kept[key] = make(numel, dtype=dtype, device=device)
    return room


def _stream(device: torch.device) -> int:
    """The current stream of a device; the CPU has one."""
    if device.type == "cpu":
        return 0
    stream = getattr(torch, device.type).current_stream(device)
    return int(getattr(stream, f"{device.type}_stream"))
