"""Next number of a rising progression: ``2, 4, 6,`` -> ``8``."""

from __future__ import annotations

from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task


def problem(start: int, step: int) -> Problem:
    """Three terms from ``start`` by ``step``; the fourth is asked for."""
    terms = [start + i * step for i in range(4)]
    return Problem(f"{start}+{step}k", ", ".join(map(str, terms[:3])) + ",", str(terms[3]))


def problems() -> Iterator[Problem]:
    """Starts 1 to 30, steps 2 to 9."""
    for start in range(1, 31):
        for step in range(2, 10):
            yield problem(start, step)


SHOTS = (problem(2, 2), problem(5, 3), problem(10, 5))
TASKS.register("next_number")(Task(problems, SHOTS))
