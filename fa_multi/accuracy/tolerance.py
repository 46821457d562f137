"""The one tolerance rule: a result may be at most twice as wrong as the naive computation in the input dtype, plus one
rounding step of the output dtype (the rule of FlashAttention's own tests, stated for maximum and for L2 error)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Verdict:
    """How a result compares with the golden one. `problem` is None if it passed, else what failed in one line."""

    max_abs: float
    rel_l2: float
    max_abs_limit: float
    rel_l2_limit: float
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None

    def __str__(self) -> str:
        return (
            f"max abs {self.max_abs:.2e} (limit {self.max_abs_limit:.2e}), "
            f"rel L2 {self.rel_l2:.2e} (limit {self.rel_l2_limit:.2e}): {self.problem or 'ok'}"
        )


def judge(result: torch.Tensor, golden: torch.Tensor, naive: torch.Tensor) -> Verdict:
    """Hold `result` to the rule.

    result : what a lane computed, any float dtype, any device.
    golden : float64, same shape; where it is not finite, the result must be the same infinity or NaN.
    naive : the same computation in the input dtype, same shape.
    """
    if result.shape != golden.shape:
        raise ValueError(f"result must have the golden shape {tuple(golden.shape)}, got {tuple(result.shape)}")
    step = torch.finfo(result.dtype).eps
    x, ref, low = (t.detach().cpu().double() for t in (result, golden, naive))
    finite = ref.isfinite()
    special = torch.where(finite, x.isfinite(), (x == ref) | (x.isnan() & ref.isnan()))
    if not bool(special.all()):
        where = tuple((~special).nonzero()[0].tolist())
        problem = f"{int((~special).sum())} NaN or Inf differ, first at {where}: {x[where]} for {ref[where]}"
        return Verdict(float("nan"), float("nan"), 0.0, 0.0, problem)
    low = torch.where(low.isfinite(), low, ref)  # where the naive way overflows it sets no limit
    x, low, ref = x[finite], low[finite], ref[finite]
    if ref.numel() == 0:
        return Verdict(0.0, 0.0, 0.0, 0.0, None)
    norm = float(ref.norm()) or 1.0
    error, yardstick = x - ref, low - ref
    verdict = hold(
        max_abs=float(error.abs().max()),
        rel_l2=float(error.norm()) / norm,
        naive_max_abs=float(yardstick.abs().max()),
        naive_rel_l2=float(yardstick.norm()) / norm,
        top=float(ref.abs().max()),
        step=step,
    )
    if verdict.ok:
        return verdict
    where = tuple(finite.nonzero()[int(error.abs().argmax())].tolist())
    return replace(verdict, problem=f"{verdict.problem}; worst at {where}")


def hold(
    max_abs: float,
    rel_l2: float,
    naive_max_abs: float,
    naive_rel_l2: float,
    top: float,
    step: float,
    factor: float = 2.0,
) -> Verdict:
    """The rule over numbers already gathered: errors of the result and of the naive computation against fp64.

    top: the largest magnitude of the golden result. step: the spacing of the result's dtype at 1 (its eps).
    """
    limit_abs, limit_rel = factor * naive_max_abs + step * top, factor * naive_rel_l2 + step
    problem = None
    if not max_abs <= limit_abs:
        problem = f"max abs error {max_abs:.3e} above {limit_abs:.3e}"
    elif not rel_l2 <= limit_rel:
        problem = f"relative L2 error {rel_l2:.3e} above {limit_rel:.3e}"
    return Verdict(max_abs, rel_l2, limit_abs, limit_rel, problem)
