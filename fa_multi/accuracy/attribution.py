"""Which keys an error comes from: the change of their weights that best explains it.

Let row i see keys with weights p_ij (summing to 1), with golden output g_i = sum_j p_ij v_j. A kernel that counts the
keys of some classes 1 + c times instead of once, c = c(class of j), returns

    a_i = (g_i + sum_j c p_ij v_j) / (1 + sum_j c p_ij).

Least squares of a_i - g_i, over rows and columns, on what each class alone would do gives c per class with a standard
error: about -1 for keys left out, +1 for keys counted twice, or for hidden keys let in. What stands out is then put
into the formula together, as -1 or +1, and counts only if that reproduces the result. Classes are the distance of a key
from the edge of the row's mask, or its block.

Weights and mask come from the reference as a black box: weights are its output for unit vectors as v, the mask follows
from its output for q = 0. So its options are covered without being known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import reference
from .problem import MASK_OPTIONS, POSITION_OPTIONS, Problem

ROWS = 256  # rows that an attribution looks at
_KEYS_AT_ONCE = 1024
INSIDE, OUTSIDE = 8, 4  # distances from the mask edge that are looked at


@dataclass
class HeadView:
    """One head of one batch entry, cut to the rows that are looked at, in float64.

    rows: indices. result, golden: (rows, dim_v). values: (keys, dim_v). weights: (rows, keys), of every key, hidden
    ones too, relative to the golden denominator. first, last: (rows,), visible keys are first .. last, inclusive.
    """

    batch: int
    head: int
    rows: torch.Tensor
    result: torch.Tensor
    golden: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


@dataclass
class Attribution:
    """Change of the weights of classes of keys, each by itself.

    labels: of the classes. change: c. error: its standard error. weight: mean golden weight of the class, where it is.
    found: (label, -1 or +1) of the classes that stand out. explained: share of the squared error of the result that the
    exact formula with `found` accounts for; 0 if nothing stands out.
    """

    labels: list[int]
    change: list[float]
    error: list[float]
    weight: list[float]
    found: list[tuple[int, int]]
    explained: float

    def to_dict(self) -> dict[str, object]:
        return dict(vars(self))


@dataclass
class EdgeProfile:
    """Error by distance to the mask edge, of the head with the largest error.

    upper: labels are key - last visible key: 0 is the last visible key, 1 the first hidden one. lower: labels are first
    visible key - key, likewise; None where no row has a lower edge.
    """

    batch: int
    head: int
    upper: Attribution
    lower: Attribution | None

    def to_dict(self) -> dict[str, object]:
        lower = self.lower and self.lower.to_dict()
        return {"batch": self.batch, "head": self.head, "upper": self.upper.to_dict(), "lower": lower}


def view_head(
    problem: Problem, batch: int, head: int, result: torch.Tensor, row_error: torch.Tensor
) -> HeadView | None:
    """The head for attribution; None if it has no row that sees a key, or scores that depend on a row's position.

    result : (seqlen_q, dim_v), the output of the head. row_error : (seqlen_q,), its error by row.
    """
    if any(n in problem.tensors for n in POSITION_OPTIONS):
        return None
    heads = problem.heads_of(head)
    q, k, v = (x[0, 0] for x in problem.sequence(batch, *heads))
    golden = problem.golden(batch, *heads)
    first, count = visible_interval(problem, batch, head)
    rows = _choose(row_error[: len(count)], count)
    if not len(rows):
        return None
    lse = golden["lse"][0, rows]
    return HeadView(
        batch=batch,
        head=head,
        rows=rows,
        result=result[rows].double(),
        golden=golden["out"][0, rows],
        values=v.double(),
        weights=_weights(problem, batch, heads[0], q[rows], k, lse),
        first=first[rows],
        last=first[rows] + count[rows] - 1,
    )


def visible_interval(problem: Problem, batch: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(first visible key, number of visible keys) of every row of one head, int64 (rows,).

    With q = 0 every visible key has the same weight, so the mean index and the denominator give the interval.
    """
    q, k, _ = (x.double() for x in problem.sequence(batch, *problem.heads_of(head)))
    index = torch.arange(k.shape[2], dtype=torch.float64)[None, None, :, None]
    out, lse = reference.attention(torch.zeros_like(q), k, index, layout="bhsd", **problem.mask_options())
    count = lse[0, 0].exp().round().long()
    return (out[0, 0, :, 0] - (count - 1) / 2).round().long().clamp_min(0), count


def _choose(row_error: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Rows that see a key: evenly spread ones and those with the largest errors, at most ROWS."""
    seeing = count.nonzero().flatten()
    if len(seeing) <= ROWS:
        return seeing
    even = seeing[torch.linspace(0, len(seeing) - 1, ROWS * 3 // 4).long()]
    worst = seeing[row_error[seeing].topk(ROWS // 4).indices]
    return torch.cat([even, worst]).unique()


def _weights(
    problem: Problem, batch: int, heads: slice, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """exp(score - lse) of all keys for some rows, (rows, keys) float64. q (rows, dim), k (keys, dim), lse (rows, 1)."""
    options = {n: x for n, x in problem.reference_options(heads, batch).items() if n not in MASK_OPTIONS}
    keys = k.shape[0]
    parts = []
    for start in range(0, keys, _KEYS_AT_ONCE):
        units = torch.zeros(keys, min(_KEYS_AT_ONCE, keys - start), dtype=torch.float64)
        units[start : start + units.shape[1]].fill_diagonal_(1)
        out, unmasked = reference.attention(q[None, None], k[None, None], units[None, None], **options)
        parts.append(out[0, 0])
    # a hidden key may outweigh all visible ones by any factor; past e^40 the factor no longer matters
    return torch.cat(parts, 1) * (unmasked[0, 0][:, None] - lse).clamp_max(40.0).exp()


def by_edge(view: HeadView, lower: bool = False) -> Attribution | None:
    """Attribution to single keys at distances -INSIDE .. OUTSIDE from an edge; None where there is no such edge."""
    if lower and not bool((view.first > 0).any()):
        return None
    keys = view.values.shape[0]
    labels = list(range(-INSIDE, OUTSIDE + 1))
    members = []
    for distance in labels:
        key = view.first - distance if lower else view.last + distance
        there = (key >= view.first) & (key <= view.last) if distance <= 0 else (key >= 0) & (key < keys)
        member = torch.zeros_like(view.weights, dtype=torch.bool)
        members.append(member.scatter_(1, key.clamp(0, keys - 1)[:, None], there[:, None]))
    return _attribute(view, labels, members)


def by_block(view: HeadView, block: int) -> Attribution:
    """Attribution to blocks of `block` visible keys; a label is the block's first key."""
    index = torch.arange(view.values.shape[0])
    labels = list(range(0, len(index), block))
    return _attribute(view, labels, [_visible(view) & (index // block == i) for i in range(len(labels))])


def _attribute(view: HeadView, labels: list[int], members: list[torch.Tensor]) -> Attribution:
    """Least squares on the classes, then the exact formula with those that stand out. members: (rows, keys) bool."""
    columns, weights = [], []
    for member in members:
        total = (view.weights * member).sum(1)
        weights.append(float(total.sum() / member.any(1).sum().clamp_min(1)))
        # the exact effect of the change that a fault would make: a weight near 1 is far from first order
        hidden = bool((member & ~_visible(view)).any())
        natural = 1 if hidden else -1
        columns.append(natural * (_changed(view, [(member, natural)]) - view.golden))
    error = torch.nan_to_num(view.result - view.golden, 0.0, 0.0, 0.0)
    change, spread = _least_squares(torch.stack([c.flatten() for c in columns], 1), error.flatten())
    found = [(i, -1 if c < 0 else 1) for i, (c, s) in enumerate(zip(change, spread)) if abs(c) > 0.3 and abs(c) > 5 * s]
    explained = _explained(view, [(members[i], c) for i, c in found], error) if found else 0.0
    return Attribution(labels, change, spread, weights, [(labels[i], c) for i, c in found], explained)


def _least_squares(design: torch.Tensor, error: torch.Tensor) -> tuple[list[float], list[float]]:
    """(coefficients, standard errors) of `error` on the columns of `design`; 0 for columns that are 0."""
    sizes = design.norm(dim=0)
    there = sizes > 1e-9 * sizes.max().clamp_min(1e-300)
    change, spread = torch.zeros_like(sizes), torch.zeros_like(sizes)
    if bool(there.any()):
        scaled = design[:, there] / sizes[there]
        inverse = torch.linalg.pinv(scaled.T @ scaled, rtol=1e-10)
        solved = inverse @ (scaled.T @ error)
        variance = float((error - scaled @ solved).square().sum()) / max(1, len(error) - int(there.sum()))
        change[there] = solved / sizes[there]
        spread[there] = (inverse.diagonal().clamp_min(0) * variance).sqrt() / sizes[there]
    return change.tolist(), spread.tolist()


def _visible(view: HeadView) -> torch.Tensor:
    index = torch.arange(view.weights.shape[1])
    return (index >= view.first[:, None]) & (index <= view.last[:, None])


def _changed(view: HeadView, changes: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """The golden result with the weights of some keys dropped (-1) or doubled (+1); 0 where no weight is left."""
    part = torch.zeros_like(view.weights)
    for member, change in changes:
        part += change * view.weights * member
    total = 1 + part.sum(1, keepdim=True)
    return torch.where(total > 1e-9, (view.golden + part @ view.values) / total, 0.0)


def _explained(view: HeadView, changes: list[tuple[torch.Tensor, int]], error: torch.Tensor) -> float:
    """Share of the squared error that is gone once the changes are made to the golden result."""
    size = float(error.square().sum())
    rest = float((view.golden + error - _changed(view, changes)).square().sum())
    return 1 - rest / size if size else 0.0
