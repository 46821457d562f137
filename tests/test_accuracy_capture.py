"""Capture files: what they hold, that nothing is lost when something fails, and comparing two of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fa_multi
from fa_multi.accuracy import capture as capturing
from fa_multi.accuracy.capture import capture_cases, capture_inputs
from fa_multi.accuracy.compare import compare_captures
from fa_multi.accuracy.dumps import load_inputs
from fa_multi.accuracy.report import Comparison, html
from fa_multi.accuracy.standards import Thresholds
from fa_multi.accuracy.store import Capture, CaptureError, Writer, write_tensors
from fa_multi.cases import CASES, Case, load, select
from fa_multi.philox import fingerprint

SMALL = [
    Case("one", causal=True, seqlen_q=20, seqlen_k=30),
    Case("two", heads_q=4, heads_k=2, layout="bhsd", batch=2, seqlen_q=10),
    Case("three", dtype="fp16", head_dim=32, head_dim_v=64, seqlen_q=5),
]


@pytest.fixture(params=["a.safetensors", "a"], ids=["file", "folder"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


def test_a_capture_holds_results_and_what_made_them(target: Path) -> None:
    assert capture_cases(SMALL, "cpu", target, seed=3) == target
    found = Capture(target)
    assert found.names() == ["one", "two", "three"]
    assert found.complete
    assert (found.header["device"], found.header["seed"]) == ("cpu", 3)
    for case in SMALL:
        q, k, v = case.inputs(3)
        out, lse = fa_multi.attention(q, k, v, return_lse=True, **case.kwargs())
        tensors, record = found.tensors(case.name), found.record(case.name)
        assert torch.equal(tensors["out"], out)
        assert torch.equal(tensors["lse"], lse)
        assert tensors["mass"].shape == lse.shape
        assert record["status"] == "ok"
        assert Case.from_dict(record["case"]) == case
        assert record["inputs"]["q"] == {
            "dtype": {"bf16": "bfloat16", "fp16": "float16"}[case.dtype],
            "shape": list(q.shape),
            "strides": list(q.stride()),
            "sha256": fingerprint(q),
        }
        assert record["outputs"]["out"]["shape"] == list(out.shape)
        assert record["environment"]["torch"] == torch.__version__
        assert len(record["kernel_sha256"]) == 64
        assert record["plan"].startswith("tile ")
    assert not target.with_name(target.name + ".part").exists()


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    target = capture_cases(SMALL, "cpu", tmp_path / "a.safetensors")
    assert set(load_file(target)) == {f"{c.name}/{n}" for c in SMALL for n in ("out", "lse", "mass")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.bool])
def test_written_tensors_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "empty": torch.empty(0, 3, dtype=dtype),
        "odd": torch.randn(3, 5).to(dtype),
        "strided": torch.randn(4, 6).to(dtype).T,
        "scalar": torch.ones((), dtype=dtype),
    }
    write_tensors(tmp_path / "x.safetensors", tensors, {"a": "b"})
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[n], t) for n, t in tensors.items())


def failing_on(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    run = capturing.outputs

    def outputs(problem, device, mass):
        if problem.name == name:
            raise error
        return run(problem, device, mass)

    monkeypatch.setattr(capturing, "outputs", outputs)


def test_a_failing_case_is_recorded_and_the_run_goes_on(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        failing_on(patch, "two", RuntimeError("the kernel\nbroke"))
        capture_cases(SMALL, "cpu", target)
    found = Capture(target)
    assert found.names() == ["one", "two", "three"]
    assert found.record("two")["status"] == "failed"
    assert found.record("two")["error"] == "RuntimeError: the kernel broke"
    assert found.tensors("two") == {}
    assert "out" in found.tensors("three")
    capture_cases(SMALL, "cpu", target.with_name("b"))
    reports = {r.name: r for r in compare_captures(found, Capture(target.with_name("b")))}
    assert reports["two"].verdict == "fail"
    assert reports["two"].reason == "A failed: RuntimeError: the kernel broke"
    assert reports["three"].verdict == "pass"
    ran: list[str] = []
    monkeypatch.setattr(capturing, "run_problem", _noting(ran, capturing.run_problem))
    capture_cases(SMALL, "cpu", target, resume=True)
    assert ran == ["two"]
    assert Capture(target).record("two")["status"] == "ok"
    assert "out" in Capture(target).tensors("one")


def _noting(ran: list[str], run):
    def noted(name, *rest):
        ran.append(name)
        return run(name, *rest)

    return noted


def test_an_interrupt_keeps_what_is_done(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        failing_on(patch, "three", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            capture_cases(SMALL, "cpu", target)
    part = target.with_name(target.name + ".part")
    assert not target.exists()
    assert Capture(part).names() == ["one", "two"]
    assert not Capture(part).complete
    with pytest.raises(CaptureError, match="add --resume to go on, or --overwrite"):
        capture_cases(SMALL, "cpu", target)
    with pytest.raises(CaptureError, match="its seed is 0, now 1"):
        capture_cases(SMALL, "cpu", target, seed=1, resume=True)
    assert Capture(part).names() == ["one", "two"]
    ran: list[str] = []
    monkeypatch.setattr(capturing, "run_problem", _noting(ran, capturing.run_problem))
    capture_cases(SMALL, "cpu", target, resume=True)
    assert ran == ["three"]
    assert Capture(target).complete
    assert not part.exists()


KILLED = """
import os, signal, sys
from fa_multi.accuracy import store
from fa_multi.accuracy.capture import capture_cases
from fa_multi.cases import select
replace = os.replace
def dying(source, target):
    if str(target).endswith("causal.safetensors"):
        os.kill(os.getpid(), signal.SIGKILL)  # the data is written, the name not given
    replace(source, target)
os.replace = dying
capture_cases(select("plain,plain_fp16,causal,scale"), "cpu", sys.argv[1])
"""


def test_a_killed_process_leaves_whole_cases(tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    part = Capture(tmp_path / "a.safetensors.part")
    assert part.names() == ["plain", "plain_fp16"]
    whole = Capture(capture_cases(select("plain,plain_fp16,causal,scale"), "cpu", target, resume=True))
    again = Capture(capture_cases(select("plain,plain_fp16,causal,scale"), "cpu", tmp_path / "b"))
    for name in again.names():
        assert {n: fingerprint(t) for n, t in whole.tensors(name).items()} == {
            n: fingerprint(t) for n, t in again.tensors(name).items()
        }


def test_overwriting_keeps_the_old_capture_until_the_new_one_is_complete(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_cases(SMALL[:1], "cpu", target)
    with pytest.raises(CaptureError, match="exists; add --overwrite to replace it"):
        capture_cases(SMALL, "cpu", target)
    with monkeypatch.context() as patch:
        failing_on(patch, "two", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            capture_cases(SMALL, "cpu", target, overwrite=True)
    assert Capture(target).names() == ["one"]
    capture_cases(SMALL, "cpu", target, overwrite=True)
    assert Capture(target).names() == ["one", "two", "three"]
    assert [p.name for p in target.parent.iterdir()] == [target.name]


def test_what_is_not_a_capture_is_never_replaced(tmp_path: Path) -> None:
    folder, file = tmp_path / "mine", tmp_path / "mine.safetensors"
    folder.mkdir()
    (folder / "thesis.txt").write_text("text")
    save_file({"x": torch.ones(2)}, file)
    for target in (folder, file, tmp_path):
        for how in ("overwrite", "resume"):
            with pytest.raises(CaptureError, match="is not a capture: it is left alone; use another -o"):
                capture_cases(SMALL[:1], "cpu", target, **{how: True})
    assert (folder / "thesis.txt").read_text() == "text"
    assert set(load_file(file)) == {"x"}


def test_an_unsupported_case_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = Capture(capture_cases(SMALL[:1], "cpu", tmp_path / "b"))
    monkeypatch.setattr(fa_multi, "supports", lambda *a, **k: "no such kernel")
    a = Capture(capture_cases(SMALL[:1], "cpu", tmp_path / "a"))
    (report,) = compare_captures(a, b)
    assert (report.verdict, report.reason, report.ok) == ("skip", "A: no such kernel", True)


def test_damaged_and_missing_captures_are_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no capture at"):
        Capture(tmp_path / "none.safetensors")
    target = capture_cases(SMALL, "cpu", tmp_path / "a.safetensors")
    data = target.read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.safetensors").write_text("not a capture")
    save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")
    for name in ("short", "text", "other"):
        with pytest.raises(CaptureError, match=f"{name}.safetensors is not a capture of fa-multi, or is damaged"):
            Capture(tmp_path / f"{name}.safetensors")
    with pytest.raises(CaptureError, match="-o must be in a folder that exists"):
        Writer(tmp_path / "no" / "a", {"cases": []})


# ------------------------------------------------------------------------------------------------------- comparing


def pair(tmp_path: Path) -> tuple[Capture, Capture]:
    return tuple(Capture(capture_cases(SMALL, "cpu", tmp_path / n)) for n in ("a", "b.safetensors"))  # type: ignore[return-value]


def edited(path: Path, name: str, change) -> Capture:
    """The capture with a case's record and tensors changed."""
    old = Capture(path)
    writer = Writer(path, {k: v for k, v in old.header.items() if k != "format"}, overwrite=True)
    for case in old.names():
        record, tensors = dict(old.record(case)), old.tensors(case)
        if case == name:
            change(record, tensors)
        writer.add(case, record, tensors)
    writer.finish()
    return Capture(path)


def test_equal_captures_pass(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    reports = list(compare_captures(a, b))
    assert [(r.name, r.verdict) for r in reports] == [("one", "pass"), ("two", "pass"), ("three", "pass")]
    for report in reports:
        for tensor in report.tensors.values():
            assert tensor.ab.equal == 1
            assert tensor.ratios["rmse"] == 1


@pytest.mark.parametrize("golden", [True, False])
def test_a_wrong_value_fails_with_its_place_and_three_values(tmp_path: Path, golden: bool) -> None:
    a, b = pair(tmp_path)
    right = float(a.tensors("two")["out"][1, 3, 5, 11])
    a = edited(tmp_path / "a", "two", lambda record, tensors: tensors["out"][1, 3, 5].__setitem__(11, right + 1))
    reports = {r.name: r for r in compare_captures(a, b, golden=golden)}
    assert [r.verdict for r in reports.values()] == ["pass", "fail", "pass"]
    worst = reports["two"].tensors["out"].worst[0]
    assert worst["at"] == {"batch": 1, "head": 3, "query": 5, "dim": 11}
    assert (worst["a"], worst["b"]) == (float(a.tensors("two")["out"][1, 3, 5, 11]), right)
    if golden:
        assert worst["golden"] == pytest.approx(right, abs=0.02)


def test_other_inputs_are_not_compared(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    a = edited(tmp_path / "a", "one", lambda record, tensors: record["inputs"]["k"].update(sha256="0" * 64))
    report = next(iter(compare_captures(a, b)))
    assert report.verdict == "error"
    assert report.reason == "input k of A is not the one that is compared with: its hash differs"
    other = Capture(capture_cases(SMALL, "cpu", tmp_path / "c", seed=1))
    report = next(iter(compare_captures(b, other)))
    assert (report.verdict, report.reason) == ("error", "seed differs: 0 in A, 1 in B")


def test_a_case_of_one_side_only_is_an_error(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    short = Capture(capture_cases(SMALL[:2], "cpu", tmp_path / "short"))
    assert [(r.verdict, r.reason) for r in compare_captures(a, short)][2] == ("error", "B has no such case")
    assert [(r.verdict, r.reason) for r in compare_captures(short, b)][2] == ("error", "A has no such case")


def test_json_and_html(tmp_path: Path) -> None:
    a, b = pair(tmp_path)

    def spoil(record, tensors) -> None:
        tensors["out"][0, 0, 0, 0] = float("nan")

    a = edited(tmp_path / "a", "two", spoil)
    comparison = Comparison(a, b, Thresholds(), True, list(compare_captures(a, b)))
    data = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert data["verdict"] == "fail"
    assert data["counts"] == {"pass": 2, "fail": 1}
    for case in data["cases"]:
        assert case["verdict"] in ("pass", "fail")
        for tensor in case["tensors"].values():
            assert {"max_abs", "rel_l2", "cosine", "ulp", "rmse", "verdict"} <= set(tensor)
    page = html(comparison)
    assert page.count("data:image/svg+xml;base64,") == 1 + len(SMALL)
    assert "<script" not in page
    assert "http" not in page
    for case in SMALL:
        assert f'id="{case.name}"' in page


@pytest.mark.parametrize("golden", [True, False])
def test_html_of_cases_that_were_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: bool) -> None:
    """Skipped, failed and missing cases have records without a plan, an output, or anything."""
    b = Capture(capture_cases([*SMALL, Case("four")], "cpu", tmp_path / "b"))
    supports = fa_multi.supports
    refuse = lambda q, *a, **k: "no kernel" if q.shape[0] == 2 else supports(q, *a, **k)  # noqa: E731
    monkeypatch.setattr(fa_multi, "supports", refuse)
    failing_on(monkeypatch, "three", RuntimeError("broke"))
    a = Capture(capture_cases(SMALL, "cpu", tmp_path / "a"))
    comparison = Comparison(a, b, Thresholds(), golden, list(compare_captures(a, b, golden=golden)))
    assert [c.verdict for c in comparison.cases] == ["pass", "skip", "fail", "error"]
    page = html(comparison)
    assert page.count("data:image/svg+xml;base64,") == 2
    for text in ("A: no kernel", "A failed: RuntimeError: broke", "A has no such case"):
        assert text in page
    json.dumps(comparison.to_dict(), allow_nan=False)


# -------------------------------------------------------------------------------------------------- a user's tensors


def dump(path: Path, metadata: dict[str, str] | None = None, **more: torch.Tensor) -> Path:
    q, k, v = Case("dump", seqlen_q=12, seqlen_k=20, heads_q=4).inputs()
    save_file({"q": q, "k": k, "v": v, **more}, path, metadata)
    return path


def test_a_users_tensors_are_captured_and_compared(tmp_path: Path) -> None:
    source = dump(tmp_path / "layer.safetensors", {"causal": "true", "who": "me"})
    problems = load_inputs(source, {"softmax_scale": 0.1})
    assert [(p.name, p.options) for p in problems] == [("layer", {"causal": True, "softmax_scale": 0.1})]
    a, b = (Capture(capture_inputs(problems, "cpu", tmp_path / n)) for n in "ab")
    source.unlink()
    (report,) = compare_captures(a, b)
    assert report.verdict == "pass"
    q, k, v = (problems[0].tensors[n] for n in "qkv")
    assert torch.equal(a.tensors("layer")["out"], fa_multi.attention(q, k, v, causal=True, softmax_scale=0.1))


def test_a_sink_and_several_layers_in_one_file(tmp_path: Path) -> None:
    q, k, v = Case("dump", heads_q=4, heads_k=2, seqlen_q=12).inputs()
    layer = {"q": q, "k": k, "v": v, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])}
    save_file({f"model.{i}.{n}": t.clone() for i in range(2) for n, t in layer.items()}, tmp_path / "x.safetensors")
    problems = load_inputs(tmp_path / "x.safetensors", {"window_size": [3, 0]})
    assert [p.name for p in problems] == ["model.0", "model.1"]
    a, b = (Capture(capture_inputs(problems, "cpu", tmp_path / n)) for n in "ab")
    reports = list(compare_captures(a, b))
    assert [r.verdict for r in reports] == ["pass", "pass"]
    assert float(a.tensors("model.0")["mass"].max()) < 1


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ({"weights": torch.ones(2)}, {}, "'weights' is not an argument of fa_multi.attention, which takes"),
        ({}, {"casual": True}, "--set casual: not an option of fa_multi.attention; options are alibi_slopes, "),
    ],
)
def test_what_is_no_argument_is_refused(tmp_path: Path, more, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        load_inputs(dump(tmp_path / "x.safetensors", **more), options)


def test_packed_and_paged_calls_are_captured_and_compared(tmp_path: Path) -> None:
    q, k, v = (x[0] for x in Case("packed", seqlen_q=40, seqlen_k=70, heads_q=4, heads_k=2).inputs())
    starts = {"cu_seqlens_q": torch.tensor([0, 7, 7, 40]), "cu_seqlens_k": torch.tensor([0, 30, 45, 70])}
    starts = {n: t.int() for n, t in {**starts, "seqused_k": torch.tensor([20, 15, 11])}.items()}
    save_file({"q": q, "k": k, "v": v, **starts}, tmp_path / "packed.safetensors")
    pages = {n: x[:64].reshape(16, 4, 2, 64).contiguous() for n, x in (("k_cache", k), ("v_cache", v))}
    tables = {"block_table": torch.randperm(16).view(2, 8).int(), "cache_seqlens": torch.tensor([9, 32]).int()}
    save_file({"q": q[:6].reshape(2, 3, 4, 64), **pages, **tables}, tmp_path / "paged.safetensors")
    for name, sequences, last in (("packed", 3, 32), ("paged", 2, 2)):
        problems = load_inputs(tmp_path / f"{name}.safetensors", {"causal": True})
        a, b = (Capture(capture_inputs(problems, "cpu", tmp_path / f"{name}_{n}")) for n in "ab")
        (report,) = compare_captures(a, b)
        assert (report.verdict, report.reason) == ("pass", "")
        assert report.tensors["out"].shape[0] == sequences
        assert report.tensors["mass"].a.max_abs < 0.01
        assert report.edges["a"].upper.found == []
        a = edited(tmp_path / f"{name}_a", name, lambda record, tensors: tensors["out"].view(-1, 64)[-1].add_(1))
        (report,) = compare_captures(a, b)
        assert report.verdict == "fail"
        worst = report.tensors["out"].worst[0]["at"]
        assert (worst["batch"], worst["head"], worst["query"]) == (sequences - 1, 3, last)


def test_a_dump_without_k_is_refused(tmp_path: Path) -> None:
    save_file({"q": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="has no tensor 'k'; it has q"):
        load_inputs(tmp_path / "x.safetensors", {})


# --------------------------------------------------------------------------------------------------- cases and memory

# first digits of the SHA-256 of q, k and v
PINNED = {
    "causal": ["30cc78a7cc1a", "d25b24580cc6", "d524686d8a76"],
    "rising": ["b0fc281711b0", "a178c6f12f45", "61b5242ebf8c"],
    "large_fp16": ["bf044e7b9938", "281a1614b4c4", "fb981e5043a7"],
    "plain_fp32": ["631d90f8ce71", "67d218c88f2e", "ea1c915188b9"],
    "qkv_packed": ["ffbf93991661", "df9428cda2ec", "50a014501b6b"],
}


@pytest.mark.parametrize("name", PINNED)
def test_inputs_are_the_same_on_every_machine(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    assert [fingerprint(x)[:12] for x in case.inputs()] == PINNED[name]


def test_cases_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("- {name: mine, seqlen_q: 7, causal: true}\n- {name: other, dtype: fp16}\n")
    assert load(path) == [Case("mine", seqlen_q=7, causal=True), Case("other", dtype="fp16")]
    assert select(str(path)) == load(path)
    assert [Case.from_dict(c.to_dict()) for c in CASES] == list(CASES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a, seqlen: 3}", "case 'a': no field 'seqlen'; fields are name, batch"),
        ("- {name: a b}", "name must be letters, digits"),
        ("- {name: a, dtype: fp8}", "case 'a': dtype must be one of fp16, bf16, fp32, got 'fp8'"),
        ("- {name: a, batch: -1}", "case 'a': batch must be an integer >= 0, got -1"),
        ("- {name: a, heads_q: 3, heads_k: 2}", "case 'a': heads_q must be a multiple of heads_k = 2, got 3"),
        ("- {seqlen_q: 3}", "a case must have a name"),
        ("- {name: a}\n- {name: a}", "two cases are named 'a'"),
        ("a: [", "is not YAML"),
        ("3", "must hold a list of cases"),
    ],
)
def test_bad_case_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


MEMORY = """
import resource, sys
import torch
from fa_multi.accuracy.capture import capture_cases
from fa_multi.cases import Case
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
sizes = dict(seqlen_k=16, heads_q=16, heads_k=16, head_dim=64)
capture_cases([Case("warm", seqlen_q=4096, **sizes)], "cpu", sys.argv[1] + "/warm.safetensors")
before = peak()
capture_cases([Case("big", seqlen_q=49152, **sizes)], "cpu", sys.argv[1] + "/big.safetensors")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_a_capture_holds_at_most_twice_its_outputs(tmp_path: Path) -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    outputs = 49152 * 16 * 64 * 2 / 2**20
    inputs = outputs
    assert float(done.stdout) <= inputs + 2 * outputs
    assert (tmp_path / "big.safetensors").stat().st_size > outputs * 2**20
