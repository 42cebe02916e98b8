"""The share of groups about which the policy is least certain."""

from __future__ import annotations

import numpy as np

from evojax.grpo.filters.base import (
    GROUP_FILTERS,
    Filtered,
    FilterRule,
    FilterState,
    at_most,
    strongest,
    weakest_kept,
)


@GROUP_FILTERS.register("uncertainty")
def uncertainty(
    std: np.ndarray, live: np.ndarray, state: FilterState, rule: FilterRule
) -> Filtered:
    """Keep the ``max(1, floor(keep * G))`` groups with the largest std, live ones only.

    The share is of all G groups drawn, as in the source, which keeps a quarter to a half of them.

    Args:
        std: reward std, float64 ``[G]``. live: bool ``[G]``. state: not used.

    References:
        RAGEN (StarPO-S), arXiv 2504.20073, uncertainty-based filtering.
    """
    keep = strongest(std, live, max(1, at_most(rule.keep, len(std))))
    return Filtered(keep, state, weakest_kept(std, keep))
