"""KL estimates and losses. Expectations over a 5-token vocabulary are exact enumerations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.errors import InputError
from evojax.grpo.kl import KL_LOSSES, k1, k2, k3

LOGITS = jnp.array([0.3, -1.0, 0.5, 0.1, 0.0])
REFERENCE = jax.nn.log_softmax(jnp.array([-0.4, 0.2, 0.9, -0.7, 0.3]))
OLDER = jax.nn.log_softmax(jnp.array([0.8, -0.6, -0.1, 0.4, 0.2]))


def row(*values):
    return jnp.array([values], jnp.float32)


def mask(*values):
    return jnp.array([values], bool)


def expected_gradient(estimate, drawn_from=None):
    """``E over tokens of grad estimate``: the samples are fixed, the estimate is differentiated."""
    probability = jnp.exp(jax.nn.log_softmax(LOGITS) if drawn_from is None else drawn_from)

    def mean(logits):
        logp = jax.nn.log_softmax(logits)[None]
        return jnp.sum(probability[None] * estimate(logp, REFERENCE[None], jnp.ones((1, 5), bool)))

    return jax.grad(mean)(LOGITS)


def kl_gradient(reverse):
    """Gradient of KL(cur || ref), or with ``reverse`` of KL(ref || cur)."""

    def value(logits):
        logp = jax.nn.log_softmax(logits)
        if reverse:
            return jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - logp))
        return jnp.sum(jnp.exp(logp) * (logp - REFERENCE))

    return jax.grad(value)(LOGITS)


def loss(name, old):
    return lambda cur, ref, valid: KL_LOSSES.get(name, "algorithm.kl_loss")(
        cur, ref, jnp.broadcast_to(old, cur.shape), valid
    )


def test_values_by_hand_and_masked():
    args = row(-1, -2, 9), row(-1.5, -1.9, jnp.nan), mask(1, 1, 0)
    np.testing.assert_allclose(k1(*args), [[0.5, -0.1, 0]], rtol=1e-5)
    np.testing.assert_allclose(k2(*args), [[0.125, 0.005, 0]], rtol=1e-5)
    expected = [[np.exp(-0.5) - 0.5, np.exp(0.1) - 1.1, 0]]
    np.testing.assert_allclose(k3(*args), expected, rtol=1e-4)


def test_k1_and_k3_have_the_divergence_as_their_expected_value():
    logp = jax.nn.log_softmax(LOGITS)
    divergence = float(jnp.sum(jnp.exp(logp) * (logp - REFERENCE)))
    for estimate in (k1, k3):
        values = estimate(logp[None], REFERENCE[None], jnp.ones((1, 5), bool))
        assert float(jnp.sum(jnp.exp(logp)[None] * values)) == pytest.approx(divergence, rel=1e-5)


@pytest.mark.parametrize("name", ["k2", "k3_is"])
def test_loss_gradient_is_that_of_the_divergence(name):
    old = jax.nn.log_softmax(LOGITS)
    np.testing.assert_allclose(
        expected_gradient(loss(name, old)), kl_gradient(reverse=False), rtol=1e-4, atol=1e-6
    )


def test_k1_as_a_loss_has_no_pull_at_all():
    np.testing.assert_allclose(expected_gradient(k1), jnp.zeros(5), atol=1e-7)
    assert np.abs(kl_gradient(reverse=False)).max() > 0.05


def test_plain_k3_as_a_loss_pulls_along_the_other_divergence():
    gradient = expected_gradient(k3)
    np.testing.assert_allclose(gradient, kl_gradient(reverse=True), rtol=1e-4, atol=1e-6)
    assert np.abs(gradient - kl_gradient(reverse=False)).max() > 0.02


def test_only_the_weighted_k3_stays_exact_on_tokens_of_an_older_policy():
    exact = kl_gradient(reverse=False)
    weighted = expected_gradient(loss("k3_is", OLDER), drawn_from=OLDER)
    np.testing.assert_allclose(weighted, exact, rtol=1e-4, atol=1e-6)
    unweighted = expected_gradient(loss("k2", OLDER), drawn_from=OLDER)
    assert np.abs(unweighted - exact).max() > 0.02


@pytest.mark.parametrize("name", ["k2", "k3_is"])
def test_padding_reference_and_old_policy_take_no_gradient(name):
    args = row(-1, -jnp.inf), row(-2, jnp.inf), row(-1.5, jnp.nan)
    function = KL_LOSSES.get(name, "algorithm.kl_loss")

    def total(cur, ref, old):
        return function(cur, ref, old, mask(1, 0)).sum()

    by_cur, by_ref, by_old = jax.grad(total, argnums=(0, 1, 2))(*args)
    assert np.isfinite(by_cur).all() and by_cur[0, 0] > 0 and by_cur[0, 1] == 0.0
    assert not by_ref.any() and not by_old.any()


def test_equal_policies_have_no_divergence_and_no_pull():
    same = row(-1, -2)
    for name in KL_LOSSES:
        function = KL_LOSSES.get(name, "algorithm.kl_loss")
        gradient = jax.grad(lambda x, f=function: f(x, same, same, mask(1, 1)).sum())(same)
        assert not np.asarray(gradient).any(), name


@pytest.mark.parametrize("name", list(KL_LOSSES))
def test_far_apart_policies_are_pulled_together_with_bounded_force(name):
    """d of 3 is beyond the bound on k3, 500 beyond that on d: the direction must survive both."""
    function = KL_LOSSES.get(name, "algorithm.kl_loss")
    for cur, ref in ((-4.0, -1.0), (-1.0, -4.0), (-500.0, 0.0), (0.0, -500.0)):
        value, gradient = jax.value_and_grad(
            lambda x, r=ref, c=cur: function(x, row(r), row(c), mask(1)).sum()
        )(row(cur))
        d = np.clip(ref - cur, -20, 20)
        np.testing.assert_allclose(gradient, [[-d]], rtol=1e-6)
        assert 0 < value <= 200


def test_values_are_bounded():
    assert float(k3(row(-500.0), row(0.0), mask(1))[0, 0]) == 10.0
    assert float(k3(row(0.0), row(-500.0), mask(1))[0, 0]) == 10.0
    assert float(k1(row(0.0), row(-500.0), mask(1))[0, 0]) == 20.0


@given(st.floats(-3, -0.5), st.floats(-3, -0.5), st.floats(-3, -0.5))
def test_loss_gradients_equal_finite_differences_of_their_values(cur, ref, old):
    def k2_value(x):
        return (ref - x) ** 2 / 2

    def k3_value(x):
        return np.exp(x - old) * (np.exp(ref - x) - (ref - x) - 1)

    for name, value in (("k2", k2_value), ("k3_is", k3_value)):
        function = KL_LOSSES.get(name, "algorithm.kl_loss")
        total, gradient = jax.value_and_grad(
            lambda x, f=function: f(x, row(ref), row(old), mask(1)).sum()
        )(row(cur))
        slope = (value(cur + 1e-6) - value(cur - 1e-6)) / 2e-6
        assert float(gradient[0, 0]) == pytest.approx(slope, rel=1e-4, abs=1e-5)
        assert float(total) == pytest.approx(value(cur), rel=1e-4, abs=1e-5)


@settings(max_examples=30)
@given(st.lists(st.floats(-15, 0, width=32), min_size=1, max_size=6))
def test_k2_and_k3_are_never_negative(values):
    cur = row(*values)
    valid = jnp.ones_like(cur, bool)
    assert k3(cur, jnp.flip(cur), valid).min() >= 0.0
    assert k2(cur, jnp.flip(cur), valid).min() >= 0.0


def test_k1_and_k3_are_not_offered_as_losses():
    assert list(KL_LOSSES) == ["k2", "k3_is"]
    for name in ("k1", "k3"):
        with pytest.raises(InputError, match="k3_is"):
            KL_LOSSES.get(name, "algorithm.kl_loss")
