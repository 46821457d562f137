"""The form between roles and text: instructions that know their pipe and what they touch on chip.

`lowering.py` makes these from the ops of a role, `hazards.py` orders them with flags, `emit.py` prints them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Union

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4}


@dataclass(frozen=True)
class Buffer:
    """An on-chip array. memory: "L1", "L0C" (cube) or "UB" (vector); offset: its first byte there."""

    name: str
    memory: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @functools.cached_property
    def bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for n in self.shape:
            size *= n
        return size

    def overlaps(self, other: Buffer) -> bool:
        """Whether the two share a byte."""
        if self.memory != other.memory:
            return False
        return self.offset < other.offset + other.bytes and other.offset < self.offset + self.bytes


@dataclass(frozen=True)
class Access:
    """A pipe reads or writes a buffer."""

    pipe: str
    buffer: Buffer
    write: bool

    def conflicts(self, later: Access) -> bool:
        """Whether the order of the two matters."""
        return (self.write or later.write) and self.buffer.overlaps(later.buffer)


@dataclass(frozen=True)
class Instr:
    """One statement of the kernel text. Without accesses it is scalar work, or a flag between cores."""

    text: str
    accesses: tuple[Access, ...] = ()


@dataclass(frozen=True)
class Flag:
    """set_flag or wait_flag from one pipe to another, inside one core."""

    wait: bool
    source: str
    target: str
    event: int

    @property
    def text(self) -> str:
        verb = "wait" if self.wait else "set"
        return f'T.{verb}_flag("{self.source.lower()}", "{self.target.lower()}", {self.event})'


@dataclass(frozen=True)
class Barrier:
    """Later instructions of a pipe start after its earlier ones ended."""

    pipe: str

    @property
    def text(self) -> str:
        return f'T.pipe_barrier("{self.pipe.lower()}")'


@dataclass
class Loop:
    """`for var in T.serial(extent)`."""

    var: str
    extent: str
    body: list[Node] = field(default_factory=list)


@dataclass
class If:
    """`if condition`."""

    condition: str
    body: list[Node] = field(default_factory=list)


Node = Union[Instr, Flag, Barrier, Loop, If]


def accesses(node: Node) -> Iterator[Access]:
    """Everything a node, with its body, may touch."""
    if isinstance(node, Instr):
        yield from node.accesses
    elif isinstance(node, (Loop, If)):
        for inner in node.body:
            yield from accesses(inner)


def lines(nodes: Sequence[Node], indent: int) -> Iterator[str]:
    """The text of a list of nodes, indented by four spaces a level."""
    pad = "    " * indent
    for node in nodes:
        if isinstance(node, Loop):
            yield f"{pad}for {node.var} in T.serial({node.extent}):"
            yield from lines(node.body, indent + 1)
        elif isinstance(node, If):
            yield f"{pad}if {node.condition}:"
            yield from lines(node.body, indent + 1)
        else:
            yield pad + node.text
