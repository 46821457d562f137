"""The simulator sees what hardware punishes with a hang or with noise.

All faults are branches of one small C++ text in the emitted form, chosen by its argument `n`: it is compiled once.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fa_multi.backends.ascend import toolchain
from fa_multi.backends.ascend.simulator import SimulationError, load
from fa_multi.backends.ascend.simulator.build import parse_params
from fa_multi.backends.ascend.toolchain import ToolchainError

HEADER = """
#include "tl_templates/pto/common.h"
#include <pto/pto-inst.hpp>
using namespace pto;
extern "C" __global__ AICORE void main_kernel(__gm__ uint8_t *x_handle_raw, int32_t n, int64_t m, uint64_t ffts_Addr) {
  __gm__ float *x_handle = reinterpret_cast<__gm__ float *>(x_handle_raw);
  auto cid = get_block_idx();
  auto vid = get_subblockid();
#if defined(__DAV_C220_CUBE__)
%s
#endif
#if defined(__DAV_C220_VEC__)
%s
#endif
}
extern "C" void call(uint8_t *x_handle, int n, int64_t m, void *stream) {}
"""


def cross_set(pipe: str, flag: int) -> str:
    return f"tl::ascend_pto::set_cross_flag<PIPE_{pipe}>({flag}, 2);"


def cross_wait(flag: int) -> str:
    return f"tl::ascend_pto::wait_cross_flag({flag});"


def times(count: str, code: str) -> str:
    return f"for (int i = 0; i < {count}; ++i) {{ {code} }}"


TILE = "tl::ascend_pto::TileUbDataND<float, 1, 64, 1, 64> t; TASSIGN(t, {});"
# name -> (cube code, vector code)
CASES = {
    "sound": ("", ""),
    "scalars": (cross_set("FIX", 3), cross_wait(3) + "if (vid == 0) { x_handle[0] = n; x_handle[1] = m >> 30; }"),
    "deadlock": (cross_wait(2), cross_wait(4)),
    "one vector core": (cross_wait(2), f"if (vid == 0) {{ {cross_set('MTE3', 2)} }}"),
    "left set": (cross_set("FIX", 5), ""),
    "no peer": ("", f"if (vid == 0) {{ {cross_set('MTE3', 5)} }}"),
    "outstanding 15": (
        times("15", cross_set("FIX", 0)) + cross_set("FIX", 1),
        cross_wait(1) + times("15", cross_wait(0)),
    ),
    "outstanding 16": (
        times("16", cross_set("FIX", 0)) + cross_set("FIX", 1),
        cross_wait(1) + times("16", cross_wait(0)),
    ),
    "set id 11": (cross_set("FIX", 11), ""),
    "wait id 16": ("", cross_wait(16)),
    "event left": ("", "set_flag(PIPE_V, PIPE_MTE3, 2);"),
    "event unset": ("", "wait_flag(PIPE_V, PIPE_MTE3, 2);"),
    "event twice": ("", "set_flag(PIPE_V, PIPE_MTE3, 2); set_flag(PIPE_V, PIPE_MTE3, 2);"),
    "event id 8": ("", "set_flag(PIPE_V, PIPE_MTE3, 8);"),
    "last bytes": ("", TILE.format(196608 - 256)),
    "past the end": ("", TILE.format(196608)),
    "unwritten": ("", TILE.format(0) + "if (vid == 0) x_handle[0] = t.data()[0];"),
    "wild": ("", "if (vid == 0) x_handle[m] = 1;"),
    "ping-pong": (times("3", cross_set("FIX", 0) + cross_wait(1)), times("3", cross_wait(0) + cross_set("MTE2", 1))),
}


def _text() -> str:
    branches = [[f"if (n == {i}) {{ {code[core]} }}" for i, code in enumerate(CASES.values())] for core in (0, 1)]
    return HEADER % tuple("\n".join(b) for b in branches)


def run(case: str, timeout: float = 5.0, **kwargs: object):
    x = torch.zeros(64)
    report = load(_text(), "test").run(1, [x], [list(CASES).index(case), 1 << 40], timeout=timeout, **kwargs)
    return x, report


def test_parameters_in_order() -> None:
    name, params = parse_params(HEADER % ("", ""))
    assert name == "main_kernel"
    assert [(p.name, p.kind) for p in params] == [("x", "tensor"), ("n", "scalar"), ("m", "scalar")]


@pytest.mark.sim
def test_scalars_and_counts() -> None:
    x, report = run("scalars")
    assert x[0] == list(CASES).index("scalars")
    assert x[1] == 1024
    assert report.flags["AIC"] == {3: (1, 0)}
    assert report.flags["AIV0"] == {3: (0, 1)}


@pytest.mark.sim
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("deadlock", r"deadlock(.|\n)*AIC timed out waiting for cross flag 2"),
        ("one vector core", "AIC timed out waiting for cross flag 2"),
        ("left set", "AIV1 leaves cross flag 5 at 1 at the end"),
        ("no peer", "AIV0 set cross flag 5 without its peer"),
        ("outstanding 16", "cross flag 0 reached 16 outstanding sets, the limit is 15"),
        ("set id 11", r"sets cross flag 11, outside 0\.\.10"),
        ("wait id 16", r"waits for cross flag 16, outside 0\.\.10"),
        ("event left", "leaves V->MTE3 event 2 set at the end"),
        ("event unset", "waits before any set of V->MTE3 event 2"),
        ("event twice", "sets twice without a wait V->MTE3 event 2"),
        ("event id 8", "uses V->MTE3 event 8"),
        ("past the end", "broke a rule of the simulator"),
        ("wild", "touched memory outside every tensor"),
    ],
)
def test_fault_is_named(case: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        run(case, timeout=0.5)
    run("sound")  # and the next run is not disturbed


@pytest.mark.sim
@pytest.mark.parametrize("case", ["outstanding 15", "last bytes", "ping-pong"])
def test_just_inside_the_limits(case: str) -> None:
    run(case)


@pytest.mark.sim
def test_unwritten_memory_is_nan() -> None:
    assert math.isnan(run("unwritten")[0][0])


@pytest.mark.sim
@pytest.mark.parametrize("delay", [(0, 2000), (2000, 0)])
def test_delays_change_nothing_in_a_sound_kernel(delay: tuple[int, int]) -> None:
    assert run("ping-pong", delay_us=delay)[1].flags == run("ping-pong")[1].flags


@pytest.mark.sim
def test_failed_build_leaves_nothing_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes may work in the same cache, so only what this build made is looked at."""
    from fa_multi.backends.ascend.simulator import build

    asked: list[Path] = []
    made = build._build

    def recorded(targets: list[Path], *rest: object) -> list[Path]:
        asked.extend(targets)
        return made(targets, *rest)

    run("sound")
    monkeypatch.setattr(build, "_build", recorded)
    with pytest.raises(ToolchainError, match=r"clang\+\+ refused kernel broken: .*error"):
        load(HEADER % ("this is not C++;", ""), "broken")
    libraries = [t for t in asked if t.suffix == ".so"]
    assert len(libraries) == 2
    assert not [t for t in libraries if t.exists()]


@pytest.mark.sim
def test_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fa_multi.backends.ascend.simulator import build

    run("sound")
    monkeypatch.setattr(build.subprocess, "Popen", None)
    run("sound")


@pytest.mark.sim
def test_wrong_arguments_are_refused() -> None:
    kernel = load(_text())
    with pytest.raises(ValueError, match="takes 1"):
        kernel.run(1, [], [1, 2])
    with pytest.raises(ValueError, match="scalars: the kernel takes 2"):
        kernel.run(1, [torch.zeros(1)], [1])


def test_needs_a_kernel_in_the_text() -> None:
    with pytest.raises(ValueError, match="no kernel in the text"):
        parse_params("int main() {}")


def test_headers_ship_with_the_package() -> None:
    folder = Path(toolchain.__file__).parent / "simulator"
    assert (folder / "host.cpp").exists()
    assert (folder / "include" / "stdfloat").exists()
