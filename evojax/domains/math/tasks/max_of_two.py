"""Larger of two numbers: ``max(31, 58) =`` -> ``58``."""

from __future__ import annotations

import random
from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task

DRAWS = 1500


def problem(a: int, b: int) -> Problem:
    """The larger of ``a`` and ``b``, whichever is named first."""
    low, high = sorted((a, b))
    return Problem(f"{low},{high}", f"max({a}, {b}) =", str(high))


def problems() -> Iterator[Problem]:
    """Pairs of different two-digit numbers in a fixed random order."""
    rng = random.Random(0)
    for _ in range(DRAWS):
        a, b = rng.sample(range(10, 100), 2)
        yield problem(a, b)


SHOTS = (problem(31, 58), problem(74, 20), problem(16, 93))
TASKS.register("max_of_two")(Task(problems, SHOTS))
