"""The folder for everything fa_multi can make again: kernel texts, compiled kernels, toolchains. Content-addressed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import platformdirs


def cache_root() -> Path:
    """$FA_MULTI_CACHE, else the user's cache directory; it need not exist."""
    return Path(os.environ.get("FA_MULTI_CACHE") or platformdirs.user_cache_dir("fa_multi"))


def cache_dir(*parts: str) -> Path:
    """A folder below the cache root, made if absent."""
    path = cache_root().joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


def digest(*parts: str) -> str:
    """16 hex digits that identify the parts (SHA-256, each part length-prefixed)."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()[:16]


@contextlib.contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name when it is complete and on disk; on an error nothing is left."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make what was renamed in a folder outlast a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that readers see the old content or the new, never half of it."""
    with durable(path) as f:
        f.write(data.encode() if isinstance(data, str) else data)


def store_text(kind: str, name: str, text: str, suffix: str = ".py") -> Path:
    """Keep `text` under `kind`, in a file named after `name` and its content; returns the path."""
    path = cache_dir(kind) / f"{name}_{digest(text)}{suffix}"
    if not path.exists():
        write_atomic(path, text)
    return path
