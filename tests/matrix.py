"""The case list of `fa_multi.cases`, and the tolerance rule applied to a result of a case."""

from __future__ import annotations

import torch

from fa_multi.accuracy import Verdict, judge
from fa_multi.cases import CASES, DTYPES, VALUES, VIEWS, Case, Tensors, golden

__all__ = ["CASES", "DTYPES", "VALUES", "VIEWS", "Case", "Tensors", "golden", "verdicts"]


def verdicts(case: Case, out: torch.Tensor, lse: torch.Tensor) -> tuple[Verdict, Verdict]:
    """The tolerance rule applied to out and lse."""
    out64, lse64 = golden(case)
    low_out, low_lse = golden(case, DTYPES[case.dtype])
    return judge(out, out64, low_out), judge(lse, lse64, low_lse)
