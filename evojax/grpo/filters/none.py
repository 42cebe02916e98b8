"""No filter: dead groups stay in the batch and in the loss's divisor."""

from __future__ import annotations

import math

import numpy as np

from evojax.grpo.filters.base import GROUP_FILTERS, Filtered, FilterRule, FilterState


@GROUP_FILTERS.register("none")
def none(std: np.ndarray, live: np.ndarray, state: FilterState, rule: FilterRule) -> Filtered:
    """Keep every group, dead ones included.

    Args:
        std: float64 ``[G]``. live: bool ``[G]``. state, rule: not used.
    """
    return Filtered(np.ones(len(std), dtype=bool), state, math.nan)
