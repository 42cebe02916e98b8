from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.grpo.objective import clipped_token_loss, log_ratio, masked_sum, mismatch


def row(*values):
    return jnp.array([values], jnp.float32)


def mask(*values):
    return jnp.array([values], bool)


def mean_loss(logp_cur, logp_old, advantages, response_mask):
    out = clipped_token_loss(logp_cur, logp_old, advantages, response_mask, 0.2, 0.28)
    total, count = masked_sum(out.loss, response_mask)
    return total / count


def test_case_G05_far_off_padded_token_leaves_an_exact_finite_gradient():
    args = row(-1, -1, -200), row(-1, -1, -1), mask(1, 1, 0)
    gradient = jax.jit(jax.grad(mean_loss))(row(-1, -1, 0), *args)
    np.testing.assert_array_equal(gradient, [[0.5, 0.5, 0.0]])


def test_case_G05_infinite_padding_leaves_no_nan():
    bad = row(-1, -jnp.inf)
    gradient = jax.grad(mean_loss)(bad, row(-1, jnp.inf), row(2, 2), mask(1, 0))
    np.testing.assert_array_equal(gradient, [[-2.0, 0.0]])


def test_case_G05_a_huge_ratio_inside_the_mask_is_clamped_before_exp():
    loss, gradient = jax.value_and_grad(mean_loss)(row(0.0), row(-200.0), row(-1.0), mask(1))
    np.testing.assert_allclose(loss, np.exp(20.0), rtol=1e-6)
    assert np.isfinite(gradient).all()


def test_loss_and_clip_masks_by_hand():
    ratios = np.array([1.5, 1.5, 0.5, 0.5, 1.0, 9.0])
    advantages = row(1, -1, 1, -1, 2, 1)
    valid = mask(1, 1, 1, 1, 1, 0)
    out = clipped_token_loss(jnp.log(row(*ratios)), jnp.zeros((1, 6)), advantages, valid, 0.2, 0.28)
    # r A against clip(r, .8, 1.28) A: 1.28, -1.5, .5, -.8, 2 and the masked 0
    np.testing.assert_allclose(out.loss, [[-1.28, 1.5, -0.5, 0.8, -2.0, 0.0]], rtol=1e-6)
    assert out.clip_high.tolist() == [[True, False, False, False, False, False]]
    assert out.clip_low.tolist() == [[False, False, False, True, False, False]]
    np.testing.assert_allclose(out.ratio[0, -1], 1.0)


def test_clipped_tokens_have_no_gradient_and_others_have_minus_r_times_a():
    logp = jnp.log(row(1.5, 0.5, 1.1))
    gradient = jax.grad(
        lambda x: clipped_token_loss(
            x, jnp.zeros_like(x), row(1, -1, 3), mask(1, 1, 1), 0.2, 0.28
        ).loss.sum()
    )(logp)
    np.testing.assert_allclose(gradient, [[0.0, 0.0, -3.3]], rtol=1e-5, atol=1e-7)


def test_old_policy_and_advantages_take_no_gradient():
    def loss(old, advantages):
        return mean_loss(row(-1, -2), old, advantages, mask(1, 1))

    by_old, by_advantage = jax.grad(loss, argnums=(0, 1))(row(-1.1, -2.0), row(1, -1))
    assert not by_old.any() and not by_advantage.any()


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        clipped_token_loss(row(1, 2), row(1, 2), jnp.ones((1, 1)), mask(1, 1), 0.2, 0.28)


def test_gradient_equals_finite_differences_of_a_softmax():
    logits = jnp.array([[[0.3, -1.0, 0.5, 0.1, 0.0], [1.0, 0.2, -0.4, 0.0, 0.7]]])
    chosen = jnp.array([[2, 0]])
    old = row(-1.2, -1.0)

    def loss(x):
        logp = jnp.take_along_axis(jax.nn.log_softmax(x), chosen[..., None], -1)[..., 0]
        return mean_loss(logp, old, row(1.3, -0.6), mask(1, 1))

    gradient = jax.grad(loss)(logits)
    step = 1e-2
    for index in np.ndindex(*logits.shape):
        up, down = logits.at[index].add(step), logits.at[index].add(-step)
        slope = float(loss(up) - loss(down)) / (2 * step)
        assert slope == pytest.approx(float(gradient[index]), abs=2e-4)


def test_mismatch_by_hand_and_masked():
    out = mismatch(row(-1, -2, -50), row(-1.5, -1.9, 0), mask(1, 1, 0))
    np.testing.assert_allclose(out.k1[0], 0.4, rtol=1e-5)
    np.testing.assert_allclose(out.k3[0], np.exp(-0.5) - 0.5 + np.exp(0.1) - 1.1, rtol=1e-5)
    assert out.k1[1] == 2.0 and out.k3[1] == 2.0
    np.testing.assert_allclose(out.max_abs, 0.5, rtol=1e-6)


def test_equal_policies_have_no_mismatch():
    out = mismatch(row(-1, -2), row(-1, -2), mask(1, 1))
    assert out.k1[0] == 0.0 and out.k3[0] == 0.0 and out.max_abs == 0.0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-15, 0, width=32), min_size=1, max_size=6))
def test_k3_is_never_negative_and_log_ratio_is_bounded(values):
    cur = row(*values)
    valid = jnp.ones_like(cur, bool)
    assert mismatch(jnp.flip(cur), cur, valid).k3[0] >= 0.0
    assert jnp.abs(log_ratio(cur * 100, jnp.flip(cur), valid)).max() <= 20.0
