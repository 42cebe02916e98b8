"""Weighs the reward components into one reward.

A component that is the same for every sample of a group does not teach: the group normalisation
takes the mean away. With (correct, format) weights (1, 0.2) and all samples well-formed, the
advantages are those of ``correct`` alone. Weights only matter against each other within a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from evojax.errors import InputError, Problem
from evojax.evidence.types import Grade, Item
from evojax.rewards.base import REWARDS

WHERE = "reward.components"


def weight_problems(weights: Mapping[str, float]) -> list[Problem]:
    """What is wrong with the weights: none at all, unknown names, values that are not finite."""
    found: list[Problem] = []
    if not any(weights.values()):
        remedy = f"weigh at least one of {', '.join(REWARDS)}"
        found.append(Problem("no component has a weight", WHERE, dict(weights), remedy))
    for name, weight in weights.items():
        try:
            REWARDS.get(name, where=WHERE)
        except InputError as error:
            found += error.problems
        if not math.isfinite(weight):
            found.append(
                Problem("weight is not a finite number", f"{WHERE}.{name}", weight, "set e.g. 1.0")
            )
    return found


def compose(
    weights: Mapping[str, float], item: Item, text: str, grade: Grade
) -> tuple[float, dict[str, float]]:
    """Reward of one graded completion: the weighted sum of its components.

    ``reward = sum_c weights[c] * c(item, text, grade)``

    Args:
        weights: component name to finite weight; a negative weight is a penalty.
        item: the problem. text: the completion. grade: the grader's answer.

    Returns:
        The reward and the unweighted value of *every* registered component, so that another
        weighting can be tried on stored rollouts. Unscorable: NaN and no components.

    Raises:
        InputError: unknown component, or weights that cannot be used.
    """
    problems = weight_problems(weights)
    if problems:
        raise InputError(problems)
    if grade.status == "unscorable":
        return math.nan, {}
    components = {name: REWARDS.get(name, where=WHERE)(item, text, grade) for name in REWARDS}
    return sum(weight * components[name] for name, weight in weights.items()), components
