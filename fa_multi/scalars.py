"""Integer expressions over run-time sizes and task coordinates: addresses, loop bounds, mask thresholds.

They are evaluated by the CPU lane (on ints, or on integer tensors when several tasks run at once) and printed by the
emitters, so a bound is written once and means the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union

IntLike = Union["Scalar", int]

_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "ceildiv": lambda a, b: -(-a // b),
    "min": lambda a, b: min(a, b),
    "max": lambda a, b: max(a, b),
}


class Scalar:
    """An immutable integer expression. Build with Python operators, `minimum`, `maximum` and `ceildiv`.

    `//` and `ceildiv` are only used on operands that cannot be negative: C-like targets truncate where Python floors.
    """

    def __add__(self, other: IntLike) -> Scalar:
        return _binary("+", self, other)

    def __radd__(self, other: IntLike) -> Scalar:
        return _binary("+", other, self)

    def __sub__(self, other: IntLike) -> Scalar:
        return _binary("-", self, other)

    def __rsub__(self, other: IntLike) -> Scalar:
        return _binary("-", other, self)

    def __mul__(self, other: IntLike) -> Scalar:
        return _binary("*", self, other)

    def __rmul__(self, other: IntLike) -> Scalar:
        return _binary("*", other, self)

    def __floordiv__(self, other: IntLike) -> Scalar:
        return _binary("//", self, other)

    def free(self) -> frozenset[str]:
        """Names of the variables the expression reads."""
        raise NotImplementedError

    def eval(self, env: Mapping[str, Any]) -> Any:
        """Value under `env`, which maps every free variable to an int (or an integer tensor)."""
        raise NotImplementedError

    def text(self, names: Mapping[str, str] | None = None, functions: Mapping[str, str] | None = None) -> str:
        """Source text. `names` renames variables; `functions` renames min, max and ceildiv (for example to T.min)."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class Const(Scalar):
    value: int

    def free(self) -> frozenset[str]:
        return frozenset()

    def eval(self, env: Mapping[str, Any]) -> Any:
        return self.value

    def text(self, names: Mapping[str, str] | None = None, functions: Mapping[str, str] | None = None) -> str:
        return str(self.value)

    __str__ = Scalar.__str__


@dataclass(frozen=True)
class Var(Scalar):
    name: str

    def free(self) -> frozenset[str]:
        return frozenset({self.name})

    def eval(self, env: Mapping[str, Any]) -> Any:
        return env[self.name]

    def text(self, names: Mapping[str, str] | None = None, functions: Mapping[str, str] | None = None) -> str:
        return (names or {}).get(self.name, self.name)

    __str__ = Scalar.__str__


@dataclass(frozen=True)
class Element(Scalar):
    """An int32 read from a tensor argument, such as a sequence length."""

    tensor: str
    index: tuple[Scalar, ...]

    def free(self) -> frozenset[str]:
        return frozenset().union(*(i.free() for i in self.index))

    def eval(self, env: Mapping[str, Any]) -> Any:
        value = env[self.tensor][tuple(i.eval(env) for i in self.index)]
        return int(value) if value.dim() == 0 else value

    def text(self, names: Mapping[str, str] | None = None, functions: Mapping[str, str] | None = None) -> str:
        return f"{self.tensor}[{', '.join(i.text(names, functions) for i in self.index)}]"

    __str__ = Scalar.__str__


@dataclass(frozen=True)
class Binary(Scalar):
    op: str
    a: Scalar
    b: Scalar

    def free(self) -> frozenset[str]:
        return self.a.free() | self.b.free()

    def eval(self, env: Mapping[str, Any]) -> Any:
        return _FUNCTIONS[self.op](self.a.eval(env), self.b.eval(env))

    def text(self, names: Mapping[str, str] | None = None, functions: Mapping[str, str] | None = None) -> str:
        a, b = self.a.text(names, functions), self.b.text(names, functions)
        if self.op in ("min", "max", "ceildiv"):
            return f"{(functions or {}).get(self.op, self.op)}({a}, {b})"
        a = f"({a})" if self.op in ("*", "//") and _is_sum(self.a) else a
        b = f"({b})" if (self.op == "-" and _is_sum(self.b)) or (self.op in ("*", "//") and _is_infix(self.b)) else b
        return f"{a} {self.op} {b}"

    __str__ = Scalar.__str__


def _is_infix(x: Scalar) -> bool:
    return isinstance(x, Binary) and x.op in ("+", "-", "*", "//")


def _is_sum(x: Scalar) -> bool:
    return isinstance(x, Binary) and x.op in ("+", "-")


def scalar(x: IntLike) -> Scalar:
    """`x` as a Scalar."""
    return Const(x) if isinstance(x, int) else x


def _binary(op: str, a: IntLike, b: IntLike) -> Scalar:
    a, b = scalar(a), scalar(b)
    if isinstance(a, Const) and isinstance(b, Const):
        return Const(_FUNCTIONS[op](a.value, b.value))
    if (b == Const(0) and op in ("+", "-")) or (b == Const(1) and op in ("*", "//", "ceildiv")):
        return a
    if (a == Const(0) and op == "+") or (a == Const(1) and op == "*"):
        return b
    if a == b and op in ("min", "max"):
        return a
    if op in ("+", "-") and isinstance(b, Const) and isinstance(a, Binary) and a.op in ("+", "-"):
        if isinstance(a.b, Const):  # (x + c) + d -> x + (c + d): printed bounds stay short
            total = (a.b.value if a.op == "+" else -a.b.value) + (b.value if op == "+" else -b.value)
            return _binary("+", a.a, total) if total >= 0 else _binary("-", a.a, -total)
    return Binary(op, a, b)


def minimum(a: IntLike, *rest: IntLike) -> Scalar:
    """Smallest of the operands."""
    result = scalar(a)
    for b in rest:
        result = _binary("min", result, b)
    return result


def maximum(a: IntLike, *rest: IntLike) -> Scalar:
    """Largest of the operands."""
    result = scalar(a)
    for b in rest:
        result = _binary("max", result, b)
    return result


def ceildiv(a: IntLike, b: IntLike) -> Scalar:
    """`a / b` rounded up; `a >= 0`, `b > 0`."""
    return _binary("ceildiv", a, b)
