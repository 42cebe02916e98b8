"""1 for a right answer, else 0."""

from __future__ import annotations

from evojax.rewards.base import REWARDS, Scored


@REWARDS.register("correct")
def correct(scored: Scored) -> float:
    """1.0 if the grader found the answer right, 0.0 if wrong."""
    return float(scored.grade.status == "correct")
