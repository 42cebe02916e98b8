"""Batch std: rewards centred within their group and scaled by the spread of the whole batch."""

from __future__ import annotations

import numpy as np

from evojax.grpo.advantages.base import (
    ADVANTAGES,
    STD_EPS,
    GroupAdvantages,
    RewardTable,
    centred,
    finish,
    members,
)


@ADVANTAGES.register("batch_std")
def batch_std(table: RewardTable) -> GroupAdvantages:
    """``A_i = (r_i - group mean) / (std of all rewards of the batch + 1e-6)``.

    The std is that of the *raw* rewards, ddof 1, over every weighted member of the table, dead
    groups included: it holds the spread between prompts too. So the table must be the whole batch.

    References:
        LitePPO, arXiv 2508.08221, section 4.1.

    >>> table = RewardTable(np.array([[1.0, 0.0], [1.0, 1.0]]), tolerance=1e-6)
    >>> batch_std(table).advantages.round(3).tolist()  # std of 1, 0, 1, 1 is 0.5
    [[1.0, -1.0], [0.0, 0.0]]
    """
    who = members(table)
    pool = table.rewards[who.weight]
    spread = float(np.std(pool, ddof=1)) if pool.size else 0.0
    raw = centred(table.rewards, who.usable) / (spread + STD_EPS)
    return finish(raw, table.rewards, who, table.tolerance)
