"""The Ascend compiler process and its cache. Most tests put a small Python script in the compiler's place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fa_multi.backends.ascend import compiler, toolchain
from fa_multi.backends.ascend.compiler import CompilerError, Worker
from fa_multi.backends.ascend.toolchain import ToolchainError

FAKE = """
import json, os, signal, sys, time
print(json.dumps({"ready": "fake"}), flush=True)
for line in sys.stdin:
    source = json.loads(line)["source"]
    if source == "crash": sys.stderr.write("a last word\\n"); sys.stderr.flush(); os.kill(os.getpid(), signal.SIGSEGV)
    if source == "hang": time.sleep(60)
    if source == "environment": source = " ".join(sorted(os.environ))
    refusal = {"error": "TypeError: no\\nmore\\nlast line", "trace": "where"}
    print(json.dumps(refusal if source == "refuse" else {"ok": "// " + source}), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker that runs FAKE; the cache is empty and lives in tmp_path."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(toolchain, "worker_command", lambda: ([sys.executable, str(script)], {}))
    monkeypatch.setattr(toolchain, "require", lambda simulator=False: toolchain.ToolchainStatus(True, True, None))
    monkeypatch.setenv("FA_MULTI_CACHE", str(tmp_path / "cache"))
    worker = Worker()
    monkeypatch.setattr(compiler, "worker", lambda: worker)
    yield worker
    worker.stop()


def test_same_text_is_lowered_once(fake: Worker) -> None:
    assert compiler.lower("a") == "// a"
    assert fake.starts == 1
    fake.stop()
    assert compiler.lower("a") == "// a"
    assert fake.starts == 1, "a cache hit started the compiler"


def test_the_other_dsls_variables_do_not_reach_the_compiler(fake: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing NVIDIA's TileLang sets them, and the Ascend compiler then loaded the wrong libraries and died."""
    for name in ("TVM_LIBRARY_PATH", "TL_TEMPLATE_PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, "/elsewhere")
    seen = compiler.lower("environment").split()
    assert "PATH" in seen
    assert not {"TVM_LIBRARY_PATH", "TL_TEMPLATE_PATH", "PYTHONPATH", "LD_LIBRARY_PATH"} & set(seen)


@pytest.mark.parametrize("change", [{"target": "ascendc"}, {"platform": "A3"}, {"pass_configs": {"x": True}}])
def test_everything_that_decides_the_text_is_in_the_key(change: dict) -> None:
    base = {"source_text": "a", "builder": "build", "target": "pto", "platform": "A2", "pass_configs": {}}
    assert compiler.cache_key(**base) != compiler.cache_key(**(base | change))


def test_crash_names_the_kernel_and_the_worker_restarts(fake: Worker) -> None:
    with pytest.raises(CompilerError, match=r"crashed \(SIGSEGV\) on kernel my_kernel"):
        compiler.lower("crash", name="my_kernel")
    assert compiler.lower("b") == "// b"
    assert fake.starts == 2


def test_crash_keeps_the_compilers_last_words(fake: Worker) -> None:
    with pytest.raises(CompilerError) as caught:
        compiler.lower("crash")
    assert "a last word" in caught.value.details or caught.value.details == ""  # the log may lose the race


def test_time_out_stops_the_worker(fake: Worker) -> None:
    with pytest.raises(CompilerError, match="no answer on kernel slow in 1 s"):
        fake.ask({"source": "hang"}, "slow", timeout=1.0)
    assert compiler.lower("c") == "// c"


def test_refusal_is_one_line_with_details(fake: Worker) -> None:
    with pytest.raises(CompilerError, match=r"refused kernel k: TypeError: no \| last line") as caught:
        compiler.lower("refuse", name="k")
    assert caught.value.details == "where"
    assert fake.starts == 1
    assert compiler.lower("d") == "// d"
    assert fake.starts == 1, "a refusal restarted the compiler"


def test_failures_are_not_cached(fake: Worker, tmp_path: Path) -> None:
    for source in ("refuse", "crash"):
        with pytest.raises(CompilerError):
            compiler.lower(source)
    assert not list((tmp_path / "cache").rglob("*.cpp"))


def test_unknown_target() -> None:
    with pytest.raises(ValueError, match="target must be one of"):
        compiler.lower("a", target="cuda")


def test_missing_toolchain_is_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_MULTI_CACHE", str(tmp_path))
    monkeypatch.setattr(toolchain, "is_native", lambda: False)
    found = toolchain.status()
    assert not found.ready
    assert not found.can_lower
    assert "fa-multi sim setup" in found.reason
    assert "\n" not in found.reason
    assert not list(tmp_path.iterdir()), "status left something behind"
    with pytest.raises(ToolchainError, match="fa-multi sim setup"):
        compiler.lower("a")


def test_failed_setup_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(build: Path, work: Path, progress: object) -> None:
        (build / "half").touch()
        raise ToolchainError("no network")

    monkeypatch.setenv("FA_MULTI_CACHE", str(tmp_path))
    monkeypatch.setattr(toolchain, "is_native", lambda: False)
    monkeypatch.setattr(toolchain, "_unpack_debian", fail)
    with pytest.raises(ToolchainError, match="no network"):
        toolchain.setup(progress=lambda line: None)
    assert not list(toolchain.cache_dir().iterdir())


def test_setup_does_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: object) -> None:
        raise AssertionError("set up again")

    ready = toolchain.ToolchainStatus(True, True, None)
    monkeypatch.setattr(toolchain, "compiler_home", lambda: Path("somewhere"))
    monkeypatch.setattr(toolchain, "find_clang", lambda: (Path("clang++"), 19))
    monkeypatch.setattr(toolchain, "status", lambda: ready)
    monkeypatch.setattr(toolchain, "_setup_arm64", unexpected)
    monkeypatch.setattr(toolchain, "_install_clang", unexpected)
    assert toolchain.setup(progress=lambda line: None) is ready


def test_wheels_are_pinned_by_hash() -> None:
    for file in toolchain._requirement_files():
        text = file.read_text()
        pins = [line for line in text.splitlines() if "==" in line]
        assert pins
        assert text.count("--hash=sha256:") == len(pins)


KERNEL = """
from tilelang import language as T


def build():
    n = T.symbolic("n")

    @T.prim_func
    def main(x: T.Tensor([n, 64], "float32")):
        with T.Kernel(1, is_npu=True) as (cid, vid):
            a = T.alloc_ub([ROWS, 64], "float32")
            with T.Scope("V"):
                T.copy(x[0:ROWS, :], a)
                T.tile.add(a, a, 1.0)
                T.copy(a, x[0:ROWS, :])

    return main
"""


@pytest.mark.sim
def test_both_targets_lower() -> None:
    text = KERNEL.replace("ROWS", "16")
    assert "AICORE void main_kernel" in compiler.lower(text, target="pto")
    assert "AscendC::" in compiler.lower(text, target="ascendc")


@pytest.mark.sim
def test_real_crash_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer larger than the on-chip memory, which its memory planning answers with a segmentation fault."""
    worker = Worker()
    monkeypatch.setattr(compiler, "worker", lambda: worker)
    try:
        with pytest.raises(CompilerError, match=r"crashed \(SIGSEGV\) on kernel too_big"):
            compiler.lower(
                KERNEL.replace("ROWS", "4096"), pass_configs={"tl.ascend_memory_planning": True}, name="too_big"
            )
    finally:
        worker.stop()
