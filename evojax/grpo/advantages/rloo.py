"""RLOO: each reward against the mean of the other members."""

from __future__ import annotations

import numpy as np

from evojax.grpo.advantages.base import (
    ADVANTAGES,
    GroupAdvantages,
    RewardTable,
    centred,
    finish,
    members,
)


@ADVANTAGES.register("rloo")
def rloo(table: RewardTable) -> GroupAdvantages:
    """``A_i = r_i - mean of the others = n / (n - 1) * (r_i - mean)``, n usable members.

    Computed from the centred rewards, for a leave-one-out mean of equal rewards is off by a
    rounding residue.

    References:
        Back to Basics (RLOO), arXiv 2402.14740, section 3.

    >>> rloo(RewardTable(np.eye(1, 5), tolerance=1e-6)).advantages.tolist()
    [[1.0, -0.25, -0.25, -0.25, -0.25]]
    """
    who = members(table)
    number = who.usable.sum(axis=1)
    scale = number / np.maximum(number - 1, 1)
    raw = scale[:, None] * centred(table.rewards, who.usable)
    return finish(raw, table.rewards, who, table.tolerance)
