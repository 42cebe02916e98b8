"""Last letter of a word: ``stone:`` -> ``e``."""

from __future__ import annotations

from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task
from evojax.domains.math.tasks.words import common_words


def problem(word: str) -> Problem:
    """The last letter of ``word``."""
    return Problem(word, f"{word}:", word[-1])


def problems() -> Iterator[Problem]:
    """Every common word of four letters or more."""
    return (problem(word) for word in common_words() if len(word) >= 4)


SHOTS = (problem("tree"), problem("moon"), problem("apple"), problem("bird"), problem("glass"))
TASKS.register("last_letter")(Task(problems, SHOTS))
