"""Which keys an error comes from: the change of their weights that best explains it.

Let row i see keys with weights p_ij (summing to 1), with golden output g_i = sum_j p_ij v_j. If a kernel counts key j of
some class 1 + c times instead of once, its output a_i obeys, exactly,

    a_i - g_i = sum_j c p_ij (v_j - a_i),

which is linear in c. So least squares over rows and columns gives c per class of keys, with a standard error: -1 for keys
that were left out, +1 for keys counted twice, or for hidden keys that were let in. Classes are the distance of a key
from the edge of the row's mask, or its block. Weights and mask come from the reference as a black box: weights as the
output for unit vectors as v, the mask from the output for q = 0. So every option of the reference is covered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import reference
from .problem import MASK_OPTIONS, Problem

ROWS = 256  # rows that an attribution looks at
_KEYS_AT_ONCE = 1024
INSIDE, OUTSIDE = 8, 4  # distances from the mask edge that are looked at


@dataclass
class HeadView:
    """One head of one batch entry, cut to the rows that are looked at, in float64.

    rows: indices. result, golden: (rows, dim_v). values: (keys, dim_v). weights: (rows, keys), of every key, relative to
    the golden denominator, hidden keys too. first, last: (rows,) visible keys are first .. last, inclusive.
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
    """Least-squares change of the weights of classes of keys.

    labels: of the classes. change: c. error: its standard error. weight: mean golden weight of the class where it exists.
    explained: share of the squared error that the changes explain.
    """

    labels: list[int]
    change: list[float]
    error: list[float]
    weight: list[float]
    explained: float

    def to_dict(self) -> dict[str, object]:
        return dict(vars(self))

    def clear(self) -> list[tuple[int, float]]:
        """(label, change) of classes that changed by more than a third, beyond doubt."""
        found = zip(self.labels, self.change, self.error)
        return [(label, c) for label, c, error in found if abs(c) > 0.33 and abs(c) > 6 * error]


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


def view_head(problem: Problem, batch: int, head: int, result: torch.Tensor, row_error: torch.Tensor) -> HeadView | None:
    """The head for attribution, or None if it has no row that sees a key.

    result : (seqlen_q, dim_v), the output of the head. row_error : (seqlen_q,), its error by row.
    """
    q, k, v = (problem.by_head(t)[batch] for t in problem.qkv())
    key_head = head // (q.shape[0] // k.shape[0])
    heads = slice(head, head + 1), slice(key_head, key_head + 1)
    golden = problem.golden(batch, *heads)
    first, count = visible_interval(problem, batch, *heads)
    rows = _choose(row_error, count)
    if not len(rows):
        return None
    lse = golden["lse"][0, rows]
    return HeadView(
        batch=batch,
        head=head,
        rows=rows,
        result=result[rows].double(),
        golden=golden["out"][0, rows],
        values=v[key_head].double(),
        weights=_weights(problem, q[head, rows], k[key_head], lse),
        first=first[rows],
        last=first[rows] + count[rows] - 1,
    )


def visible_interval(
    problem: Problem, batch: int, heads_q: slice, heads_k: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """(first visible key, number of visible keys) of every row of one head, int64 (seqlen_q,).

    With q = 0 every visible key has the same weight, so the mean index and the denominator give the interval.
    """
    q, k, _ = (problem.by_head(t)[batch : batch + 1].double() for t in problem.qkv())
    q, k = torch.zeros_like(q[:, heads_q]), k[:, heads_k]
    index = torch.arange(k.shape[2], dtype=torch.float64)
    probe = torch.stack([index, torch.ones_like(index)], -1)[None, None]
    out, lse = reference.attention(q, k, probe, **problem.reference_options())
    mass = out[0, 0, :, 1]
    count = (mass * lse[0, 0].exp()).round().long()
    middle = torch.where(mass > 0, out[0, 0, :, 0] / mass, 0.0)
    return (middle - (count - 1) / 2).round().long().clamp_min(0), count


def _choose(row_error: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Rows that see a key: evenly spread ones and those with the largest errors, at most ROWS."""
    seeing = count.nonzero().flatten()
    if len(seeing) <= ROWS:
        return seeing
    even = seeing[torch.linspace(0, len(seeing) - 1, ROWS * 3 // 4).long()]
    worst = seeing[row_error[seeing].topk(ROWS // 4).indices]
    return torch.cat([even, worst]).unique()


def _weights(problem: Problem, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(score - lse) of all keys for some rows, (rows, keys) float64. q (rows, dim), k (keys, dim), lse (rows, 1)."""
    options = {n: x for n, x in problem.reference_options().items() if n not in MASK_OPTIONS}
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
    columns, weights = [], []
    for distance in labels:
        key = view.first - distance if lower else view.last + distance
        inside = (key >= view.first) & (key <= view.last) if distance <= 0 else (key >= 0) & (key < keys)
        index = key.clamp(0, keys - 1)
        weight = view.weights.gather(1, index[:, None])[:, 0] * inside
        columns.append(weight[:, None] * (view.values[index] - view.result))
        weights.append(float(weight.sum() / inside.sum().clamp_min(1)))
    return _fit(view, labels, columns, weights)


def by_block(view: HeadView, block: int) -> Attribution:
    """Attribution to blocks of `block` visible keys; a label is the block's first key."""
    keys = view.values.shape[0]
    index = torch.arange(keys)
    seen = view.weights * ((index >= view.first[:, None]) & (index <= view.last[:, None]))
    labels = list(range(0, keys, block))
    columns, weights = [], []
    for start in labels:
        part = seen[:, start : start + block]
        total = part.sum(1, keepdim=True)
        columns.append(part @ view.values[start : start + block] - total * view.result)
        weights.append(float(total.mean()))
    return _fit(view, labels, columns, weights)


def _fit(view: HeadView, labels: list[int], columns: list[torch.Tensor], weights: list[float]) -> Attribution:
    """Least squares of the error on the classes that exist."""
    error = torch.nan_to_num(view.result - view.golden, 0.0, 0.0, 0.0).flatten()
    design = torch.nan_to_num(torch.stack([c.flatten() for c in columns], 1), 0.0, 0.0, 0.0)
    sizes = design.norm(dim=0)
    there = sizes > 1e-9 * sizes.max().clamp_min(1e-300)
    change, spread = torch.zeros(len(labels), dtype=torch.float64), torch.zeros(len(labels), dtype=torch.float64)
    explained, total = 0.0, float(error.square().sum())
    if bool(there.any()) and total:
        scaled = design[:, there] / sizes[there]
        solved = torch.linalg.lstsq(scaled, error[:, None], driver="gelsd").solution[:, 0]
        rest = float((error - scaled @ solved).square().sum())
        variance = rest / max(1, len(error) - int(there.sum()))
        inverse = torch.linalg.pinv(scaled.T @ scaled)
        change[there] = solved / sizes[there]
        spread[there] = (inverse.diagonal().clamp_min(0) * variance).sqrt() / sizes[there]
        explained = 1 - rest / total
    return Attribution(labels, change.tolist(), spread.tolist(), weights, explained)
