"""Memory that calls share: one buffer per thread and use, grown when needed."""

from __future__ import annotations

import threading

import torch

import fa_multi
from fa_multi import workspace

CPU = torch.device("cpu")


def test_the_buffer_is_kept_and_grows() -> None:
    big = workspace.partials(1 << 20, CPU)
    assert workspace.partials(5, CPU) is big
    bigger = workspace.partials(big.numel() + 1, CPU)
    assert bigger.numel() > big.numel()
    assert workspace.partials(5, CPU) is bigger


def test_uses_and_threads_do_not_share() -> None:
    mine, counters = workspace.partials(8, CPU), workspace.counters(2, CPU)
    assert counters.dtype == torch.int32
    assert not bool(counters.any())
    theirs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: theirs.append(workspace.partials(8, CPU)))
    thread.start()
    thread.join()
    assert theirs[0].data_ptr() != mine.data_ptr()


def test_split_calls_allocate_no_partial_results_twice() -> None:
    q, k = torch.randn(2, 1, 4, 32), torch.randn(2, 300, 2, 32)
    first = fa_multi.attention_paged(q, k, k, num_splits=3)
    room = workspace.partials(1, CPU)
    room.fill_(float("nan"))  # what an earlier call left there must not matter
    assert torch.equal(first, fa_multi.attention_paged(q, k, k, num_splits=3))
    assert workspace.partials(1, CPU) is room
