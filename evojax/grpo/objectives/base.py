"""What every policy objective takes and returns: pure functions on ``[B, T]`` arrays and a mask.

One sequence per line. Everything that is averaged comes back as (sum, count), so that
micro-batches and devices add up before anyone divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from evojax.registry import Registry

LOG_RATIO_BOUND = 20.0
SumCount = tuple[jax.Array, jax.Array]
Scalar = float | jax.Array


class Bounds(NamedTuple):
    """Trust region of an objective.

    Args:
        eps_low, eps_high: widths below and above 1.
        dual_clip: c > 1, the largest ratio that a negative advantage is charged for; None = off.
    """

    eps_low: Scalar
    eps_high: Scalar
    dual_clip: Scalar | None = None


class TokenLoss(NamedTuple):
    """What an objective says of every token; all ``[B, T]`` and 0 / False off the mask.

    Args:
        loss: nats times advantage, to be minimised; not yet aggregated.
        ratio: probability ratio current / old that the bounds act on (``gspo``: of the sequence,
            the same for all its tokens), 1 off the mask.
        clip_high: the upper bound acts: advantage > 0 and ratio above 1 + eps_high (``cispo``:
            any advantage but 0).
        clip_low: the lower bound acts: advantage < 0 and ratio below 1 - eps_low.
        clip_dual: the dual clip acts: advantage < 0 and ratio above dual_clip.
    """

    loss: jax.Array
    ratio: jax.Array
    clip_high: jax.Array
    clip_low: jax.Array
    clip_dual: jax.Array


Objective = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Bounds], TokenLoss]
"""``(logp_cur, logp_old, advantages, response_mask, bounds) -> TokenLoss``, all ``[B, T]``.

Only ``logp_cur`` (nats) is differentiated; off the mask every value may be anything, also inf.
"""

OBJECTIVES: Registry[Objective] = Registry("objective")


def log_ratio(logp_cur: jax.Array, logp_old: jax.Array, response_mask: jax.Array) -> jax.Array:
    """``clip(logp_cur - logp_old, -20, 20)``, 0 off the mask.

    Masked *before* anyone takes ``exp``: a padded position far off would overflow there, and
    ``0 * inf`` in the backward pass is NaN however the forward value was masked afterwards.
    """
    difference = jnp.where(response_mask, logp_cur - logp_old, 0.0)
    return jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def constant_advantages(advantages: jax.Array, response_mask: jax.Array) -> jax.Array:
    """Advantages without a gradient, 0 off the mask."""
    return jax.lax.stop_gradient(jnp.where(response_mask, advantages, 0.0))


def same_shape(*arrays: jax.Array) -> None:
    """Refuse arrays that would only fit by broadcasting.

    Raises:
        ValueError: the arrays do not share one shape ``[B, T]``.
    """
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1 or len(arrays[0].shape) != 2:
        raise ValueError(f"logp, advantages and mask must share one shape [B, T], got {shapes}")


def clipped(ratio: jax.Array, advantages: jax.Array, bounds: Bounds) -> TokenLoss:
    """``-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)``, dual clip applied; see ``clip``.

    Written by cases, so that no tie of a minimum splits the gradient: a token is either cut
    (constant loss) or charged ``-r A``.
    """
    low, high = 1.0 - bounds.eps_low, 1.0 + bounds.eps_high
    clip_high = (advantages > 0) & (ratio > high)
    clip_low = (advantages < 0) & (ratio < low)
    loss = -ratio * advantages
    loss = jnp.where(clip_high, -high * advantages, loss)
    loss = jnp.where(clip_low, -low * advantages, loss)
    clip_dual = jnp.zeros_like(clip_low)
    if bounds.dual_clip is not None:
        clip_dual = (advantages < 0) & (ratio > bounds.dual_clip)
        loss = jnp.where(clip_dual, -bounds.dual_clip * advantages, loss)
    return TokenLoss(loss, ratio, clip_high, clip_low, clip_dual)


def masked_sum(values: jax.Array, mask: jax.Array) -> SumCount:
    """Sum of ``values`` where ``mask`` and how many those are: a mean yet to be divided.

    >>> total, count = masked_sum(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False]))
    >>> float(total), float(count)
    (3.0, 2.0)
    """
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask.astype(jnp.float32))


def line_sum(values: jax.Array, response_mask: jax.Array) -> SumCount:
    """Sum and count of every line, each ``[B, 1]``: statistics of a sequence."""
    total = jnp.sum(jnp.where(response_mask, values, 0.0), axis=1, keepdims=True)
    return total, jnp.sum(response_mask.astype(jnp.float32), axis=1, keepdims=True)
