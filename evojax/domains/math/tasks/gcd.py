"""Greatest common divisor of two numbers, from reasoning-gym's gcd: ``gcd(8, 12) =`` -> ``4``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task
from evojax.domains.math.tasks.gym import gym_module

DRAWS = 6000  # 361 ordered pairs; reasoning-gym draws coprime ones less often


def problem(a: int, b: int) -> Problem:
    """The problem gcd(a, b); the order of the two does not make another problem."""
    low, high = sorted((a, b))
    return Problem(f"{low},{high}", f"gcd({a}, {b}) =", str(math.gcd(a, b)))


def problems() -> Iterator[Problem]:
    """Pairs from 2 to 20 in the order that reasoning-gym draws them."""
    gym = gym_module("arithmetic.gcd")
    dataset = gym.GCDDataset(gym.GCDConfig(min_value=2, max_value=20, seed=0, size=DRAWS))
    for i in range(DRAWS):
        a, b = dataset[i]["metadata"]["numbers"]
        yield problem(a, b)


SHOTS = (problem(4, 6), problem(9, 3), problem(7, 5), problem(8, 16))
TASKS.register("gcd")(Task(problems, SHOTS))
