"""A quantile of the reward std, from running statistics under a normal assumption."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from evojax.grpo.filters.base import (
    GROUP_FILTERS,
    Filtered,
    FilterRule,
    FilterState,
    at_least,
    strongest,
)


@GROUP_FILTERS.register("ema_quantile")
def ema_quantile(
    std: np.ndarray, live: np.ndarray, state: FilterState, rule: FilterRule
) -> Filtered:
    """Keep live groups with ``s_g >= m - z * sqrt(v)``, ``z = Phi^-1(keep)`` (1.28 at 0.9).

    m and v are the running mean and variance *before* this step: a group is not judged by
    statistics that it moved itself, and the threshold is the same for every refill of a step.
    The rule rests until ``max(ema_warmup, 1 / ema_decay)`` live groups were seen; until then, and
    whenever the threshold is not above 0 (wide spread: sqrt(v) >= m / z), only dead groups go.
    At least ``min_keep`` of the live groups stay, those with the largest std.

    Dead groups do not enter m and v. They are a point mass at 0 that inflates v and pulls the
    threshold below 0, so that with many of them the filter would switch itself off; and their
    number says how hard the items are, not how much spread a live group has.

    Args:
        std: reward std, float64 ``[G]``. live: bool ``[G]``. state: after the steps before.

    Returns:
        The kept groups, the state with this step's live groups in it, and the threshold (0 in
        the warm-up).

    References:
        EvoTrainer, arXiv 2606.03108 (StdGroupFilter).
    """
    threshold = 0.0
    if state.seen >= max(rule.ema_warmup, math.ceil(1 / rule.ema_decay)) and rule.keep < 1:
        threshold = state.mean - NormalDist().inv_cdf(rule.keep) * math.sqrt(state.variance)
    keep = live & (std >= threshold)
    floor = at_least(rule.min_keep, int(live.sum()))
    if keep.sum() < floor:
        keep = strongest(std, live, floor)
    return Filtered(keep, updated(state, std[live], rule.ema_decay), threshold)


def updated(state: FilterState, values: np.ndarray, decay: float) -> FilterState:
    """The state with n new values mixed in, whatever their order.

    ``w = max(1 - (1 - decay)^n, n / (seen + n))``
    ``m' = (1 - w) m + w mean``
    ``v' = (1 - w) v + w var + w (1 - w) (mean - m)^2``

    with mean and var (divisor n) of the new values: the moments of the mixture of old and new. For
    one value w is ``decay``, the usual exponential average; n values weigh as much as if they came
    one by one. The second term of w makes the first ``1 / decay`` values a plain average.

    >>> updated(FilterState(), np.array([0.25, 0.75]), 0.5)
    FilterState(mean=0.5, variance=0.0625, seen=2)
    >>> updated(FilterState(0.5, 0.0625, 2), np.array([1.0]), 0.5)
    FilterState(mean=0.75, variance=0.09375, seen=3)
    """
    n = len(values)
    if n == 0:
        return state
    weight = max(1 - (1 - decay) ** n, n / (state.seen + n))
    values = np.sort(values)  # so that rounding does not depend on the order either
    mean, variance = float(np.mean(values)), float(np.var(values))
    between = weight * (1 - weight) * (mean - state.mean) ** 2
    return FilterState(
        (1 - weight) * state.mean + weight * mean,
        (1 - weight) * state.variance + weight * variance + between,
        state.seen + n,
    )
