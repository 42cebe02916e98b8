"""1 for a completion that is one well-formed final answer, right or wrong."""

from __future__ import annotations

from evojax.domains.math.graders import TRUNCATED
from evojax.rewards.base import REWARDS, Scored, number


@REWARDS.register("format")
def well_formed(scored: Scored) -> float:
    """1.0 if a final answer of the right kind was given, else 0.0.

    The kind is that of the reference: a number, or one word of letters. With the boxed grader a
    final box is enough. A completion cut off by the token budget has no final answer.
    """
    item, grade = scored.item, scored.grade
    if not grade.extracted or grade.detail == TRUNCATED:
        return 0.0
    if item.grader == "boxed":
        return 1.0
    if number(item.answer) is not None:
        return float(number(grade.extracted) is not None)
    return float(grade.extracted.isalpha() == item.answer.isalpha())
