"""A fixed limit on the reward std."""

from __future__ import annotations

import numpy as np

from evojax.grpo.filters.base import GROUP_FILTERS, Filtered, FilterRule, FilterState


@GROUP_FILTERS.register("absolute")
def absolute(std: np.ndarray, live: np.ndarray, state: FilterState, rule: FilterRule) -> Filtered:
    """Keep live groups with ``s_g >= min_std``. May keep nothing.

    With rewards of 0 and 1 every live group is far above the usual 0.01; the limit acts on graded
    rewards, whose groups can differ by next to nothing.

    Args:
        std: reward std, float64 ``[G]``. live: bool ``[G]``. state: not used.

    References:
        EvoTrainer, arXiv 2606.03108 (mode ``absolute`` of its group filter, 0.01).
    """
    return Filtered(live & (std >= rule.min_std), state, rule.min_std)
