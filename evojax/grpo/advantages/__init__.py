"""Advantages: how much better one sample of a prompt did than its siblings.

Each estimator is a function on the reward table of one batch, filed under its name.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from evojax.grpo.advantages import batch_std, dr_grpo, gdpo, grpo, maxrl, rloo
from evojax.grpo.advantages.base import ADVANTAGES, AdvantageFn, GroupAdvantages, RewardTable

__all__ = [
    "ADVANTAGES",
    "AdvantageFn",
    "GroupAdvantages",
    "RewardTable",
    "batch_std",
    "dr_grpo",
    "estimate",
    "gdpo",
    "grpo",
    "maxrl",
    "rloo",
]


def estimate(name: str, table: RewardTable, clip: float | None = None) -> GroupAdvantages:
    """Advantages by the estimator called ``name``, cut to ``[-clip, clip]``.

    Args:
        name: registered name (``algorithm.advantage``).
        table: the whole batch: ``batch_std`` and ``gdpo`` take a statistic over all of it.
        clip: > 0, in units of the advantage; None cuts nothing. A cut group no longer sums to 0.

    Raises:
        InputError: no such estimator, or rewards that it cannot take.
        ValueError: clip is not above 0.

    >>> estimate("dr_grpo", RewardTable(np.eye(1, 4), 1e-6), clip=0.5).advantages.tolist()
    [[0.5, -0.25, -0.25, -0.25]]
    """
    result = ADVANTAGES.get(name, "algorithm.advantage")(table)
    if clip is None:
        return result
    if not clip > 0.0:
        raise ValueError(f"advantage clip must be above 0, got {clip}")
    return dataclasses.replace(result, advantages=np.clip(result.advantages, -clip, clip))
