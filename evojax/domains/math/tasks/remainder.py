"""Remainder of a division: ``17 mod 5 =`` -> ``2``."""

from __future__ import annotations

from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task


def problem(number: int, divisor: int) -> Problem:
    """What is left of ``number`` divided by ``divisor``."""
    return Problem(f"{number}%{divisor}", f"{number} mod {divisor} =", str(number % divisor))


def problems() -> Iterator[Problem]:
    """Numbers 6 to 50 by divisors 2 to 5."""
    for number in range(6, 51):
        for divisor in range(2, 6):
            yield problem(number, divisor)


SHOTS = (problem(7, 3), problem(12, 4), problem(19, 5), problem(9, 2))
TASKS.register("remainder")(Task(problems, SHOTS))
