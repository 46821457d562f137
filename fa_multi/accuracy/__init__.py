"""Judging results: the tolerance rule of the tests, and captures of two devices compared (docs/accuracy.md).

Submodules: `capture` runs cases and keeps their results, `compare` measures and judges, `report` prints, `store` is the
file format, `standards` has every threshold. They are imported on use, so that the rule alone stays light.
"""

from .tolerance import Verdict, judge

__all__ = ["Verdict", "judge"]
