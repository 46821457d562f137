"""Capturing: run cases on one device and keep everything that a comparison with another device needs."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fa_multi

from ..cases import Case
from .environment import environment
from .problem import Problem
from .store import Writer


@dataclass(frozen=True)
class Progress:
    """A case was run: the `number`-th of `total`. record: what the capture keeps of it, tensors apart."""

    number: int
    total: int
    record: dict[str, Any]


def capture_cases(
    cases: Sequence[Case],
    device: str,
    target: Path | str,
    *,
    seed: int = 0,
    mass: bool = True,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Run cases with inputs drawn from `seed` and keep out (the case's layout), lse (batch, heads, seqlen_q) and mass.

    mass, (batch, heads, seqlen_q) in the output dtype, is what the weights of each row sum to: one more launch with a v
    of ones; `mass=False` leaves it out. A case that fails is kept as failed with its error, one that the device has no
    kernel for as unsupported with the reason, and the run goes on. Interrupted, it keeps what is done.

    target, resume, overwrite: see `store.Writer`. Returns the target.
    Raises RuntimeError, with the remedy, if the device is not there; CaptureError if the target cannot be written.
    """
    header = {"device": device, "seed": seed, "mass": mass, "cases": [c.name for c in cases], "inputs": None}
    header["definitions"] = [c.to_dict() for c in cases]
    problems = [functools.partial(Problem.of, case, seed) for case in cases]
    return _capture(problems, header, device, Path(target), resume, overwrite, progress)


def capture_inputs(
    problems: Sequence[Problem],
    device: str,
    target: Path | str,
    *,
    mass: bool = True,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """As `capture_cases`, for tensors of the user's own (`dumps.load_inputs`). The capture keeps the inputs too."""
    inputs = {p.name: {n: r["sha256"] for n, r in p.inputs_record().items()} for p in problems}
    header = {"device": device, "seed": None, "mass": mass, "cases": list(inputs), "inputs": inputs}
    makers = [functools.partial(lambda p: p, p) for p in problems]
    return _capture(makers, header, device, Path(target), resume, overwrite, progress)


def _capture(
    makers: Iterable[Callable[[], Problem]],
    header: dict[str, Any],
    device: str,
    target: Path,
    resume: bool,
    overwrite: bool,
    progress: Callable[[Progress], None],
) -> Path:
    reason = fa_multi.unavailable(device)
    if reason:
        raise RuntimeError(reason)
    names = header["cases"]
    writer = Writer(target, header, resume=resume, overwrite=overwrite)
    for number, (name, make) in enumerate(zip(names, makers), 1):
        if name not in writer.done:
            record, tensors = run_problem(name, make, device, header["mass"])
            writer.add(name, {"seed": header["seed"], **record}, tensors)
            del tensors
        progress(Progress(number, len(names), writer.done[name]))
    return writer.finish()


def run_problem(
    name: str, make: Callable[[], Problem], device: str, mass: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Run one problem; (record, tensors). Every error but an interrupt ends up in the record, not in a traceback."""
    record: dict[str, Any] = {"name": name, "status": "failed", "environment": environment(device)}
    try:
        problem = make()
        record["case"] = problem.case.to_dict() if problem.case else None
        record |= {"options": problem.options, "inputs": problem.inputs_record()}
        reason = _refusal(problem, device)
        if reason:
            return {**record, "status": "unsupported", "error": reason}, {}
        record |= _kernel(problem, device) if problem.kind == "dense" else {}
        start = time.perf_counter()
        tensors = outputs(problem, device, mass)
        record["seconds"] = round(time.perf_counter() - start, 4)
    except Exception as error:  # the run must go on, whatever a kernel does
        return {**record, "error": f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"}, {}
    record["outputs"] = {
        n: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for n, t in tensors.items()
    }
    if problem.case is None:
        tensors |= {f"inputs.{n}": t for n, t in problem.tensors.items()}
    return {**record, "status": "ok"}, tensors


def _refusal(problem: Problem, device: str) -> str | None:
    """Why the lane has no kernel for the problem. Only dense calls can be asked about beforehand."""
    if problem.kind != "dense":
        return None
    q, k, v = (problem.tensors[n] for n in problem.names)
    return fa_multi.supports(q, k, v, device=device, return_lse=True, **problem.arguments())


def _kernel(problem: Problem, device: str) -> dict[str, Any]:
    """The spec, the plan and the hash of the kernel text that the lane lowers the problem to."""
    tensors = {n: t.to("meta") for n, t in problem.tensors.items()}
    lowered = fa_multi.lower(device=device, return_lse=True, **{**problem.arguments(), **tensors})
    return {
        "spec": lowered.program.name,
        "plan": str(lowered.roles.plan),
        "form": lowered.form,
        "kernel_sha256": hashlib.sha256(lowered.source.encode()).hexdigest(),
    }


def outputs(problem: Problem, device: str, mass: bool) -> dict[str, torch.Tensor]:
    """out and lse of a problem, and mass if wanted, on the CPU. One output-sized tensor is held beside the result."""
    found: dict[str, torch.Tensor] = {}
    if mass:
        weights = problem.call(device, return_lse=False, ones=True)
        assert isinstance(weights, torch.Tensor)
        found["mass"] = problem.mass_of(weights).cpu().contiguous()
        del weights
    out, lse = problem.call(device, return_lse=True)
    return {"out": out.cpu(), "lse": lse.cpu(), **found}
