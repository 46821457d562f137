"""What an error looks like, in words: the signatures of common kernel faults, tested one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from .attribution import INSIDE, Attribution, EdgeProfile, HeadView, by_block, by_edge, view_head, visible_interval
from .metrics import Place, Tally
from .problem import Problem

Source = Callable[[str, int, slice], torch.Tensor]

_EXPLAINED = 0.6  # share of the squared error that a cause must explain to be named
_SAME = 0.05  # relative L2 below which two heads count as one
_HEADS_TRIED = 4
_KEY_BLOCKS = 64


def explain(
    problem: Problem, source: Source, own: Mapping[str, Tally], naive: Mapping[str, Tally], failed: bool
) -> tuple[list[str], EdgeProfile | None]:
    """(findings, error by distance to the mask edge) of one result; findings only if it `failed`.

    own, naive: tallies by tensor name, of the result and of the naive computation, against golden.
    """
    out = own.get("out")
    view = _worst_head(problem, source, out) if out is not None else None
    profile = None
    if view is not None:
        upper = by_edge(view)
        assert upper is not None
        profile = EdgeProfile(view.batch, view.head, upper, by_edge(view, lower=True))
    if not failed:
        return [], profile
    findings = _lse(problem, source, own)
    if out is not None:
        findings += _specials(problem, out) or _isolated(out) or _causes(problem, source, own, naive, view, profile)
    return findings, profile


def _worst_head(problem: Problem, source: Source, out: Tally) -> HeadView | None:
    energy = out.row_square.sum(-1)
    if not energy.numel() or not out.row_square.shape[2] or not problem.tensors[problem.names[1]].numel():
        return None
    batch, head = divmod(int(energy.argmax()), energy.shape[1])
    result = source("out", batch, slice(head, head + 1))[0]
    return view_head(problem, batch, head, result, out.row_square[batch, head])


def _causes(
    problem: Problem,
    source: Source,
    own: Mapping[str, Tally],
    naive: Mapping[str, Tally],
    view: HeadView | None,
    profile: EdgeProfile | None,
) -> list[str]:
    heads = _heads(problem, source, own["out"])
    if heads:
        return heads
    mass = _mass(own, naive)
    keys = _edges(profile) if profile else []
    if view is not None and not keys:
        keys = _blocks(view)
    return mass + keys or _concentrated(own["out"]) or _spread(own["out"], naive["out"])


# -------------------------------------------------------------------------------------------------------- signatures


def _specials(problem: Problem, out: Tally) -> list[str]:
    places = out.m.special_at
    if not places:
        return []
    empty = 0
    for place in places:
        batch, head, row = (place.at[a] for a in ("batch", "head", "query"))
        _, count = visible_interval(problem, batch, head)
        empty += int(count[row] == 0)
    where = (
        "rows that see no key" if empty == len(places) else "rows that see keys" if not empty else "rows of both kinds"
    )
    return [f"{out.m.special_differ} elements of out are NaN or Inf (or are not, and should be), in {where}"]


def _isolated(out: Tally) -> list[str]:
    errors = [abs(p.result - p.reference) for p in out.m.worst]
    for n in range(1, len(errors)):
        if errors[n] < errors[n - 1] / 3:
            if n > max(1, out.m.elements // 1000):
                return []
            listed = "; ".join(str(p) for p in out.m.worst[:n])
            one = "one element of out is" if n == 1 else f"{n} elements of out are"
            return [f"{one} wrong by itself, the next largest error is {errors[n]:.1e}: {listed}"]
    return []


def _lse(problem: Problem, source: Source, own: Mapping[str, Tally]) -> list[str]:
    tally = own.get("lse")
    if tally is None or tally.m.max_abs <= 1e-3 * max(1.0, tally.m.reference_max):
        return []
    worst = tally.m.worst[0].at
    key_head = problem.heads_of(worst["head"])[1]
    group = problem.sizes[1] // problem.sizes[2]
    heads = slice(key_head.start * group, key_head.stop * group)
    known = problem.golden(worst["batch"], heads, key_head)["lse"].flatten()
    found = source("lse", worst["batch"], heads).double().flatten()
    finite = known.isfinite() & found.isfinite()
    known, found = known[finite], found[finite]
    difference = found - known
    slope = float((found * known).sum() / known.square().sum().clamp_min(1e-300))
    left = float((found - slope * known).norm() / difference.norm().clamp_min(1e-300))
    if abs(slope - math.log2(math.e)) < 0.02 and left < 0.05:
        return [f"LSE is in base 2: it is {slope:.4f} = log2(e) times the golden LSE; multiply it by ln 2"]
    if left < 0.05:
        return [f"LSE is {slope:.4f} times the golden LSE"]
    if float(difference.std(correction=0)) < 0.05 * abs(float(difference.mean())):
        return [f"LSE is off by the same {float(difference.mean()):+.4g} nats in every row"]
    return [f"LSE is off by up to {tally.m.max_abs:.2e} nats, {tally.m.worst[0]}"]


def _heads(problem: Problem, source: Source, out: Tally) -> list[str]:
    """Heads that hold another head's result, or that were computed with another key head."""
    batch_heads = out.row_square.sum(-1)
    top = out.row_top.square().sum(-1)
    _, heads_q, heads_k, _ = problem.sizes
    if heads_q == 1:
        return []
    batch = int(batch_heads.sum(-1).argmax())
    bad = [h for h in range(heads_q) if batch_heads[batch, h] > _SAME * top[batch, h]]
    if not bad:
        return []
    group = heads_q // heads_k
    golden = problem.golden(batch, slice(0, heads_q), slice(0, heads_k))["out"]
    findings = []
    for h in bad[:_HEADS_TRIED]:
        result = source("out", batch, slice(h, h + 1))[0].double()
        twin = next((x for x in range(heads_q) if x != h and _close(result, golden[x])), None)
        if twin is not None:
            findings.append(f"query head {h} holds the result of query head {twin} (batch {batch})")
            continue
        used = next(
            (x for x in range(heads_k) if x != h // group and _close(result, _crossed(problem, batch, h, x))), None
        )
        if used is not None:
            findings.append(f"query head {h} was computed with key head {used} instead of {h // group} (batch {batch})")
    if findings and len(bad) > _HEADS_TRIED:
        findings.append(f"{len(bad)} of {heads_q} heads are wrong in this batch entry")
    return findings


def _close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return float((x - y).norm()) <= _SAME * float(y.norm())


def _crossed(problem: Problem, batch: int, head: int, key_head: int) -> torch.Tensor:
    """The golden output of a query head with a key head that is not its own, (rows, dim)."""
    return problem.golden(batch, slice(head, head + 1), slice(key_head, key_head + 1))["out"][0]


def _mass(own: Mapping[str, Tally], naive: Mapping[str, Tally]) -> list[str]:
    tally = own.get("mass")
    if tally is None or not tally.m.worst:
        return []
    step = torch.finfo(tally.dtype).eps
    limit = 2 * naive["mass"].m.max_abs + step * tally.m.reference_max
    if tally.m.max_abs <= limit:
        return []
    place: Place = tally.m.worst[0]
    if place.reference == 0:
        return [f"a row that sees no key has weights: softmax mass {place}"]
    lse_fits = "lse" in own and own["lse"].m.max_abs <= 1e-3 * max(1.0, own["lse"].m.reference_max)
    cause = "numerator and denominator disagree"
    if place.result > 1.05 * place.reference:
        cause += ": a rescale of the accumulator is missing" if lse_fits else ""
    else:
        cause += ": sums or probabilities are kept in too few bits, or a tile is missing from one of them"
    return [f"softmax mass is wrong, {place}; {cause}"]


def _edges(profile: EdgeProfile) -> list[str]:
    findings = []
    for name, fit in (("upper", profile.upper), ("lower", profile.lower)):
        if fit is None or fit.explained < _EXPLAINED:
            continue
        what = "; ".join(_edge_text(d, c) for d, c in fit.found if d > -INSIDE or len(fit.found) <= INSIDE)
        more = " and beyond: a whole tile" if len(fit.found) > INSIDE else ""
        findings.append(
            f"at the {name} mask edge, {what}{more} (explains {fit.explained:.0%} of the error "
            f"of batch {profile.batch} head {profile.head})"
        )
    return findings


def _edge_text(distance: int, change: float) -> str:
    if distance > 0:
        which = "the first hidden key" if distance == 1 else f"hidden key {distance}"
        return (
            f"{which} (distance {distance}) is let in" if change > 0 else f"{which} (distance {distance}) is subtracted"
        )
    which = "the last visible key" if distance == 0 else f"the visible key {-distance} before it"
    return f"{which} (distance {distance}) is {'left out' if change < 0 else 'counted twice'}"


def _blocks(view: HeadView) -> list[str]:
    keys = view.values.shape[0]
    block = max(16, -(-keys // _KEY_BLOCKS // 16) * 16)
    fit = by_block(view, block)
    if fit.explained < _EXPLAINED:
        return []
    findings = []
    for first, last, change in _runs(fit, block, keys):
        verb = "left out" if change < 0 else "counted twice"
        findings.append(
            f"keys {first} to {last - 1} are {verb} (explains {fit.explained:.0%} of the error of batch "
            f"{view.batch} head {view.head})"
        )
    return findings


def _runs(fit: Attribution, block: int, keys: int) -> list[tuple[int, int, int]]:
    """Classes that stand out, joined where they touch: (first key, one past the last, -1 or +1)."""
    runs: list[tuple[int, int, int]] = []
    for start, change in fit.found:
        end = min(start + block, keys)
        if runs and runs[-1][1:] == (start, change):
            runs[-1] = (runs[-1][0], end, change)
        else:
            runs.append((start, end, change))
    return runs


def _concentrated(out: Tally) -> list[str]:
    findings = []
    for axis, energy in (("head", out.row_square.sum((0, 2))), ("query", out.row_square.sum((0, 1)))):
        order = energy.sort(descending=True)
        share = order.values.cumsum(0) / order.values.sum().clamp_min(1e-300)
        few = int((share < 0.9).sum()) + 1
        if few <= len(energy) // 4:
            places = sorted(order.indices[:few].tolist())
            findings.append(f"90% of the error is in {_ranges(places)} of {len(energy)} (axis {axis})")
    return findings


def _ranges(places: list[int]) -> str:
    runs: list[list[int]] = []
    for i in places:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:6]]
    return ", ".join(shown) + (f" and {len(runs) - 6} more runs" if len(runs) > 6 else "")


def _spread(out: Tally, naive: Tally) -> list[str]:
    m = out.m
    size = m.rmse / m.reference_rms if m.reference_rms else 0.0
    if not size:
        return []
    against = f"{m.rmse / naive.m.rmse:.2g} times the naive computation's" if naive.m.rmse else "where naive has none"
    return [
        "the error is spread over heads, rows and keys without a pattern, as rounding is: "
        f"RMSE is 2^{math.log2(size):.1f} of the values, {against}"
    ]
