"""MaxRL: rewards centred within their group and scaled by its mean."""

from __future__ import annotations

import numpy as np

from evojax.errors import InputError
from evojax.grpo.advantages.base import (
    ADVANTAGES,
    STD_EPS,
    GroupAdvantages,
    RewardTable,
    centred,
    finish,
    members,
)


@ADVANTAGES.register("maxrl")
def maxrl(table: RewardTable) -> GroupAdvantages:
    """``A_i = (r_i - mean) / (mean + 1e-6)`` per group; rewards must not be negative.

    For 0/1 rewards this weighs a prompt by 1 / its success rate: the gradient of the
    log-likelihood of success instead of its probability. A negative mean would turn every
    advantage's sign around.

    Raises:
        InputError: a usable reward is negative.

    References:
        MaxRL, arXiv 2602.02710.

    >>> maxrl(RewardTable(np.eye(1, 4), tolerance=1e-6)).advantages.round(3).tolist()
    [[3.0, -1.0, -1.0, -1.0]]
    """
    who = members(table)
    lowest = float(np.where(who.usable, table.rewards, 0.0).min(initial=0.0))
    if lowest < 0.0:
        raise InputError.one(
            "maxrl divides by the mean reward of a group, and one of its rewards is negative",
            "algorithm.advantage",
            "maxrl",
            f"weigh reward.components so that no reward is below 0 (seen: {lowest:g}), or use rloo",
        )
    number = np.maximum(who.usable.sum(axis=1), 1)
    mean = np.where(who.usable, table.rewards, 0.0).sum(axis=1) / number
    raw = centred(table.rewards, who.usable) / (mean + STD_EPS)[:, None]
    return finish(raw, table.rewards, who, table.tolerance)
