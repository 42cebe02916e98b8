"""Even or odd: ``37 is`` -> ``odd``."""

from __future__ import annotations

from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task


def problem(number: int) -> Problem:
    """Whether ``number`` is even or odd."""
    return Problem(str(number), f"{number} is", "odd" if number % 2 else "even")


def problems() -> Iterator[Problem]:
    """The numbers 10 to 499."""
    return (problem(number) for number in range(10, 500))


SHOTS = (problem(4), problem(27), problem(113), problem(68))
TASKS.register("parity")(Task(problems, SHOTS))
