"""KL divergence to a reference policy: estimates of its value, and losses with its gradient.

On tokens drawn from the policy, with ``d = logp_ref - logp_cur``:

    k1 = -d          k2 = d^2 / 2          k3 = exp(d) - d - 1

All three estimate KL(cur || ref) (k2 to second order). That says nothing about their gradients
through ``logp_cur`` alone, with the samples held fixed: k1's is 0 in expectation, k3's is that of
the *other* direction, KL(ref || cur). So neither is a loss here; k2 and the weighted k3 are.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from evojax.grpo.objectives.base import log_ratio
from evojax.registry import Registry

K3_BOUND = 10.0

KlLoss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""``(logp_cur, logp_ref, logp_old, response_mask) -> [B, T]`` in nats, 0 off the mask.

Only ``logp_cur`` is differentiated; ``logp_old`` is of the policy that the ratio is against.
"""

KL_LOSSES: Registry[KlLoss] = Registry("KL loss")


def k1(logp_cur: jax.Array, logp_ref: jax.Array, response_mask: jax.Array) -> jax.Array:
    """``logp_cur - logp_ref`` in nats ``[B, T]``, within +-20, 0 off the mask: unbiased value."""
    return log_ratio(logp_cur, logp_ref, response_mask)


def k2(logp_cur: jax.Array, logp_ref: jax.Array, response_mask: jax.Array) -> jax.Array:
    """``d^2 / 2`` in nats ``[B, T]``, 0 off the mask: never negative, biased where d is large."""
    return 0.5 * log_ratio(logp_ref, logp_cur, response_mask) ** 2


def k3(logp_cur: jax.Array, logp_ref: jax.Array, response_mask: jax.Array) -> jax.Array:
    """``exp(d) - d - 1`` in nats ``[B, T]``, 0 off the mask: unbiased, never negative.

    Cut at 10: d above 2.6 (a token that the reference likes 13 times better) or below -11.

    References:
        J. Schulman, Approximating KL divergence, 2020 (joschu.net/blog/kl-approx.html).
    """
    d = log_ratio(logp_ref, logp_cur, response_mask)
    return jnp.minimum(jnp.expm1(d) - d, K3_BOUND)


def _pulled(
    value: jax.Array, pull: jax.Array, logp_cur: jax.Array, response_mask: jax.Array
) -> jax.Array:
    """``value`` with the gradient ``pull * grad logp_cur``; 0 off the mask.

    Written out because bounds inside the differentiated expression do harm: beyond the bound on d
    k2 would not pull at all, and k3_is, whose pull is the small difference of two large terms,
    would keep only one of them and push the policy away from the reference.
    """
    moving = jnp.where(response_mask, logp_cur - jax.lax.stop_gradient(logp_cur), 0.0)
    return jax.lax.stop_gradient(value) + jax.lax.stop_gradient(pull) * moving


@KL_LOSSES.register("k2")
def k2_loss(
    logp_cur: jax.Array, logp_ref: jax.Array, logp_old: jax.Array, response_mask: jax.Array
) -> jax.Array:
    """k2, whose expected gradient is that of KL(cur || ref) on tokens drawn from cur.

    ``E[d * grad d] = E[-d * grad logp_cur] = grad KL(cur || ref)``. It does not look at
    ``logp_old``: on tokens of an older policy its pull is that policy's weighting of the same d.
    """
    d = log_ratio(logp_ref, logp_cur, response_mask)
    return _pulled(k2(logp_cur, logp_ref, response_mask), -d, logp_cur, response_mask)


@KL_LOSSES.register("k3_is")
def k3_is_loss(
    logp_cur: jax.Array, logp_ref: jax.Array, logp_old: jax.Array, response_mask: jax.Array
) -> jax.Array:
    """``w * k3`` with ``w = exp(logp_cur - logp_old)``, gradient through w too.

    ``grad (w k3) = w (k3 - (exp(d) - 1)) grad logp_cur = -w d grad logp_cur``, whose expected value
    is the gradient of KL(cur || ref) on tokens drawn from ``old``, however far cur has moved from
    it. On the first update w is 1, and the pull is that of k2.

    References:
        DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    d = log_ratio(logp_ref, logp_cur, response_mask)
    weight = jnp.exp(log_ratio(logp_cur, logp_old, response_mask))
    value = weight * k3(logp_cur, logp_ref, response_mask)
    return _pulled(value, -weight * d, logp_cur, response_mask)
