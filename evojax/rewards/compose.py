"""Weighs the reward components into one reward.

A component that is the same for every sample of a group does not teach: the group normalisation
takes the mean away. With (correct, format) weights (1, 0.2) and all samples well-formed, the
advantages are those of ``correct`` alone. Weights only matter against each other within a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from evojax.errors import InputError, Problem
from evojax.rewards.base import REWARDS, Scored

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
    weights: Mapping[str, float], scored: Scored, clip: float | None = None
) -> tuple[float, dict[str, float]]:
    """Reward of one graded completion: the weighted sum of its components, cut to a range.

    ``reward = clip(sum_c weights[c] * c(scored), -clip, clip)``

    Args:
        weights: component name to finite weight; a negative weight is a penalty.
        clip: reward units; None leaves the sum as it is.

    Returns:
        The reward and the unweighted value of *every* registered component, so that another
        weighting can be tried on stored rollouts. Unscorable: NaN and no components.

    Raises:
        InputError: unknown component, or weights that cannot be used.
    """
    problems = weight_problems(weights)
    if problems:
        raise InputError(problems)
    if scored.grade.status == "unscorable":
        return math.nan, {}
    components = {name: REWARDS.get(name, where=WHERE)(scored) for name in REWARDS}
    return clipped(sum(contributions(weights, components).values()), clip), components


def contributions(
    weights: Mapping[str, float], components: Mapping[str, float]
) -> dict[str, float]:
    """What each weighted component adds to the reward before clipping, in reward units.

    A component without a value (unscorable, or never stored) adds NaN, never 0.

    >>> contributions({"correct": 1.0, "partial": 0.5}, {"correct": 0.0, "partial": 0.5})
    {'correct': 0.0, 'partial': 0.25}
    """
    return {n: weight * components.get(n, math.nan) for n, weight in weights.items() if weight}


def clipped(reward: float, clip: float | None) -> float:
    """``reward`` cut to ``[-clip, clip]``; NaN stays NaN.

    >>> clipped(3.0, 2.0), clipped(-3.0, 2.0), clipped(3.0, None)
    (2.0, -2.0, 3.0)
    >>> clipped(math.nan, 2.0)
    nan
    """
    return reward if clip is None else float(np.clip(reward, -clip, clip))
