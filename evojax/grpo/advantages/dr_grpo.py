"""Dr.GRPO: rewards centred within their group, not scaled."""

from __future__ import annotations

from evojax.grpo.advantages.base import (
    ADVANTAGES,
    GroupAdvantages,
    RewardTable,
    centred,
    finish,
    members,
)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(table: RewardTable) -> GroupAdvantages:
    """``A_i = r_i - mean`` per group.

    Without the division a nearly solved or nearly hopeless prompt weighs no more than its rewards
    say. The other half of the method is the constant divisor of the aggregation
    ``seq_mean_token_sum_norm``.

    References:
        Dr.GRPO, arXiv 2503.20783, section 3.

    >>> import numpy as np
    >>> dr_grpo(RewardTable(np.eye(1, 4), tolerance=1e-6)).advantages.tolist()
    [[0.75, -0.25, -0.25, -0.25]]
    """
    who = members(table)
    return finish(centred(table.rewards, who.usable), table.rewards, who, table.tolerance)
