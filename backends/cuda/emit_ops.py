"""Text for the parts that every form of a kernel shares: its arguments, task scalars, and ops on tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fa_multi.masks import Bound
from fa_multi.roles import StagedLoop
from fa_multi.scalars import Scalar, Var
from fa_multi.tiles import (
    Access,
    Arith,
    Cast,
    Expr,
    Func,
    HeadValue,
    KeyHead,
    Load,
    Loop,
    Map,
    MaskHeads,
    MaskTile,
    Mma,
    Number,
    Op,
    Position,
    Program,
    Read,
    RowReduce,
    Store,
    Tensor,
    Tile,
    walk,
)

from .printing import Lines, Names, expr_text, scalar_text, tensor_name

# --------------------------------------------------------------------------------------------- arguments


def strided(tensor: Tensor) -> bool:
    """Does the tensor take any strides? Those with a "dim" axis do, with a unit stride along it."""
    return tensor.dims[-1] == "dim"


def stride_names(tensor: Tensor) -> list[str]:
    """Names of a tensor's run-time strides."""
    return [f"{tensor.name}_{dim}" for dim in tensor.dims[:-1]]


def sizes_of_tensors(program: Program) -> list[str]:
    """Sizes that the tensors' shapes give, in order of appearance; batch + 1 gives batch."""
    return list(dict.fromkeys(name for t in program.tensors for n in t.shape for name in sorted(n.free())))


def scalar_arguments(program: Program) -> list[str]:
    """Sizes that no tensor's shape gives: arguments behind the tensors."""
    given = set(sizes_of_tensors(program))
    return [name for name in program.sizes() if name not in given]


def declare_dynamic(lines: Lines, program: Program) -> None:
    """Run-time sizes and strides: one kernel serves every shape and every layout."""
    _dynamic(lines, sizes_of_tensors(program), "int32")
    for t in program.tensors:
        if strided(t):
            _dynamic(lines, stride_names(t), "int64")


def _dynamic(lines: Lines, names: Sequence[str], dtype: str) -> None:
    lines.add(f'{", ".join(names)} = T.dynamic("{", ".join(names)}", "{dtype}")')


def assume_aligned(lines: Lines, tensor: Tensor) -> None:
    """Tell the compiler that rows start at multiples of 16 bytes, so that elements move 16 bytes at a time."""
    if strided(tensor):
        unit = 16 // Tile("", (1,), tensor.dtype).bytes
        lines.add(*(f"T.assume({s} % {unit} == 0)" for s in stride_names(tensor)))


# A kernel is launched as the one before it on the stream ends, waits for that end, and so for that of all before it,
# ahead of touching memory (programmatic dependent launch). Letting the next one come earlier than that costs time: its
# blocks take room that this one's still need.
FOLLOW = ("T.pdl_sync()",)


def arguments(program: Program, extra: Sequence[str] = ()) -> list[str]:
    """The parameters of the kernel function."""
    result = []
    for t in program.tensors:
        shape = ", ".join(scalar_text(n, {}) for n in t.shape) + ("," if len(t.shape) == 1 else "")
        if strided(t):
            result.append(
                f'{tensor_name(t.name)}: T.StridedTensor(({shape}), ({", ".join(stride_names(t))}, 1), "{t.dtype}")'
            )
        else:
            result.append(f'{tensor_name(t.name)}: T.Tensor(({shape}), "{t.dtype}")')
    return result + [f"{name}: T.int32" for name in [*scalar_arguments(program), *extra]]


# --------------------------------------------------------------------------------------------- task scalars


def scalars_in(op: Op) -> Iterator[Scalar]:
    """Every scalar that the text of an op reads."""
    if isinstance(op, (Loop, StagedLoop)):
        yield op.trips
        yield from (phase.stop for phase in op.phases)
        bodies = [stage.body for stage in op.stages] if isinstance(op, StagedLoop) else [op.body]
        for inner in (o for body in bodies for o in body):
            yield from scalars_in(inner)
    elif isinstance(op, (Load, Store)):
        yield from _access_scalars(op.src if isinstance(op, Load) else op.dst)
    elif isinstance(op, Map):
        yield from _expr_scalars(op.value)
    elif isinstance(op, MaskTile):
        yield from (op.row0, op.col0, *(b.offset for b in (*op.interval.lower, *op.interval.upper)))
        yield from (op.group,) if op.group is not None else ()


def _access_scalars(a: Access) -> Iterator[Scalar]:
    yield from (a.batch, a.head, a.row0, a.rows, a.begin)
    yield from (s for s in (a.group, a.split) if s is not None)


def _expr_scalars(e: Expr) -> Iterator[Scalar]:
    if isinstance(e, Arith):
        yield from _expr_scalars(e.a)
        yield from _expr_scalars(e.b)
    elif isinstance(e, Func):
        yield from _expr_scalars(e.a)
    elif isinstance(e, KeyHead):
        yield from (e.row0, e.group)
    elif isinstance(e, (HeadValue, Position)):
        yield from (e.index if isinstance(e, HeadValue) else (e.offset,))
        yield from (e.row0, *((e.group,) if e.group is not None else ()))


class TaskScalars:
    """The task's `let`s, each printed where it is first needed. `known` are variables that are there already."""

    def __init__(self, program: Program, known: Iterable[str]) -> None:
        self.lets = {var.name: value for var, value in program.lets}
        self.done = set(known)

    def require(self, lines: Lines, scalars: Iterable[Scalar], form: str = "{name} = {value}") -> None:
        """Print what `scalars` need and is not there yet."""
        for name in self.lets:  # in their order: each may use those before it
            if name in self.missing(scalars):
                lines.add(form.format(name=name, value=scalar_text(self.lets[name], {})))
                self.done.add(name)

    def missing(self, scalars: Iterable[Scalar]) -> set[str]:
        """Lets that `scalars` read, directly or through other lets, and that are not printed yet."""
        found: set[str] = set()
        pending = [n for s in scalars for n in s.free()]
        while pending:
            name = pending.pop()
            if name in self.lets and name not in self.done and name not in found:
                found.add(name)
                pending += self.lets[name].free()
        return found


def depends_on(program: Program, scalar: Scalar, name: str) -> bool:
    """Does a scalar depend on a variable, directly or through the lets?"""
    lets = {var.name: value for var, value in program.lets}
    pending, seen = list(scalar.free()), set()
    while pending:
        n = pending.pop()
        if n == name:
            return True
        if n in lets and n not in seen:
            seen.add(n)
            pending += lets[n].free()
    return False


# --------------------------------------------------------------------------------------------- ops on tiles


def parallel(tile: Tile) -> str:
    """Header of a loop over a tile's elements."""
    extent = ", ".join(map(str, tile.shape))
    return f"for r, c in T.Parallel({extent}):" if len(tile.shape) == 2 else f"for r in T.Parallel({extent}):"


def index(tile: Tile, name: str = "") -> str:
    """Element of a tile, or of what holds it."""
    return f"{name or tile.name}[{'r, c' if len(tile.shape) == 2 else 'r'}]"


def print_tile_op(lines: Lines, op: Op, names: Names) -> None:
    """An op that only touches tiles in registers."""
    if isinstance(op, Map):
        _print_map(lines, op, names)
    elif isinstance(op, RowReduce):
        clear = "" if not op.accumulate else ", clear=False"
        lines.add(f"T.reduce_{op.kind}({op.src}, {op.dst}, dim=1{clear})")
    elif isinstance(op, Cast):
        lines.add(f"T.copy({op.src}, {op.dst})")
    elif isinstance(op, MaskTile):
        _print_mask(lines, op, names)
    elif isinstance(op, MaskHeads):
        with lines.block(parallel(op.tile)):
            _keep(lines, op.tile, f"T.truncmod(c, {op.heads}) == {op.head}[r]")
    else:
        raise NotImplementedError(f"no kernel text for {type(op).__name__}: {op}")


def _print_map(lines: Lines, op: Map, names: Names) -> None:
    if isinstance(op.value, Number):
        lines.add(f"T.fill({op.dst}, {op.value.value!r})")
    elif isinstance(op.value, Read) and op.value.tile.shape == op.dst.shape:
        lines.add(f"T.copy({op.value.tile}, {op.dst})")
    else:
        with lines.block(parallel(op.dst)):
            lines.add(f"{index(op.dst)} = {expr_text(op.value, len(op.dst.shape) == 2, names)}")


def _print_mask(lines: Lines, op: MaskTile, names: Names) -> None:
    row: Scalar = Var("row")
    at = f"{scalar_text(op.row0, names)} + r"
    if op.group is not None:
        at = f"T.truncdiv({at}, {scalar_text(op.group, names)})"
    names = {**names, "row": at}
    ends = [_end(op.interval.lower, row, "max", names), _end(op.interval.upper, row, "min", names)]
    column = f"{scalar_text(op.col0, names)} + {'c' if op.fold == 1 else f'T.truncdiv(c, {op.fold})'}"
    tests = [f"{column} {sign} {end}" for sign, end in zip((">=", "<"), ends) if end]
    visible = tests[0] if len(tests) == 1 else f"T.And({', '.join(tests)})"
    with lines.block(parallel(op.tile)):
        _keep(lines, op.tile, visible)


def _keep(lines: Lines, tile: Tile, visible: str) -> None:
    lines.add(f'{tile}[r, c] = T.if_then_else({visible}, {tile}[r, c], -T.infinity("float32"))')


def _end(bounds: Sequence[Bound], row: Scalar, join: str, names: Names) -> str:
    """The tightest of the bounds, one number per row."""
    texts = [scalar_text(b.at(row), names) for b in bounds]
    result = texts[0] if texts else ""
    for t in texts[1:]:
        result = f"T.{join}({result}, {t})"
    return result


# --------------------------------------------------------------------------------------------- where tiles live


def operands(program: Program) -> list[Tile]:
    """Tiles in shared memory: loaded, and operand of a product."""
    loaded = [op.dst for op in walk(program.body) if isinstance(op, Load)]
    read = {t for op in walk(program.body) if isinstance(op, Mma) for t in (op.a, op.b)}
    return [t for t in dict.fromkeys(loaded) if t in read]


def staging(program: Program) -> dict[Tile, Tile]:
    """Results that leave through the memory of an operand, which is free by then: {result: operand}. The operand is one
    loaded once per task, with as many rows, as many or more columns, and the same dtype."""
    once = [op.dst for op in program.body if isinstance(op, Load)]
    hosts = [t for t in operands(program) if t in once]
    stored = [op.src for op in program.body if isinstance(op, Store) and len(op.src.shape) == 2]
    pairs: dict[Tile, Tile] = {}
    for result in stored:
        for host in hosts:
            fits = host.shape[0] == result.shape[0] and host.shape[1] >= result.shape[1]
            if fits and host.dtype == result.dtype and host not in pairs.values():
                pairs[result] = host
                break
    return pairs


def fragments(program: Program) -> list[Tile]:
    """Tiles in registers. A result that is only a rounded copy on its way out needs none."""
    elsewhere = {*operands(program), *(op.dst for op in program.body if isinstance(op, Cast))}
    return [t for t in program.tiles() if t not in elsewhere]
