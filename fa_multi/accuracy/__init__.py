"""Judging results: the tolerance rule that every lane's results are held to."""

from .tolerance import Verdict, judge

__all__ = ["Verdict", "judge"]
