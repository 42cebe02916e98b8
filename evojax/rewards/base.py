"""What a reward component is: a pure function of one graded completion."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from evojax.evidence.types import Grade, Item
from evojax.registry import Registry

Component = Callable[[Item, str, Grade], float]

REWARDS: Registry[Component] = Registry("reward component")

NUMBER = re.compile(r"[+-]?\d{1,18}(?:\.\d{1,18})?")


def number(text: str) -> float | None:
    """The finite number that the whole text spells, or None.

    >>> number(" -3 "), number("0.5"), number("3 or 4")
    (-3.0, 0.5, None)
    """
    value = float(text) if NUMBER.fullmatch(text.strip()) else math.nan
    return value if math.isfinite(value) else None
