"""What a reward component is: a pure function of one graded completion."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from evojax.evidence.types import Grade, Item
from evojax.registry import Registry


@dataclass(frozen=True)
class Scored:
    """One graded completion, all that a component may look at.

    Args:
        item: the problem. text: the decoded completion. grade: correct or wrong.
        response_tokens: length of the completion, its stop token included.
        budget_tokens: most tokens that the completion could have had.
        overlong_buffer: tokens before the budget's end over which ``overlong`` sets in.
    """

    item: Item
    text: str
    grade: Grade
    response_tokens: int
    budget_tokens: int
    overlong_buffer: int


Component = Callable[[Scored], float]

REWARDS: Registry[Component] = Registry("reward component")

NUMBER = re.compile(r"[+-]?\d{1,18}(?:\.\d{1,18})?")


def number(text: str) -> float | None:
    """The finite number that the whole text spells, or None.

    >>> number(" -3 "), number("0.5"), number("3 or 4")
    (-3.0, 0.5, None)
    """
    value = float(text) if NUMBER.fullmatch(text.strip()) else math.nan
    return value if math.isfinite(value) else None
