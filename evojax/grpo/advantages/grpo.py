"""GRPO: rewards normalised within their group."""

from __future__ import annotations

from evojax.grpo.advantages.base import (
    ADVANTAGES,
    GroupAdvantages,
    RewardTable,
    finish,
    members,
    normalised,
)


@ADVANTAGES.register("grpo")
def grpo(table: RewardTable) -> GroupAdvantages:
    """``A_i = (r_i - mean) / (std + 1e-6)`` per group, std with ddof 1.

    References:
        DeepSeekMath, arXiv 2402.03300, section 4.1.

    >>> import numpy as np
    >>> rewards = np.array([[1.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, np.nan]])
    >>> out = grpo(RewardTable(rewards, tolerance=1e-6))
    >>> out.advantages.round(2).tolist()
    [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]]
    >>> out.dead.tolist(), out.weight[1].tolist()
    ([False, True], [True, True, True, False])
    """
    who = members(table)
    raw = normalised(table.rewards, who.usable, table.tolerance)
    return finish(raw, table.rewards, who, table.tolerance)
