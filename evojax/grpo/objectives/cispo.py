"""CISPO: the importance weight is capped and constant, so every token keeps its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from evojax.grpo.objectives.base import (
    OBJECTIVES,
    Bounds,
    TokenLoss,
    constant_advantages,
    log_ratio,
    same_shape,
)


@OBJECTIVES.register("cispo")
def cispo(
    logp_cur: jax.Array,
    logp_old: jax.Array,
    advantages: jax.Array,
    response_mask: jax.Array,
    bounds: Bounds,
) -> TokenLoss:
    """``-sg(min(r, 1 + eps_high)) A logp_cur``: no lower bound, no token loses its gradient.

    The cap acts whatever the sign of A, so ``clip_high`` counts every capped token with A != 0;
    ``clip_low`` and ``clip_dual`` are never set. ScaleRL caps near 5 (eps_high 4).

    Args: see ``Objective``; of the bounds only eps_high is read.

    Raises:
        ValueError: shapes that differ.

    References:
        MiniMax-M1 (CISPO), arXiv 2506.13585, section 3.1; ScaleRL, arXiv 2510.13786.
    """
    same_shape(logp_cur, logp_old, advantages, response_mask)
    advantages = constant_advantages(advantages, response_mask)
    logs = jax.lax.stop_gradient(log_ratio(logp_cur, logp_old, response_mask))
    ratio = jnp.exp(logs)
    high = 1.0 + bounds.eps_high
    weight = jnp.minimum(ratio, high)
    loss = -weight * advantages * jnp.where(response_mask, logp_cur, 0.0)
    never = jnp.zeros_like(response_mask)
    return TokenLoss(loss, ratio, (ratio > high) & (advantages != 0), never, never)
