"""GSPO: the ratio, and with it the clip, belongs to the sequence and not to the token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from evojax.grpo.objectives.base import (
    OBJECTIVES,
    Bounds,
    TokenLoss,
    clipped,
    constant_advantages,
    line_sum,
    log_ratio,
    same_shape,
)


@OBJECTIVES.register("gspo")
def gspo(
    logp_cur: jax.Array,
    logp_old: jax.Array,
    advantages: jax.Array,
    response_mask: jax.Array,
    bounds: Bounds,
) -> TokenLoss:
    """Clipped objective of ``s = exp(mean over the sequence's tokens of logp_cur - logp_old)``.

    Token form: every token has the ratio ``sg(s) * exp(logp_cur - sg(logp_cur))``: its value is s,
    its gradient ``s * grad logp_cur``, so the tokens of a sequence together have L times the
    gradient of s (``seq_mean_token_mean`` divides the L out). Bounds are on s, which is far closer
    to 1 than a token's ratio: 3e-4 and 4e-4 in the paper; with 0.2 nothing ever clips. A sequence
    is cut or kept as a whole, and the clip masks say so on each of its tokens.

    Args: see ``Objective``; the bounds' dual clip works on s as well.

    Raises:
        ValueError: shapes that differ.

    References:
        GSPO, arXiv 2507.18071, sections 4.1 and 4.3.
    """
    same_shape(logp_cur, logp_old, advantages, response_mask)
    frozen = jax.lax.stop_gradient(logp_cur)
    logs = log_ratio(frozen, jax.lax.stop_gradient(logp_old), response_mask)
    total, count = line_sum(logs, response_mask)
    sequence = jnp.broadcast_to(jnp.exp(total / jnp.maximum(count, 1.0)), logs.shape)
    through = jnp.exp(jnp.where(response_mask, logp_cur - frozen, 0.0))
    ratio = jnp.where(response_mask, sequence, 1.0) * through
    return clipped(ratio, constant_advantages(advantages, response_mask), bounds)
