"""How the kernel declares its tensor arguments, and how an access becomes a region of one.

Three forms:

- "window": blocks of rows. Declared [strides of the other axes..., ROW_BASE + rows, row pitch], all run-time values,
  in elements. The DSL has no strided tensors, but the C++ it emits keeps run-time sizes in 64 bits, so an access
  computes its own offset from them. The other axes go into the column index: one beyond the pitch would be clamped
  away, a negative one is not, so ROW_BASE rows are added to the row index and taken off the column index.
  Rows usually run along the sequence; where a group of heads shares a tile they run along the heads, and where the
  keys are paged along the slots of a page.
- "flat": log-sum-exps, contiguous, declared [length, 1]. n values from `at` on are the columns [1 - n, ...) of row
  at + n - 1: the copy is clamped at column 1, to n values.
- "numbers": read one by one by the scalar unit. Lengths and tables of int32, slopes and sinks of float32; declared
  [length], or [rows, row pitch].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fa_multi.scalars import Const, Scalar, Var
from fa_multi.tiles import Access, Load, Program, Store, Tensor, walk

from .limits import ROW_BASE

FUNCTIONS = {"min": "T.min", "max": "T.max", "ceildiv": "T.ceildiv"}
STRIDES = {"split": "sx", "batch": "sb", "page": "sb", "head": "sh", "seq": "ss", "slot": "ss"}


def text(value: Scalar) -> str:
    """A scalar as kernel text. Task scalars and sizes keep their names."""
    return value.text(functions=FUNCTIONS)


def factor(value: Scalar) -> str:
    """A scalar as an operand of a product."""
    return text(value) if isinstance(value, (Var, Const)) else f"({text(value)})"


@dataclass(frozen=True)
class View:
    """One tensor argument. form: "window", "flat" or "numbers". row_axis: the axis along which the rows of a window
    run; columns: elements of a row."""

    tensor: Tensor
    form: str
    row_axis: str = ""
    columns: int = 1

    @property
    def argument(self) -> str:
        """The kernel argument; numbers keep their own name, by which scalars read them."""
        return self.tensor.name if self.form == "numbers" else f"{self.tensor.name}_gm"

    @property
    def outer(self) -> tuple[str, ...]:
        """Axes that only shift a window."""
        return tuple(d for d in self.tensor.dims if d not in (self.row_axis, "dim"))

    def stride(self, axis: str) -> str:
        """The symbol of an axis's stride."""
        return f"{self.tensor.name}_{STRIDES[axis]}"

    def symbols(self) -> tuple[str, ...]:
        """Run-time values that the declared shape brings into the kernel."""
        name = self.tensor.name
        if self.form == "window":
            return (*(self.stride(d) for d in self.outer), f"{name}_rows", self.stride(self.row_axis))
        if self.form == "numbers" and len(self.tensor.dims) == 2:
            return (f"{name}_rows", f"{name}_pitch")
        return (f"{name}_len",)

    def declaration(self) -> str:
        """The parameter of the kernel."""
        sizes = ", ".join(self.symbols()) + (", 1" if self.form == "flat" else "")
        return f'{self.argument}: T.Tensor([{sizes}], "{self.tensor.dtype}")'

    def region(self, places: Mapping[str, str], row: str, rows: str, first: str, columns: str) -> str:
        """Rows [row, row + rows), columns [first, first + columns) of a window, at `places` along the other axes."""
        shifts = [f"{places[d]} * {self.stride(d)}" for d in self.outer if places[d] != "0"]
        shifts += [first] if first != "0" else []
        col = f"{' + '.join(shifts) or '0'} - {ROW_BASE} * {self.stride(self.row_axis)}"
        at = f"{row} + {ROW_BASE}"
        before = "0, " * len(self.outer)
        return f"{self.argument}[{before}{at}:{at} + {rows}, {col}:{col} + {columns}]"


def views(program: Program) -> dict[str, View]:
    """The arguments of a program by tensor name, in its order."""
    accesses = [a for op in walk(program.body) if (a := _access(op))]
    grouped = {a.tensor.name for a in accesses if a.group is not None}
    found = {}
    for t in program.tensors:
        if not {"seq", "slot"} & set(t.dims):
            found[t.name] = View(t, "numbers")
        elif "dim" not in t.dims and t.name not in grouped:
            found[t.name] = View(t, "flat")
        else:
            row_axis = "head" if t.name in grouped else "slot" if "slot" in t.dims else "seq"
            width = t.shape[-1] if "dim" in t.dims else Const(1)
            assert isinstance(width, Const)
            found[t.name] = View(t, "window", row_axis, width.value)
    return found


def _access(op: object) -> Access | None:
    if isinstance(op, Load):
        return op.src
    return op.dst if isinstance(op, Store) else None
