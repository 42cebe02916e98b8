"""Every objective under every aggregation: gradient against finite differences of a softmax.

The oracle is written in NumPy float64 from the formulas: GSPO as an objective of sequences, CISPO
with its weight held at the point of expansion.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evojax.grpo.aggregation import AGGREGATIONS, token_weights
from evojax.grpo.objectives import OBJECTIVES, Bounds

VOCAB, HORIZON = 5, 6
LOW, HIGH, DUAL = 0.2, 0.28, 1.6
LENGTHS = [4, 1, 3]


def problem():
    """Logits [B, T, V], chosen tokens and old log-probs, with ratios on both sides of the clip."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(3, 4, VOCAB))
    chosen = rng.integers(0, VOCAB, (3, 4))
    valid = np.arange(4) < np.array(LENGTHS)[:, None]
    old = chosen_logp(logits, chosen) - rng.normal(0.0, 0.5, (3, 4))
    old = np.where(valid, old, -1e9)
    advantages = np.repeat([[1.3], [-0.6], [-1.1]], 4, axis=1)
    return logits, chosen, valid, old, advantages


def chosen_logp(logits, chosen):
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logp, chosen[..., None], -1)[..., 0]


def clipped(ratio, a):
    value = np.minimum(ratio * a, np.clip(ratio, 1 - LOW, 1 + HIGH) * a)
    return -np.where(a < 0, np.maximum(value, DUAL * a), value)


def token_losses(name, logp, start, old, valid, a):
    """Float64 ``[B, T]``; ``start`` is logp where constants are frozen."""
    logs = np.where(valid, logp - old, 0.0)
    if name == "clip":
        return clipped(np.exp(logs), a)
    if name == "gspo":
        s = np.exp(logs.sum(1) / valid.sum(1))
        return np.repeat(clipped(s, a[:, 0])[:, None], valid.shape[1], axis=1)
    frozen = np.exp(np.where(valid, start - old, 0.0))
    return -np.minimum(frozen, 1 + HIGH) * a * logp


def mean_formula(aggregation, losses, valid):
    """The aggregations as their papers state them."""
    losses = np.where(valid, losses, 0.0)
    per_sequence = losses.sum(1)
    return {
        "token_mean": losses.sum() / valid.sum(),
        "seq_mean_token_mean": (per_sequence / valid.sum(1)).mean(),
        "seq_mean_token_sum": per_sequence.mean(),
        "seq_mean_token_sum_norm": per_sequence.mean() / HORIZON,
    }[aggregation]


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_gradient_equals_finite_differences_of_a_softmax(name, aggregation):
    logits, chosen, valid, old, a = problem()
    start = chosen_logp(logits, chosen)

    def value(x):
        losses = token_losses(name, chosen_logp(x, chosen), start, old, valid, a)
        return mean_formula(aggregation, losses, valid)

    weights = token_weights(aggregation, LENGTHS, HORIZON)[:, None] * valid

    def loss(x):
        logp = jnp.take_along_axis(jax.nn.log_softmax(x), jnp.array(chosen)[..., None], -1)[..., 0]
        out = OBJECTIVES.get(name, "algorithm.objective")(
            logp,
            jnp.array(old, jnp.float32),
            jnp.array(a, jnp.float32),
            jnp.array(valid),
            Bounds(LOW, HIGH, DUAL),
        )
        return jnp.sum(jnp.array(weights, jnp.float32) * out.loss)

    total, gradient = jax.value_and_grad(loss)(jnp.array(logits, jnp.float32))
    np.testing.assert_allclose(total, value(logits), rtol=1e-5)
    slopes = np.zeros_like(logits)
    step = 1e-6
    for index in np.ndindex(*logits.shape):
        up, down = logits.copy(), logits.copy()
        up[index] += step
        down[index] -= step
        slopes[index] = (value(up) - value(down)) / (2 * step)
    np.testing.assert_allclose(gradient, slopes, rtol=2e-4, atol=2e-6)
    assert np.abs(slopes).max() > 1e-3


def test_the_problem_reaches_every_side_of_the_clip():
    logits, chosen, valid, old, a = problem()
    cur, before, adv = (jnp.array(x, jnp.float32) for x in (chosen_logp(logits, chosen), old, a))
    out = OBJECTIVES.get("clip", "algorithm.objective")(
        cur, before, adv, jnp.array(valid), Bounds(LOW, HIGH, DUAL)
    )
    for side in (out.clip_high, out.clip_low, out.clip_dual):
        assert np.asarray(side).any()
    assert not np.asarray(out.clip_high | out.clip_low | out.clip_dual)[valid].all()


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_micro_batches_padding_and_order_leave_loss_and_gradient_alone(name, aggregation):
    logits, chosen, valid, old, a = problem()
    weights = token_weights(aggregation, LENGTHS, HORIZON)[:, None] * valid
    arrays = (chosen_logp(logits, chosen), old, a, valid, weights)
    objective = OBJECTIVES.get(name, "algorithm.objective")

    def run(micro_batches, padding):
        total, gradient = 0.0, np.zeros((3, 4))
        for lines in micro_batches:
            cur, before, adv, mask, weight = (
                jnp.array(np.pad(x[lines], ((0, 0), (0, padding)))) for x in arrays
            )

            def loss(x, b=before, a=adv, m=mask, w=weight):
                return jnp.sum(w * objective(x, b, a, m, Bounds(LOW, HIGH)).loss)

            value, slope = jax.value_and_grad(loss)(cur)
            total += float(value)
            gradient[lines] += np.asarray(slope)[:, :4]
        return total, gradient

    whole, whole_gradient = run([[0, 1, 2]], 0)
    for micro_batches, padding in (([[2, 0], [1]], 3), ([[1], [2], [0]], 0)):
        total, gradient = run(micro_batches, padding)
        assert total == pytest.approx(whole, rel=1e-5)
        np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-5, atol=1e-7)
