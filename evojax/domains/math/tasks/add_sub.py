"""Sum or difference of two digits, from reasoning-gym's chain_sum: ``3 + 4 =`` -> ``7``."""

from __future__ import annotations

from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task
from evojax.domains.math.tasks.gym import gym_module

DRAWS = 4000  # 200 expressions exist: each is missed with probability 2e-9


def problem(a: int, op: str, b: int) -> Problem:
    """The problem ``a op b``; a + b and b + a share a key."""
    low, high = sorted((a, b)) if op == "+" else (a, b)
    return Problem(f"{low}{op}{high}", f"{a} {op} {b} =", str(a + b if op == "+" else a - b))


def problems() -> Iterator[Problem]:
    """All one-digit sums and differences in the order that reasoning-gym draws them."""
    gym = gym_module("arithmetic.chain_sum")
    dataset = gym.ChainSumDataset(
        gym.ChainSumConfig(min_terms=2, max_terms=2, min_digits=1, max_digits=1, seed=0, size=DRAWS)
    )
    for i in range(DRAWS):
        a, op, b = dataset[i]["metadata"]["expression"].split()
        yield problem(int(a), op, int(b))


SHOTS = (problem(3, "+", 4), problem(5, "-", 2), problem(2, "-", 8), problem(6, "+", 7))
TASKS.register("add_sub")(Task(problems, SHOTS))
