"""1 for a right answer, else 0."""

from __future__ import annotations

from evojax.evidence.types import Grade, Item
from evojax.rewards.base import REWARDS


@REWARDS.register("correct")
def correct(item: Item, text: str, grade: Grade) -> float:
    """1.0 if the grader found the answer right, 0.0 if wrong.

    Args:
        item: the problem. text: the completion. grade: correct or wrong.
    """
    return float(grade.status == "correct")
