"""Greatest common divisor of two numbers, from reasoning-gym's gcd: ``gcd(8, 12) =`` -> ``4``.

More than half of all pairs are coprime, so a policy that always says 1 would look as if it had
learned. Every answer is therefore given to a limited number of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task
from evojax.domains.math.tasks.gym import gym_module

DRAWS = 9000
HIGHEST = 30
PER_ANSWER = 24  # pairs with the same answer, at most: a constant answer is right for 1 in 6


def problem(a: int, b: int) -> Problem:
    """The problem gcd(a, b); the order of the two does not make another problem."""
    low, high = sorted((a, b))
    return Problem(f"{low},{high}", f"gcd({a}, {b}) =", str(math.gcd(a, b)))


def problems() -> Iterator[Problem]:
    """Pairs of different numbers in the order that reasoning-gym draws them, answers balanced."""
    gym = gym_module("arithmetic.gcd")
    config = gym.GCDConfig(min_value=2, max_value=HIGHEST, seed=0, size=DRAWS)
    dataset = gym.GCDDataset(config)
    given: dict[str, set[str]] = {}
    for i in range(DRAWS):
        a, b = dataset[i]["metadata"]["numbers"]
        found = problem(a, b)
        known = given.setdefault(found.answer, set())
        if a != b and (found.key in known or len(known) < PER_ANSWER):
            known.add(found.key)
            yield found


SHOTS = (problem(4, 6), problem(9, 3), problem(7, 5), problem(8, 16))
TASKS.register("gcd")(Task(problems, SHOTS))
