"""Product of two small numbers: ``3 * 4 =`` -> ``12``."""

from __future__ import annotations

from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task


def problem(a: int, b: int) -> Problem:
    """a times b; the order of the two does not make another problem."""
    low, high = sorted((a, b))
    return Problem(f"{low}*{high}", f"{a} * {b} =", str(a * b))


def problems() -> Iterator[Problem]:
    """Factors 2 to 9 by 2 to 19, smaller factor first in every second problem."""
    for a in range(2, 10):
        for b in range(2, 20):
            yield problem(a, b) if (a + b) % 2 else problem(b, a)


SHOTS = (problem(3, 4), problem(7, 2), problem(5, 10), problem(11, 6))
TASKS.register("times")(Task(problems, SHOTS))
