"""Printing: lines with indentation, integer scalars, and element-wise expressions as TileLang text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fa_multi.scalars import Binary, Const, Element, Scalar, Var
from fa_multi.tiles import Arith, Expr, Func, HeadValue, KeyHead, Number, Position, Read

LOG2E = 1 / math.log(2)
Names = Mapping[str, str]


class Lines:
    """Source lines with indentation."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def add(self, *lines: str) -> None:
        for line in lines:
            self._lines.append("    " * self._depth + line if line else "")

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """A compound statement: its header, and what is added inside, indented."""
        self.add(header)
        self._depth += 1
        yield
        self._depth -= 1

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def scalar_text(value: Scalar, names: Names) -> str:
    """A scalar as kernel text; `names` replaces variables. Divisions have operands >= 0, so they may truncate, which
    spares the sign fix-ups that Python's floor division compiles to."""
    if isinstance(value, Const):
        return str(value.value)
    if isinstance(value, Var):
        return names.get(value.name, value.name)
    if isinstance(value, Element):
        return f"{tensor_name(value.tensor)}[{', '.join(scalar_text(i, names) for i in value.index)}]"
    assert isinstance(value, Binary)
    a, b = scalar_text(value.a, names), scalar_text(value.b, names)
    if value.op in ("min", "max"):
        return f"T.{value.op}({a}, {b})"
    if value.op == "//":
        return f"T.truncdiv({a}, {b})"
    if value.op == "ceildiv":
        above = str(value.b.value - 1) if isinstance(value.b, Const) else f"{bracketed(b)} - 1"
        return f"T.truncdiv({a} + {above}, {b})"
    if value.op == "*":
        return f"{bracketed(a)} * {bracketed(b)}"
    return f"{a} {value.op} {bracketed(b) if value.op == '-' else b}"


def bracketed(text: str) -> str:
    """`text` in brackets if it has an operator outside of brackets."""
    depth = 0
    for c in text:
        depth += (c in "([") - (c in ")]")
        if c == " " and not depth:
            return f"({text})"
    return text


def tensor_name(name: str) -> str:
    """Tensors are printed in capitals: tiles have the same names."""
    return name.upper()


def expr_text(e: Expr, columns: bool, names: Names) -> str:
    """An element-wise expression at row r (and column c, if the result has `columns`)."""
    if isinstance(e, Number):
        return repr(e.value)
    if isinstance(e, Read):
        return f"{e.tile.name}[r, c]" if len(e.tile.shape) == 2 else f"{e.tile.name}[r]"
    if isinstance(e, HeadValue):
        *outer, head = (scalar_text(i, names) for i in e.index)
        if e.group is not None:
            row = f"{bracketed(scalar_text(e.row0, names))} + r"
            head = f"{head} + T.truncmod({row}, {scalar_text(e.group, names)})"
        return f"{tensor_name(e.tensor.name)}[{', '.join([*outer, head])}]"
    if isinstance(e, Position):
        return f'T.cast({_position(e, names)}, "float32")'
    if isinstance(e, KeyHead):
        group, row = scalar_text(e.group, names), f"{bracketed(scalar_text(e.row0, names))} + r"
        return f'T.cast(T.truncdiv(T.truncmod({row}, {group}), T.truncdiv({group}, {e.heads})), "float32")'
    if isinstance(e, Func):
        if e.name == "exp":  # the hardware's exponential is base 2: log2(e) joins the constant factors
            return f"T.exp2({_scaled(e.a, LOG2E, columns, names)})"
        return f"T.{e.name}({expr_text(e.a, columns, names)})"
    assert isinstance(e, Arith)
    a, b = expr_text(e.a, columns, names), expr_text(e.b, columns, names)
    if e.op in ("max", "min"):
        return f"T.{e.op}({a}, {b})"
    if e.op == "+":
        return f"{a} + {b}"
    return f"{a} - {bracketed(b)}" if e.op == "-" else f"{bracketed(a)} {e.op} {bracketed(b)}"


def _position(e: Position, names: Names) -> str:
    index = "rc"[e.axis]
    if e.group is not None:
        index = f"T.truncdiv({scalar_text(e.row0, names)} + {index}, {scalar_text(e.group, names)})"
    offset = scalar_text(e.offset, names)
    return index if offset == "0" else f"{offset} + {index}"


def _scaled(e: Expr, factor: float, columns: bool, names: Names) -> str:
    """`e * factor` with the factor moved into the terms of a sum: s * k - m * k is one multiply-add per element, since
    m * k is the same for a whole row."""
    if isinstance(e, Arith) and e.op in ("+", "-"):
        a, b = _scaled(e.a, factor, columns, names), _scaled(e.b, factor, columns, names)
        return f"{a} {e.op} {bracketed(b) if e.op == '-' and not _is_product(e.b) else b}"
    if isinstance(e, Arith) and e.op == "*" and isinstance(e.b, Number):
        return _scaled(e.a, factor * e.b.value, columns, names)
    if isinstance(e, Number):
        return repr(e.value * factor)
    return f"{bracketed(expr_text(e, columns, names))} * {factor!r}"


def _is_product(e: Expr) -> bool:
    return not (isinstance(e, Arith) and e.op in ("+", "-"))
