"""GDPO: every reward component normalised on its own before they are summed."""

from __future__ import annotations

import numpy as np

from evojax.grpo.advantages.base import (
    ADVANTAGES,
    STD_EPS,
    GroupAdvantages,
    RewardTable,
    finish,
    members,
    normalised,
)


@ADVANTAGES.register("gdpo")
def gdpo(table: RewardTable) -> GroupAdvantages:
    """``A_i = S_i / (batch std of S + 1e-6)``, ``S_i = sum_c w_c * (x_ci - mean) / (std + 1e-6)``.

    x_c is component c before its weight w_c; mean and std (ddof 1) are per group and component. A
    component that is degenerate in a group adds 0 there; a group is dead when S is, also because
    its components cancel. The batch std (ddof 1) is over every weighted member, so only the
    weights' ratios matter and the table must be the whole batch. The batch mean of S is 0 by
    construction and not subtracted: that would move dead groups off 0. Any reward clip is
    without effect here.

    Raises:
        ValueError: no components, one without a weight, or one not finite for a usable member.

    References:
        GDPO, arXiv 2601.05242, section 3.

    >>> right, short = np.array([[1.0, 0.0, 0.0, 1.0]]), np.array([[0.1, 0.1, 0.0, 0.0]])
    >>> parts = {"right": right, "short": short}
    >>> table = RewardTable(
    ...     right + short, 1e-6, components=parts, weights={"right": 1.0, "short": 0.1}
    ... )
    >>> [f"{value:.2f}" for value in gdpo(table).advantages[0]]
    ['0.95', '-0.78', '-0.95', '0.78']
    """
    missing = sorted(set(table.components) - set(table.weights))
    if not table.components or missing:
        raise ValueError(
            f"gdpo needs components, each with its weight; missing: {missing or 'all'}"
        )
    who = members(table)
    total = np.zeros(table.rewards.shape)
    for name, contribution in table.components.items():
        if not np.isfinite(contribution[who.usable]).all():
            raise ValueError(f"component {name!r} of a scorable member is not a finite number")
        part = normalised(contribution, who.usable, table.tolerance)
        total += abs(table.weights[name]) * part  # the contribution carries the weight's sign
    pool = total[who.weight]
    spread = float(np.std(pool, ddof=1)) if pool.size else 0.0
    return finish(total / (spread + STD_EPS), total, who, table.tolerance)
