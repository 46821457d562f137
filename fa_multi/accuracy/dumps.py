"""Tensors saved from a user's model, as problems."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .problem import FUNCTIONS, Problem, kind_of


def load_inputs(path: Path, options: Mapping[str, Any]) -> list[Problem]:
    """Problems from a safetensors file.

    Tensors have the names of the arguments of `fa_multi.attention` (q, k, v, sink, ...), of `attention_varlen` (also
    cu_seqlens_q, ...) or of `attention_paged` (q, k_cache, v_cache, block_table, ...); NAME.q, NAME.k, ... put several
    calls into one file. Other arguments come from the file's metadata (JSON values by argument name) and from
    `options`, which wins. Raises ValueError naming what is missing or no argument.
    """
    groups: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(str(path), framework="pt") as f:
            metadata = f.metadata() or {}
            for key in f.keys():  # noqa: SIM118
                prefix, _, tensor = key.replace("/", ".").rpartition(".")
                groups.setdefault(prefix, {})[tensor] = f.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--inputs {str(path)!r} cannot be read as safetensors: {error}") from None
    if not groups:
        raise ValueError(f"--inputs {str(path)!r} has no tensors; it must have q, k and v")
    return [_problem(path, prefix, tensors, metadata, options) for prefix, tensors in groups.items()]


def _problem(
    path: Path, prefix: str, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str], options: Mapping[str, Any]
) -> Problem:
    function = FUNCTIONS[kind_of(tensors)]()
    parameters = inspect.signature(function).parameters
    accepted = [n for n in parameters if n not in ("return_lse", "device", "out", "lse")]
    name = re.sub(r"[^\w.-]", "_", prefix or path.stem, flags=re.ASCII)
    problem = Problem(name, tensors, {n: parse_option(x) for n, x in metadata.items() if n in accepted})
    problem.options.update(options)
    where = f"--inputs {str(path)!r}" + (f" under {prefix!r}" if prefix else "")
    for tensor in problem.names:
        if tensor not in tensors:
            raise ValueError(f"{where} has no tensor {tensor!r}; it has {', '.join(tensors)}")
    for tensor in tensors:
        if tensor not in accepted:
            raise ValueError(
                f"{where}: {tensor!r} is not an argument of {_name(function)}, which takes {_list(accepted)}"
            )
    for option in problem.options:
        if option not in accepted or option in problem.names:
            takes = _list([n for n in accepted if n not in problem.names])
            raise ValueError(f"--set {option}: not an option of {_name(function)}; options are {takes}")
    needed = [n for n in accepted if parameters[n].default is inspect.Parameter.empty]
    for argument in needed:
        if argument.startswith("max_seqlen_") and argument not in problem.options:
            lengths = tensors.get("cu_seqlens_" + argument[-1])
            if lengths is not None:
                problem.options[argument] = int(lengths.diff().max()) if len(lengths) > 1 else 0
        if argument not in problem.options and argument not in tensors:
            raise ValueError(f"{where} has no {argument!r}, which {_name(function)} needs")
    return problem


def _name(function: Any) -> str:
    return f"fa_multi.{getattr(function, '__name__', 'attention')}"


def _list(names: list[str]) -> str:
    return ", ".join(sorted(names))


def parse_option(text: str) -> Any:
    """An option's value: JSON, or the text itself where it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
