"""The policy objective and its diagnostics as pure functions on ``[B, T]`` arrays and a mask.

Everything that is averaged comes back as (sum, count), so that micro-batches and devices add up
before anyone divides.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG_RATIO_BOUND = 20.0
SumCount = tuple[jax.Array, jax.Array]


class TokenLoss(NamedTuple):
    """What the clipped objective says of every token; all ``[B, T]`` and 0 / False off the mask.

    Args:
        loss: nats times advantage, to be minimised.
        ratio: probability ratio current / old, 1 off the mask.
        clip_high: advantage > 0 and ratio above 1 + eps_high (the token's gradient is cut).
        clip_low: advantage < 0 and ratio below 1 - eps_low.
    """

    loss: jax.Array
    ratio: jax.Array
    clip_high: jax.Array
    clip_low: jax.Array


def log_ratio(logp_cur: jax.Array, logp_old: jax.Array, response_mask: jax.Array) -> jax.Array:
    """``clip(logp_cur - logp_old, -20, 20)``, 0 off the mask.

    Masked *before* anyone takes ``exp``: a padded position far off would overflow there, and
    ``0 * inf`` in the backward pass is NaN however the forward value was masked afterwards.
    """
    difference = jnp.where(response_mask, logp_cur - logp_old, 0.0)
    return jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clipped_token_loss(
    logp_cur: jax.Array,
    logp_old: jax.Array,
    advantages: jax.Array,
    response_mask: jax.Array,
    eps_low: float | jax.Array,
    eps_high: float | jax.Array,
) -> TokenLoss:
    """``-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)`` with ``r = exp(logp_cur - logp_old)``.

    Args:
        logp_cur: nats, of the policy that is trained, ``[B, T]``; the only one differentiated.
        logp_old: nats, of the policy the ratio is against, ``[B, T]``.
        advantages: ``[B, T]``.
        response_mask: bool ``[B, T]``, True where the policy wrote the token.
        eps_low, eps_high: widths of the trust region below and above 1.

    References:
        DAPO (asymmetric clip), arXiv 2503.14476, section 3.1.
    """
    shapes = {x.shape for x in (logp_cur, logp_old, advantages, response_mask)}
    if len(shapes) != 1:
        raise ValueError(f"logp, advantages and mask must share one shape, got {shapes}")
    logp_old = jax.lax.stop_gradient(logp_old)
    advantages = jax.lax.stop_gradient(jnp.where(response_mask, advantages, 0.0))
    ratio = jnp.exp(log_ratio(logp_cur, logp_old, response_mask))
    bounded = jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high)
    loss = -jnp.minimum(ratio * advantages, bounded * advantages)
    return TokenLoss(
        loss=jnp.where(response_mask, loss, 0.0),
        ratio=ratio,
        clip_high=(advantages > 0) & (ratio > 1.0 + eps_high),
        clip_low=(advantages < 0) & (ratio < 1.0 - eps_low),
    )


def masked_sum(values: jax.Array, mask: jax.Array) -> SumCount:
    """Sum of ``values`` where ``mask`` and how many those are: a mean yet to be divided.

    >>> total, count = masked_sum(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False]))
    >>> float(total), float(count)
    (3.0, 2.0)
    """
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask.astype(jnp.float32))


class Mismatch(NamedTuple):
    """Distance of the trainer's log-probabilities from the sampler's, on the sampler's tokens.

    Args:
        k1, k3: estimates of KL(sampler || trainer) in nats as (sum, count).
        max_abs: largest ``|logp_rollout - logp_cur|`` of any token, nats.
    """

    k1: SumCount
    k3: SumCount
    max_abs: jax.Array


def mismatch(logp_rollout: jax.Array, logp_cur: jax.Array, response_mask: jax.Array) -> Mismatch:
    """``k1 = -d`` and ``k3 = exp(d) - d - 1`` with ``d = logp_cur - logp_rollout``.

    Both estimate KL(sampler || trainer), for the tokens were drawn from the sampler; k3 is never
    negative and varies less.
    """
    d = log_ratio(logp_cur, logp_rollout, response_mask)
    return Mismatch(
        k1=masked_sum(-d, response_mask),
        k3=masked_sum(jnp.expm1(d) - d, response_mask),
        max_abs=jnp.max(jnp.abs(d), initial=0.0),
    )
