"""The command line: what it prints, what it refuses in one line, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result
from fa_multi.backends.ascend import toolchain
from safetensors.torch import save_file

import fa_multi
from fa_multi import backends, cli, stages
from fa_multi.accuracy import capture as capturing
from fa_multi.accuracy.store import Capture
from fa_multi.cases import CASES, Case


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


def refused(code: int, message: str, *arguments: object) -> None:
    """The command ends with the code and one line that has the message, and no traceback."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    lines = [x for x in result.stderr.splitlines() if x.strip()]
    assert len([x for x in lines if x.startswith("Error:")]) == 1
    assert lines[-1].startswith("Error:")


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [path]
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
        else:
            found.append((*path, name))
    return found


EXPECTED = {
    (), ("cases",), ("run",), ("lower",), ("capture",), ("diff",), ("doctor",), ("completion",),
    ("sim",), ("sim", "setup"), ("sim", "status"), ("cache",), ("cache", "ls"), ("cache", "clear"),
}  # fmt: skip


def test_every_command_is_there() -> None:
    assert set(commands(cli.main)) == EXPECTED


@pytest.mark.parametrize("path", sorted(EXPECTED), ids=" ".join)
def test_every_help_has_an_example_and_the_exit_codes(path: tuple[str, ...]) -> None:
    result = call(*path, "--help")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "Example: " in text
    assert "Exit codes: 0 all is well" in text


def test_the_entry_point_is_installed() -> None:
    done = subprocess.run([sys.executable, "-m", "fa_multi.cli", "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == f"fa-multi, version {fa_multi.__version__}"


# ------------------------------------------------------------------------------------------------- cases, run, lower


def test_cases_lists_and_chooses() -> None:
    everything = call("cases").output
    assert all(f"{c.name} " in everything for c in CASES)
    assert f"{len(CASES)} cases" in everything
    chosen = json.loads(call("cases", "tag:gqa,one_query", "--json").output)
    assert {c["name"] for c in chosen} == {c.name for c in CASES if "gqa" in c.tags()} | {"one_query"}
    assert all(set(c["tags"]) & {"gqa", "decode"} for c in chosen)
    refused(2, "no case matches 'nothing'; `fa-multi cases` lists names and tags", "cases", "nothing")


def test_run_passes_and_checks_determinism() -> None:
    result = call("run", "causal,gqa_4", "-d", "cpu", "--repeat", 3)
    assert result.exit_code == 0, result.output
    assert result.output.count("PASS") == 2
    assert result.output.count("3 runs: identical") == 2


def test_run_reports_a_case_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    run = capturing.outputs

    def outputs(problem, device, mass):
        found = run(problem, device, mass)
        found["lse"] = found["lse"] * 1.4426950408889634
        return found

    monkeypatch.setattr(capturing, "outputs", outputs)
    result = call("run", "causal", "-d", "cpu")
    assert result.exit_code == 1
    assert "FAIL  causal" in result.output
    assert "LSE is in base 2" in result.output


def test_run_reports_results_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, calls = fa_multi.attention, []

    def drifting(*args, **kwargs):
        out, *rest = result if isinstance(result := attention(*args, **kwargs), tuple) else (result,)
        if kwargs.get("return_lse"):
            calls.append(1)
            out.view(-1)[0] += 0 if len(calls) < 3 else 0.01
        return (out, *rest) if rest else out

    monkeypatch.setattr(fa_multi, "attention", drifting)
    result = call("run", "causal", "-d", "cpu", "--repeat", 4)
    assert result.exit_code == 1
    assert "4 runs: 2 differ from the first" in result.output


@pytest.mark.parametrize("stage", ["program", "roles", "source"])
def test_lower_prints_what_the_library_lowers(stage: str) -> None:
    q, k, v = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in Case("plain").shapes().values())
    lowered = fa_multi.lower(q, k, v, device="cpu")
    text = {"program": str(lowered.program), "roles": str(lowered.roles), "source": lowered.source}[stage]
    assert call("lower", "plain", "-d", "cpu", "--stage", stage).output == text + "\n"
    assert "lse" in call("lower", "plain", "-d", "cpu", "--stage", "program", "--lse").output


def test_lower_writes_files_and_compiled_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(lowered, arch: str):
        return b"\x7fELF" if arch == "sm_80" else f"// {lowered.program.name} {arch}"

    monkeypatch.setattr(stages, "_COMPILED", {"cuda": {"lowered": compiled, "cubin": compiled}})
    name = fa_multi.lower(*(x.to("meta") for x in Case("plain").inputs()), device="cuda").program.name
    arguments = ("lower", "plain", "-d", "cuda", "--stage")
    assert call(*arguments, "lowered").output == f"// {name} sm_90a\n"
    refused(2, "--stage cubin is not text; give a file with -o", *arguments, "cubin", "--arch", "sm_80")
    result = call(*arguments, "cubin", "--arch", "sm_80", "-o", tmp_path / "k.cubin")
    assert (result.exit_code, result.output) == (0, f"4 bytes in {tmp_path / 'k.cubin'}\n")
    assert (tmp_path / "k.cubin").read_bytes() == b"\x7fELF"
    refused(2, "--stage must be one of program, roles, source, lowered, cubin for cuda, got 'pto'", *arguments, "pto")


def test_compiled_stages_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.importlib.util, "find_spec", lambda name: None)
    refused(3, "this stage needs tilelang, which is not there; run: pip install", "lower", "plain", "-d", "cuda",
            "--stage", "lowered")  # fmt: skip


@pytest.mark.cuda_compile
def test_lower_to_cuda_source() -> None:
    result = call("lower", "causal", "-d", "cuda", "--arch", "sm_90a", "--stage", "lowered")
    assert result.exit_code == 0, result.output
    assert "__global__" in result.output


@pytest.mark.sim
@pytest.mark.parametrize(("stage", "word"), [("lowered", "AscendC"), ("pto", "pto")])
def test_lower_to_ascend_source(stage: str, word: str) -> None:
    result = call("lower", "causal", "-d", "npu-sim", "--stage", stage)
    assert result.exit_code == 0, result.output
    assert word in result.output


REFUSALS = {
    "device": (2, 'device must be None, "cpu", "cuda"', "run", "plain", "-d", "tpu"),
    "case": (2, "no case matches 'plane'", "run", "plane", "-d", "cpu"),
    "two cases": (2, "CASE must choose one case, 'd*' chooses", "lower", "d*", "-d", "cpu"),
    "no capture": (2, "no capture at 'x.safetensors'", "diff", "x.safetensors", "y.safetensors"),
    "output folder": (2, "-o must be in a folder that exists", "capture", "-d", "cpu", "-o", "no/such/place"),
    "set": (2, "--set needs --inputs", "capture", "-d", "cpu", "-o", "x", "--set", "causal=true"),
    "no file": (2, "cannot read the case file 'x.yaml'", "capture", "-d", "cpu", "-o", "x", "--cases", "x.yaml"),
    "no inputs": (
        2,
        "--inputs 'x.st' cannot be read as safetensors",
        "capture",
        "-d",
        "cpu",
        "-o",
        "x",
        "--inputs",
        "x.st",
    ),
    "both": (
        2,
        "--resume and --overwrite exclude each other",
        "capture",
        "-d",
        "cpu",
        "-o",
        "x",
        "--resume",
        "--overwrite",
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_bad_input_is_refused_in_one_line(refusal: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(*refusal)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("run", "plain"), ("capture", "-o", "x")], ids=lambda c: c[0])
def test_a_missing_device_has_its_own_exit_code(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backends.get("cpu"), "unavailable", lambda: "no CPU; buy one", raising=False)
    refused(3, "no CPU; buy one", *command, "-d", "cpu")
    assert list(tmp_path.iterdir()) == []


def test_traceback_on_request() -> None:
    result = call("--traceback", "run", "plane", "-d", "cpu")
    assert isinstance(result.exception, ValueError)


# ------------------------------------------------------------------------------------------------------ capture, diff


@pytest.fixture
def captures(tmp_path: Path) -> tuple[Path, Path]:
    a, b = tmp_path / "a.safetensors", tmp_path / "b"
    for target in (a, b):
        result = call("capture", "-d", "cpu", "--cases", "causal,gqa_4", "-o", target)
        assert result.exit_code == 0, result.output
        assert f"{target}: 2 ok" in result.output
    return a, b


def test_diff_of_equal_captures(captures: tuple[Path, Path], tmp_path: Path) -> None:
    result = call("diff", *captures, "--json", tmp_path / "d.json", "--html", tmp_path / "d.html")
    assert result.exit_code == 0, result.output
    assert "PASS  causal: max abs" in result.output
    assert "PASS: 2 pass" in result.output
    assert "dual standard L1: A/B at most max_rel 5, mean_rel 1.5, rmse 1.5, small_wrong 2" in result.output
    data = json.loads((tmp_path / "d.json").read_text())
    assert data["thresholds"]["level"] == "L1"
    assert [c["verdict"] for c in data["cases"]] == ["pass", "pass"]
    assert (tmp_path / "d.html").read_text().startswith("<!DOCTYPE html>")
    only = call("diff", *captures, "--no-golden", "--cases", "gqa*", "--level", "L2")
    assert only.exit_code == 0, only.output
    assert "PASS: 1 pass" in only.output
    assert "without golden" in only.output


def test_diff_fails_with_an_exit_code(captures: tuple[Path, Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(fa_multi, "attention", _off_by(fa_multi.attention, 0.5))
    bad = tmp_path / "bad"
    assert call("capture", "-d", "cpu", "--cases", "causal,gqa_4", "-o", bad).exit_code == 0
    monkeypatch.undo()
    result = call("diff", bad, captures[1], "--json", tmp_path / "d.json")
    assert result.exit_code == 1
    assert "FAIL: 2 fail" in result.output
    assert re.search(
        r"largest error of out at batch 0, head \d+, query \d+, dim 0: A \S+, B \S+, golden \S+\n", result.output
    )
    assert json.loads((tmp_path / "d.json").read_text())["verdict"] == "fail"
    loose = tmp_path / "loose.yaml"
    loose.write_text("rules: [special]\n")
    assert call("diff", bad, captures[1], "--thresholds", loose).exit_code == 0
    loose.write_text("rules: [specials]\n")
    refused(2, "rules must be some of", "diff", bad, captures[1], "--thresholds", loose)
    refused(2, "--html must be in a folder that exists", "diff", *captures, "--html", tmp_path / "no" / "x.html")
    refused(2, "--cases 'x' matches no case of the captures", "diff", *captures, "--cases", "x")


def _off_by(attention, amount):
    def wrong(*args, **kwargs):
        result = attention(*args, **kwargs)
        (result[0] if isinstance(result, tuple) else result)[..., 0] += amount
        return result

    return wrong


def test_capture_of_failing_cases_exits_with_1_and_can_be_resumed(tmp_path: Path, monkeypatch) -> None:
    attention = fa_multi.attention

    def breaking(q, *args, **kwargs):
        if q.shape[2] == 8:
            raise RuntimeError("illegal address")
        return attention(q, *args, **kwargs)

    target = tmp_path / "a.safetensors"
    monkeypatch.setattr(fa_multi, "attention", breaking)
    result = call("capture", "-d", "cpu", "--cases", "causal,gqa_4", "-o", target)
    assert result.exit_code == 1
    assert "failed: gqa_4: RuntimeError: illegal address" in result.stderr
    assert "1 ok, 1 failed" in result.output
    monkeypatch.undo()
    refused(2, "exists; add --overwrite to replace it, or --resume", "capture", "-d", "cpu", "-o", target)
    result = call("capture", "-d", "cpu", "--cases", "causal,gqa_4", "-o", target, "--resume")
    assert result.exit_code == 0, result.output
    assert "2 ok" in result.output


def test_capture_of_a_users_tensors(tmp_path: Path) -> None:
    q, k, v = Case("x", seqlen_q=5).inputs()
    save_file({"q": q, "k": k, "v": v}, tmp_path / "layer.safetensors")
    arguments = ("--inputs", tmp_path / "layer.safetensors", "--set", "causal=true")
    for name in "ab":
        assert call("capture", "-d", "cpu", *arguments, "-o", tmp_path / name).exit_code == 0
    assert Capture(tmp_path / "a").record("layer")["options"] == {"causal": True}
    assert call("diff", tmp_path / "a", tmp_path / "b").exit_code == 0
    refused(2, "--set must be NAME=VALUE, got 'causal'", "capture", "-d", "cpu", "-o", tmp_path / "c", *arguments[:2],
            "--set", "causal")  # fmt: skip


SLOW = """
import sys, time
from fa_multi import cli
from fa_multi.accuracy import capture
run = capture.outputs
def slowly(problem, *rest):
    if problem.name == "scale":
        print("waiting", flush=True)
        time.sleep(60)
    return run(problem, *rest)
capture.outputs = slowly
cli.main(["capture", "-d", "cpu", "--cases", "plain,causal,scale", "-o", sys.argv[1]])
"""


def test_an_interrupted_capture_says_how_to_go_on(tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SLOW, str(target)], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "2 cases are kept; go on with --resume" in errors
    assert "Traceback" not in errors
    assert Capture(tmp_path / "a.safetensors.part").names() == ["plain", "causal"]


# -------------------------------------------------------------------------------------- doctor, sim, cache, completion


def test_doctor_knows_every_lane() -> None:
    found = json.loads(call("doctor", "--json").output)
    assert list(found["lanes"]) == list(backends.LANES)
    for name, lane in found["lanes"].items():
        reason = fa_multi.unavailable(name)
        assert (lane["runs"], lane["remedy"]) == (reason is None, reason)
    assert found["lanes"]["cpu"]["runs"]
    assert found["versions"]["torch"] == torch.__version__
    text = call("doctor").output
    for name, lane in found["lanes"].items():
        assert name in text
        assert lane["remedy"] is None or lane["remedy"].split()[0] in text


def test_sim_status_and_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    status = toolchain.ToolchainStatus
    ready = status(
        ready=True, can_lower=True, reason=None, paths={"clang++": Path("clang++")}, versions={"clang++": "19"}
    )
    missing = status(ready=False, can_lower=False, reason="no clang++; run: apt-get install clang-19")
    monkeypatch.setattr(toolchain, "status", lambda: ready)
    result = call("sim", "status")
    assert result.exit_code == 0
    assert "ready: kernels can be lowered and simulated" in result.output
    monkeypatch.setattr(toolchain, "status", lambda: missing)
    refused(3, "no clang++; run: apt-get install clang-19", "sim", "status")
    steps = []
    monkeypatch.setattr(toolchain, "setup", lambda progress: steps.append(progress("downloading")) or ready)
    result = call("sim", "setup")
    assert (result.exit_code, result.output, len(steps)) == (0, "downloading\n", 1)

    def failing(progress) -> None:
        raise toolchain.ToolchainError("pip download failed: no network")

    monkeypatch.setattr(toolchain, "setup", failing)
    refused(3, "pip download failed: no network", "sim", "setup")


def test_cache_ls_and_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_MULTI_CACHE", str(tmp_path))
    for name in ("cuda", "ascend"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "x").write_bytes(b"12345")
    listed = call("cache", "ls").output
    assert listed.splitlines()[0] == str(tmp_path)
    assert [line.split() for line in listed.splitlines()[1:]] == [
        ["ascend", "1", "files", "5", "bytes"],
        ["cuda", "1", "files", "5", "bytes"],
    ]
    refused(2, "the cache has no part 'npu'; it has ascend, cuda", "cache", "clear", "npu", "--yes")
    assert CliRunner().invoke(cli.main, ["cache", "clear"], input="n\n").exit_code == 1
    assert {p.name for p in tmp_path.iterdir()} == {"cuda", "ascend"}
    assert call("cache", "clear", "cuda", "--yes").output == "deleted cuda\n"
    assert {p.name for p in tmp_path.iterdir()} == {"ascend"}
    call("cache", "clear", "--yes")
    assert list(tmp_path.iterdir()) == []
    assert call("cache", "clear", "--yes").output == "nothing to delete\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    assert "_FA_MULTI_COMPLETE" in call("completion", shell).output


def test_completion_completes_commands_cases_and_devices() -> None:
    def completed(words: str) -> list[str]:
        environment = {**os.environ, "_FA_MULTI_COMPLETE": "bash_complete", "COMP_WORDS": words}
        environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
        code = "from fa_multi.cli import main; main(prog_name='fa-multi')"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert completed("fa-multi ca") == ["cache", "capture", "cases"]
    assert completed("fa-multi run gqa_1") == ["gqa_12"]
    assert completed("fa-multi run plain --device np") == ["npu", "npu-sim"]
