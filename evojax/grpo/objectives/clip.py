"""The clipped objective of PPO with separate bounds below and above."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from evojax.grpo.objectives.base import (
    OBJECTIVES,
    Bounds,
    TokenLoss,
    clipped,
    constant_advantages,
    log_ratio,
    same_shape,
)


@OBJECTIVES.register("clip")
def clip(
    logp_cur: jax.Array,
    logp_old: jax.Array,
    advantages: jax.Array,
    response_mask: jax.Array,
    bounds: Bounds,
) -> TokenLoss:
    """``-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)`` with ``r = exp(logp_cur - logp_old)``.

    With a dual clip c the objective of tokens with A < 0 is ``max(that, c A)``: a token the policy
    has come to like far too much is charged for a ratio of c at most. c must be above
    1 + eps_high.

    Args: see ``Objective``.

    Raises:
        ValueError: shapes that differ.

    References:
        PPO, arXiv 1707.06347; asymmetric clip: DAPO, arXiv 2503.14476, section 3.1; dual clip:
        arXiv 1912.09729, section 4.
    """
    same_shape(logp_cur, logp_old, advantages, response_mask)
    logp_old = jax.lax.stop_gradient(logp_old)
    ratio = jnp.exp(log_ratio(logp_cur, logp_old, response_mask))
    return clipped(ratio, constant_advantages(advantages, response_mask), bounds)
