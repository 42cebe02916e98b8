"""First of three words in alphabetical order: ``river, apple, stone:`` -> ``apple``.

In the style of reasoning-gym's word_sorting, on its words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task
from evojax.domains.math.tasks.words import common_words

DRAWS = 1500


def problem(words: list[str]) -> Problem:
    """Which of ``words`` comes first; the same words in another order are the same problem."""
    return Problem(" ".join(sorted(words)), ", ".join(words) + ":", min(words))


def problems() -> Iterator[Problem]:
    """Triples of words with three different first letters, in a fixed random order."""
    rng = random.Random(0)
    pool = [word for word in common_words() if 4 <= len(word) <= 6]
    for _ in range(DRAWS):
        words = rng.sample(pool, 3)
        if len({word[0] for word in words}) == 3:
            yield problem(words)


SHOTS = (
    problem(["tree", "apple", "moon"]),
    problem(["bread", "zebra", "king"]),
    problem(["sun", "rain", "cloud"]),
    problem(["horse", "field", "dog"]),
)
TASKS.register("first_alphabetical")(Task(problems, SHOTS))
