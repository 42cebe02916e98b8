"""How often a letter occurs in one word: ``count(hello, l) =`` -> ``2``.

In the style of reasoning-gym's letter_counting, on its words. Most letters occur once, so the
words are dealt over the counts 0 to 3: no constant answer is right more often than chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task
from evojax.domains.math.tasks.words import common_words

ABSENT = "aeiourstln"


def problem(letter: str, word: str) -> Problem:
    """How often ``letter`` is in ``word``; a word is asked about one letter only."""
    return Problem(word, f"count({word}, {letter}) =", str(word.count(letter)))


def problems() -> Iterator[Problem]:
    """Words with a letter each, the counts 0 to 3 in turn as long as the rarest lasts."""
    by_count: dict[int, list[Problem]] = {0: [], 1: [], 2: [], 3: []}
    for word in common_words():
        top = max(word.count(letter) for letter in word)
        draw = hashlib.sha256(word.encode()).digest()
        want = min(top, 3) if top > 1 else draw[0] % 2
        fit = [c for c in sorted(set(word) | set(ABSENT)) if word.count(c) == want]
        if fit:
            by_count[want].append(problem(fit[draw[1] % len(fit)], word))
    rounds = min(len(by_count[0]), len(by_count[1]), len(by_count[2]))
    for i in range(rounds):
        for group in by_count.values():
            if i < len(group):
                yield group[i]


SHOTS = (
    problem("e", "tree"),
    problem("s", "moon"),
    problem("a", "banana"),
    problem("c", "cat"),
)
TASKS.register("letter_count")(Task(problems, SHOTS))
