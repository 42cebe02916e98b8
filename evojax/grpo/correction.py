"""Rollout correction: the sampler is not quite the policy that the trainer computes.

Three policies: the sampler mu (``logp_rollout``), the trainer at the rollout's weights
(``logp_old``) and the trainer now (``logp_cur``). An objective is built on cur / old; what the
tokens were drawn from is mu. A correction is a constant weight ``f(old / mu)`` on the token loss,
applied once and before aggregation. Masked tokens lose their loss, not their place in the
denominators: the share is reported, and a batch that loses tokens takes a smaller step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from evojax.grpo.kl import k1, k3
from evojax.grpo.objectives.base import (
    LOG_RATIO_BOUND,
    Scalar,
    SumCount,
    line_sum,
    log_ratio,
    masked_sum,
)
from evojax.registry import Registry


class Corrected(NamedTuple):
    """Weights of a correction; all ``[B, T]``, constants, and 0 / False off the mask.

    Args:
        weight: factor of the token loss.
        kept: tokens whose loss counts.
        truncated: tokens whose weight a bound changed: capped (``tis``) or masked.
    """

    weight: jax.Array
    kept: jax.Array
    truncated: jax.Array


CorrectionFn = Callable[[jax.Array, jax.Array, jax.Array, Scalar, Scalar], Corrected]
"""``(logp_old, logp_rollout, response_mask, low, high) -> Corrected``, arrays ``[B, T]``."""

CORRECTIONS: Registry[CorrectionFn] = Registry("rollout correction")


def _logs(logp_old: jax.Array, logp_rollout: jax.Array, response_mask: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(log_ratio(logp_old, logp_rollout, response_mask))


def _corrected(
    weight: jax.Array, outside: jax.Array, kept: jax.Array, mask: jax.Array
) -> Corrected:
    spread = jnp.broadcast_to(weight, mask.shape)
    return Corrected(
        weight=jnp.where(mask & kept, spread, 0.0),
        kept=mask & kept,
        truncated=mask & outside,
    )


@CORRECTIONS.register("none")
def none(
    logp_old: jax.Array,
    logp_rollout: jax.Array,
    response_mask: jax.Array,
    low: Scalar,
    high: Scalar,
) -> Corrected:
    """Weight 1: the sampler is taken for the policy. Bounds are not read."""
    return Corrected(
        response_mask.astype(jnp.float32), response_mask, jnp.zeros_like(response_mask)
    )


@CORRECTIONS.register("token_tis")
def token_tis(
    logp_old: jax.Array,
    logp_rollout: jax.Array,
    response_mask: jax.Array,
    low: Scalar,
    high: Scalar,
) -> Corrected:
    """Truncated importance sampling per token: ``min(rho, high)``, ``rho = old / mu``.

    References:
        Flash-RL (TIS): fengyao.notion.site/off-policy-rl; IMPALA, arXiv 1802.01561.
    """
    ratio = jnp.exp(_logs(logp_old, logp_rollout, response_mask))
    everyone = jnp.ones_like(response_mask)
    return _corrected(jnp.minimum(ratio, high), ratio > high, everyone, response_mask)


@CORRECTIONS.register("sequence_tis")
def sequence_tis(
    logp_old: jax.Array,
    logp_rollout: jax.Array,
    response_mask: jax.Array,
    low: Scalar,
    high: Scalar,
) -> Corrected:
    """Truncated importance sampling per sequence: ``min(prod_t rho_t, high)`` on all its tokens.

    The product of a whole sequence is the unbiased weight; its log is kept within +-20.
    """
    total, _ = line_sum(_logs(logp_old, logp_rollout, response_mask), response_mask)
    ratio = jnp.exp(jnp.clip(total, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    outside = jnp.broadcast_to(ratio > high, response_mask.shape)
    everyone = jnp.ones_like(response_mask)
    return _corrected(jnp.minimum(ratio, high), outside, everyone, response_mask)


@CORRECTIONS.register("token_mask")
def token_mask(
    logp_old: jax.Array,
    logp_rollout: jax.Array,
    response_mask: jax.Array,
    low: Scalar,
    high: Scalar,
) -> Corrected:
    """IcePop: ``rho`` where ``low <= rho <= high``, else the token is masked.

    References:
        Ring-1T (IcePop), arXiv 2510.18855.
    """
    ratio = jnp.exp(_logs(logp_old, logp_rollout, response_mask))
    inside = (ratio >= low) & (ratio <= high)
    return _corrected(ratio, ~inside, inside, response_mask)


@CORRECTIONS.register("geometric_mask")
def geometric_mask(
    logp_old: jax.Array,
    logp_rollout: jax.Array,
    response_mask: jax.Array,
    low: Scalar,
    high: Scalar,
) -> Corrected:
    """Weight 1 for sequences whose geometric mean of rho lies within ``low .. high``, else masked.

    The geometric mean does not shrink or grow with the length, so its bounds are narrow: 0.99 and
    1.01 where it is used.
    """
    total, count = line_sum(_logs(logp_old, logp_rollout, response_mask), response_mask)
    ratio = jnp.broadcast_to(jnp.exp(total / jnp.maximum(count, 1.0)), response_mask.shape)
    inside = (ratio >= low) & (ratio <= high)
    return _corrected(jnp.ones_like(ratio), ~inside, inside, response_mask)


class Mismatch(NamedTuple):
    """Distance of the trainer's log-probabilities from the sampler's, on the sampler's tokens.

    Args:
        k1, k3: estimates of KL(sampler || trainer) in nats as (sum, count).
        max_abs: largest ``|logp_old - logp_rollout|`` of any token, nats, at most 20.
        ess: (sum of rho, sum of rho^2, count) over tokens, ``rho = old / mu`` uncapped; see
            ``effective_share``.
    """

    k1: SumCount
    k3: SumCount
    max_abs: jax.Array
    ess: tuple[jax.Array, jax.Array, jax.Array]


def mismatch(logp_rollout: jax.Array, logp_old: jax.Array, response_mask: jax.Array) -> Mismatch:
    """``k1 = -d`` and ``k3 = exp(d) - d - 1`` with ``d = logp_old - logp_rollout``, and the ESS.

    Both estimate KL(sampler || trainer), for the tokens were drawn from the sampler; k3 is never
    negative and varies less.
    """
    logs = _logs(logp_old, logp_rollout, response_mask)
    ratio = jnp.exp(logs)
    total, count = masked_sum(ratio, response_mask)
    return Mismatch(
        k1=masked_sum(k1(logp_rollout, logp_old, response_mask), response_mask),
        k3=masked_sum(k3(logp_rollout, logp_old, response_mask), response_mask),
        max_abs=jnp.max(jnp.abs(logs), initial=0.0),
        ess=(total, masked_sum(ratio**2, response_mask)[0], count),
    )


def effective_share(weight_sum: float, square_sum: float, count: float) -> float:
    """``ESS / N = (sum rho)^2 / (N * sum rho^2)``: 1 when all weights are equal; NaN without any.

    >>> effective_share(4.0, 4.0, 4.0), effective_share(2.0, 4.0, 4.0)
    (1.0, 0.25)
    """
    if count == 0.0 or square_sum == 0.0:
        return float("nan")
    return weight_sum**2 / (count * square_sum)
