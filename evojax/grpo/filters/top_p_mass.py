"""The groups that together hold most of the batch's reward spread."""

from __future__ import annotations

import numpy as np

from evojax.grpo.filters.base import (
    GROUP_FILTERS,
    Filtered,
    FilterRule,
    FilterState,
    strongest,
    weakest_kept,
)

MASS_EPS = 0.01  # reward units, as in the source


@GROUP_FILTERS.register("top_p_mass")
def top_p_mass(std: np.ndarray, live: np.ndarray, state: FilterState, rule: FilterRule) -> Filtered:
    """Keep the smallest prefix of the groups sorted by falling std that holds the mass.

    ``sum of the kept s_g >= keep * (sum of all s_g) - 0.01``

    The score is the std, although the source calls it reward variance; ports that take the
    variance keep fewer groups. Dead groups are never kept. A batch whose whole spread is below
    ``0.01 / keep`` keeps nothing; ``keep = 1`` keeps every live group.

    Args:
        std: reward std, float64 ``[G]``. live: bool ``[G]``. state: not used.

    References:
        RAGEN-2, arXiv 2604.06268, top-p filtering by signal.
    """
    if rule.keep >= 1:
        return Filtered(live.copy(), state, weakest_kept(std, live))
    falling = np.sort(std[live])[::-1]
    mass = np.concatenate([[0.0], np.cumsum(falling)])
    count = int(np.argmax(mass >= rule.keep * mass[-1] - MASS_EPS))
    keep = strongest(std, live, count)
    return Filtered(keep, state, weakest_kept(std, keep))
