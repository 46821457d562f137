from __future__ import annotations

import pytest
import torch

from fa_multi import unavailable

LANE_OF_MARKER = {"gpu": "cuda", "npu": "npu", "sim": "npu-sim"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of a lane that this machine lacks are deselected, and the summary says so; naming the marker with -m runs
    them regardless, so that a CI job for that lane fails where its device is missing."""
    asked = config.getoption("-m")
    missing = {m: unavailable(lane) for m, lane in LANE_OF_MARKER.items() if m not in asked}
    dropped = {m: [i for i in items if i.get_closest_marker(m)] for m, reason in missing.items() if reason}
    gone = {id(i) for group in dropped.values() for i in group}
    if gone:
        config.hook.pytest_deselected(items=[i for i in items if id(i) in gone])
        items[:] = [i for i in items if id(i) not in gone]
    config.stash[_missing] = {m: (len(group), missing[m]) for m, group in dropped.items() if group}


_missing: pytest.StashKey[dict[str, tuple[int, str | None]]] = pytest.StashKey()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for marker, (count, reason) in terminalreporter.config.stash.get(_missing, {}).items():
        terminalreporter.write_line(f"not on this machine: {count} tests of marker {marker} ({reason})")


torch.set_num_threads(1)  # tests are small, and several run at once


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
