"""Capture files: the outputs of many cases and what produced them, in safetensors; a kill loses no finished case.

While a capture runs, every finished case is a file in the folder `TARGET.part`, complete and on disk before it has its
name. At the end the folder becomes TARGET: itself, or joined into one file if TARGET ends in ".safetensors". Both, and
an unfinished folder, are read by `Capture`. Layout: docs/accuracy.md.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from ..cache import durable, sync_folder, write_atomic

FORMAT = 1
HEADER = "capture.json"
_HEADER_KEY, _CASE_KEY = "fa_multi.capture", "fa_multi.case:"
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CHUNK = 64 << 20


class CaptureError(ValueError):
    """A capture cannot be read, or not written there. One line that names the file and what to do."""


# ------------------------------------------------------------------------------------------- safetensors, streamed


def _head(entries: Mapping[str, tuple[str, list[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The safetensors head for (dtype, shape, bytes) of tensors that follow in this order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape, size) in entries.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, durably, with no copy of a contiguous CPU tensor in memory."""
    entries = {n: (_NAMES[t.dtype], list(t.shape), t.numel() * t.element_size()) for n, t in tensors.items()}
    with durable(path) as f:
        f.write(_head(entries, metadata))
        for tensor in tensors.values():
            if tensor.numel():
                data = memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                for start in range(0, len(data), _CHUNK):
                    f.write(data[start : start + _CHUNK])


def read_head(path: Path) -> tuple[dict[str, Any], int]:
    """(table of a safetensors file without its metadata, offset of the data)."""
    with path.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        table = json.loads(f.read(length))
    table.pop("__metadata__", None)
    return table, 8 + length


def join(paths: Mapping[str, Path], target: Path, metadata: Mapping[str, str]) -> None:
    """Join safetensors files into one, each tensor renamed `NAME/tensor`, copying bytes in chunks."""
    entries: dict[str, tuple[str, list[int], int]] = {}
    spans: list[tuple[Path, int, int]] = []
    for name, path in paths.items():
        table, base = read_head(path)
        for key, entry in table.items():
            first, last = entry["data_offsets"]
            entries[f"{name}/{key}"] = (entry["dtype"], entry["shape"], last - first)
            spans.append((path, base + first, last - first))
    with durable(target) as f:
        f.write(_head(entries, metadata))
        for path, offset, size in spans:
            with path.open("rb") as part:
                part.seek(offset)
                _copy(part, f, size)


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size:
        data = source.read(min(size, _CHUNK))
        if not data:
            raise CaptureError(f"a part of the capture ends {size} bytes early; capture it again")
        target.write(data)
        size -= len(data)


# ----------------------------------------------------------------------------------------------------------- writing


class Writer:
    """Takes finished cases one by one. `done` has the records of the cases that are already there.

    target: the capture to make. header: what the capture as a whole is (JSON values; "cases" lists the names).
    resume: go on with an unfinished or finished capture of the same header; its failed cases count as not done.
    overwrite: replace what is there, which stays untouched until the new capture is complete.
    Raises CaptureError when something is there and neither is said, or when it is not the same capture.
    """

    def __init__(
        self, target: Path, header: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
    ) -> None:
        target = target.absolute()
        self.target, self.header = target, {"format": FORMAT, **header}
        self.parts = target.with_name(target.name + ".part")
        self.single = target.suffix == ".safetensors"
        self.done: dict[str, dict[str, Any]] = {}
        if not target.parent.is_dir():
            raise CaptureError(f"-o must be in a folder that exists, got {str(target)!r}")
        for path in (target, self.parts):
            if path.exists() and not is_capture(path):
                raise CaptureError(f"{path} exists and is not a capture: it is left alone; use another -o")
        if self.parts.exists() and not (resume or overwrite):
            raise CaptureError(f"{self.parts} holds an unfinished capture; add --resume to go on, or --overwrite")
        if target.exists() and not (resume or overwrite):
            raise CaptureError(
                f"{target} exists; add --overwrite to replace it, or --resume to run its failed cases again"
            )
        if overwrite and self.parts.exists():
            shutil.rmtree(self.parts)
        if resume and (self.parts.exists() or target.exists()):
            self._resume()
        self.parts.mkdir(exist_ok=True)
        write_atomic(self.parts / HEADER, json.dumps(self.header, indent=1))

    def _resume(self) -> None:
        source = self.parts if self.parts.exists() else self.target
        old = Capture(source)
        for name in ("device", "seed", "mass", "cases", "inputs", "definitions"):
            if old.header.get(name) != self.header.get(name):
                raise CaptureError(
                    f"{source} cannot be resumed: its {name} is {_short(old.header.get(name))}, "
                    f"now {_short(self.header.get(name))}; use --overwrite or another -o"
                )
        self.parts.mkdir(exist_ok=True)
        for name in old.names():
            record = old.record(name)
            if record["status"] != "failed":
                if source != self.parts:
                    self.add(name, record, old.tensors(name))
                self.done[name] = record

    def add(self, name: str, record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep a case. When this returns, the case survives a kill."""
        write_tensors(self.parts / f"{name}.safetensors", tensors, {_CASE_KEY + name: json.dumps(record)})
        self.done[name] = dict(record)

    def finish(self) -> Path:
        """Give the capture its final form and name; returns the target."""
        if self.single:
            paths = {n: self.parts / f"{n}.safetensors" for n in self.header["cases"]}
            metadata = {_HEADER_KEY: json.dumps(self.header)}
            metadata |= {_CASE_KEY + n: json.dumps(self.done[n]) for n in paths}
            join(paths, self.target, metadata)
            shutil.rmtree(self.parts)
            return self.target
        old = self.target.with_name(self.target.name + ".old")
        if self.target.exists():
            self.target.rename(old)
        self.parts.rename(self.target)
        sync_folder(self.target.parent)
        shutil.rmtree(old, ignore_errors=True)
        return self.target


def is_capture(path: Path) -> bool:
    """Whether a file or folder is a capture, damaged or unfinished ones included, so that another may replace it."""
    if path.is_dir():
        names = {p.name for p in path.iterdir()}
        ours = all(n == HEADER or n.endswith((".safetensors", ".tmp")) for n in names)
        return not names or (HEADER in names and ours)
    try:
        with safe_open(str(path), framework="pt") as f:
            return _HEADER_KEY in (f.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ----------------------------------------------------------------------------------------------------------- reading


class Capture:
    """A capture on disk: a joined file, a folder, or the folder of an interrupted one. Tensors are read on demand.

    header: what `Writer` was given. Raises CaptureError if `path` is not a capture or is damaged.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.exists():
            unfinished = self.path.with_name(self.path.name + ".part")
            hint = f"; the unfinished {unfinished} can be read by that name" if unfinished.exists() else ""
            raise CaptureError(f"no capture at {str(path)!r}{hint}")
        try:
            self._read()
        except (SafetensorError, OSError, ValueError, KeyError, struct.error) as error:
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(f"{self.path} is not a capture of fa-multi, or is damaged: {error}") from None
        if self.header["format"] != FORMAT:
            raise CaptureError(f"{self.path} has capture format {self.header['format']}; this version reads {FORMAT}")

    def _read(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}
        if self.path.is_dir():
            self.header = json.loads((self.path / HEADER).read_text())
            for name in self.header["cases"]:
                if (self.path / f"{name}.safetensors").exists():
                    with self._open(name) as f:
                        self._records[name] = json.loads(f.metadata()[_CASE_KEY + name])
            return
        with self._open("") as f:
            metadata = f.metadata() or {}
            self.header = json.loads(metadata[_HEADER_KEY])
            self._records = {n: json.loads(metadata[_CASE_KEY + n]) for n in self.header["cases"]}

    def _open(self, name: str) -> Any:
        path = self.path / f"{name}.safetensors" if self.path.is_dir() else self.path
        return safe_open(str(path), framework="pt")

    def names(self) -> list[str]:
        """Cases that are there, in the order of the capture."""
        return list(self._records)

    def record(self, name: str) -> dict[str, Any]:
        """What the capture says about a case: status ("ok", "failed", "unsupported"), error, environment, inputs..."""
        return self._records[name]

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[dict[str, Any]]:
        """Slices by tensor name: `slices["out"][0, :, 3]` reads just that part. `.get_shape()` gives a shape."""
        prefix = "" if self.path.is_dir() else name + "/"
        with self._open(name) as f:
            yield {k[len(prefix) :]: f.get_slice(k) for k in f.keys() if k.startswith(prefix)}  # noqa: SIM118

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """All tensors of a case, whole."""
        prefix = "" if self.path.is_dir() else name + "/"
        with self._open(name) as f:
            return {k[len(prefix) :]: f.get_tensor(k) for k in f.keys() if k.startswith(prefix)}  # noqa: SIM118

    @property
    def complete(self) -> bool:
        """Whether every case of the capture has been run."""
        return set(self._records) == set(self.header["cases"])
