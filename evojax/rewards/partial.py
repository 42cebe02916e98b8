"""How near a wrong answer is: gives all-wrong groups a gradient."""

from __future__ import annotations

from evojax.rewards.base import REWARDS, Scored, number

BEST_WRONG = 0.9  # a wrong answer always earns less than a right one


@REWARDS.register("partial")
def partial(scored: Scored) -> float:
    r"""Closeness in [0, 1]; 1 only for a right answer.

    Numbers: ``0.9 / (1 + |value - reference|)``. Words: 0.9 times the length of the common prefix
    over the longer length. A number where a word is asked for, or the reverse, earns 0, and so
    does a formula in a box, for which no distance is defined. Only what the grader extracted
    counts.
    """
    item, grade = scored.item, scored.grade
    if grade.status == "correct":
        return 1.0
    got, want = number(grade.extracted), number(item.answer)
    if want is not None:
        return 0.0 if got is None else BEST_WRONG / (1.0 + abs(got - want))
    if got is not None or not item.answer.isalpha():
        return 0.0
    return BEST_WRONG * prefix_share(grade.extracted, item.answer)


def prefix_share(a: str, b: str) -> float:
    """Length of the common prefix over the longer length, in [0, 1].

    >>> prefix_share("apply", "apple"), prefix_share("", "")
    (0.8, 0.0)
    """
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    return common / max(len(a), len(b), 1)
