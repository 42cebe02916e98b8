from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.errors import InputError
from evojax.grpo.correction import CORRECTIONS, effective_share, mismatch

NAMES = list(CORRECTIONS)
RATIOS = np.array([[3.0, 0.4, 1.0, 7.0], [1.0, 1.1, 1.0, 7.0]])
VALID = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)


def row(*values):
    return jnp.array([values], jnp.float32)


def mask(*values):
    return jnp.array([values], bool)


def call(name, low=0.5, high=2.0, ratios=RATIOS, valid=VALID):
    logp = jnp.log(jnp.array(ratios, jnp.float32))
    correct = CORRECTIONS.get(name, "algorithm.correction")
    return correct(logp, jnp.zeros_like(logp), valid, low, high)


def check(out, weight, truncated, kept=None):
    np.testing.assert_allclose(out.weight, weight, rtol=1e-5)
    np.testing.assert_array_equal(out.truncated, np.array(truncated, bool))
    np.testing.assert_array_equal(out.kept, VALID if kept is None else np.array(kept, bool))


def test_none_weighs_every_token_one():
    check(call("none"), [[1, 1, 1, 0], [1, 1, 0, 0]], np.zeros((2, 4)))


def test_token_tis_caps_each_ratio():
    check(call("token_tis"), [[2, 0.4, 1, 0], [1, 1.1, 0, 0]], [[1, 0, 0, 0], [0, 0, 0, 0]])


def test_sequence_tis_caps_the_product_of_the_line():
    # 3 * .4 * 1 = 1.2 and 1.1
    check(call("sequence_tis"), [[1.2, 1.2, 1.2, 0], [1.1, 1.1, 0, 0]], np.zeros((2, 4)))
    check(
        call("sequence_tis", high=1.15),
        [[1.15, 1.15, 1.15, 0], [1.1, 1.1, 0, 0]],
        [[1, 1, 1, 0], [0, 0, 0, 0]],
    )


def test_token_mask_drops_ratios_outside_the_bounds():
    check(
        call("token_mask"),
        [[0, 0, 1, 0], [1, 1.1, 0, 0]],
        truncated=[[1, 1, 0, 0], [0, 0, 0, 0]],
        kept=[[0, 0, 1, 0], [1, 1, 0, 0]],
    )


def test_geometric_mask_drops_whole_lines():
    # geometric means 1.2 ** (1/3) = 1.063 and 1.1 ** (1/2) = 1.049
    check(call("geometric_mask"), [[1, 1, 1, 0], [1, 1, 0, 0]], np.zeros((2, 4)))
    check(
        call("geometric_mask", 0.95, 1.055),
        [[0, 0, 0, 0], [1, 1, 0, 0]],
        truncated=[[1, 1, 1, 0], [0, 0, 0, 0]],
        kept=[[0, 0, 0, 0], [1, 1, 0, 0]],
    )


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_constants_and_padding_may_hold_anything(name):
    correct = CORRECTIONS.get(name, "algorithm.correction")

    def total(old, rollout):
        return correct(old, rollout, mask(1, 0), 0.5, 2.0).weight.sum()

    old, rollout = row(-1, -jnp.inf), row(-1.2, jnp.nan)
    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(old, rollout)
    assert np.isfinite(value) and not any(np.asarray(g).any() for g in gradients)
    empty = correct(old, rollout, mask(0, 0), 0.5, 2.0)
    assert not any(np.asarray(x).any() for x in empty)


@pytest.mark.parametrize("name", NAMES)
def test_equal_policies_are_not_corrected(name):
    out = call(name, ratios=np.ones((2, 4)))
    np.testing.assert_array_equal(out.weight, np.asarray(VALID, np.float32))
    assert not np.asarray(out.truncated).any()


@pytest.mark.parametrize("name", ["token_tis", "sequence_tis", "token_mask"])
def test_without_bounds_the_weight_is_unbiased(name):
    """``E over the sampler of weight * f = E over the trainer of f``, enumerated exactly."""
    old = jax.nn.log_softmax(jnp.array([0.3, -1.0, 0.5, 0.1, 0.0]))[:, None]
    sampler = jax.nn.log_softmax(jnp.array([0.6, -0.2, 0.1, 0.4, 0.0]))[:, None]
    values = np.array([2.0, -1.0, 0.5, 3.0, -2.0])
    out = CORRECTIONS.get(name, "algorithm.correction")(
        old, sampler, jnp.ones((5, 1), bool), 0.0, 1e9
    )
    mean = np.sum(np.exp(sampler[:, 0]) * np.asarray(out.weight)[:, 0] * values)
    assert mean == pytest.approx(float(np.sum(np.exp(old[:, 0]) * values)), rel=1e-5)


def oracle(name, logs, valid, low, high):
    """Weights once more, one token at a time."""
    out = np.zeros(logs.shape)
    for i, t in np.argwhere(valid):
        line = logs[i][valid[i]]
        ratio = np.exp(logs[i, t])
        out[i, t] = {
            "none": lambda r, x: 1.0,
            "token_tis": lambda r, x: min(r, high),
            "sequence_tis": lambda r, x: min(np.exp(x.sum()), high),
            "token_mask": lambda r, x: r if low <= r <= high else 0.0,
            "geometric_mask": lambda r, x: float(low <= np.exp(x.mean()) <= high),
        }[name](ratio, line)
    return out


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(NAMES))
def test_corrections_equal_their_oracle(seed, name):
    rng = np.random.default_rng(seed)
    logs, valid = rng.normal(0, 0.4, (3, 5)), rng.random((3, 5)) < 0.7
    out = call(name, 0.8, 1.2, np.exp(logs), jnp.array(valid))
    expected = oracle(name, logs, valid, 0.8, 1.2)
    np.testing.assert_allclose(out.weight, expected, rtol=1e-4, atol=1e-6)
    if name.endswith("mask"):
        np.testing.assert_array_equal(out.kept, expected > 0)
        np.testing.assert_array_equal(out.truncated, valid & (expected == 0))


def test_mismatch_by_hand_and_masked():
    out = mismatch(row(-1, -2, -50), row(-1.5, -1.9, jnp.inf), mask(1, 1, 0))
    np.testing.assert_allclose(out.k1[0], 0.4, rtol=1e-5)
    np.testing.assert_allclose(out.k3[0], np.exp(-0.5) - 0.5 + np.exp(0.1) - 1.1, rtol=1e-5)
    assert out.k1[1] == 2.0 and out.k3[1] == 2.0
    np.testing.assert_allclose(out.max_abs, 0.5, rtol=1e-6)
    rho = np.exp([-0.5, 0.1])
    np.testing.assert_allclose(out.ess, [rho.sum(), (rho**2).sum(), 2.0], rtol=1e-5)
    share = effective_share(*(float(x) for x in out.ess))
    assert share == pytest.approx(rho.sum() ** 2 / (2 * (rho**2).sum()), rel=1e-5)


def test_equal_policies_have_no_mismatch_and_a_full_effective_sample():
    out = mismatch(row(-1, -2), row(-1, -2), mask(1, 1))
    assert out.k1[0] == 0.0 and out.k3[0] == 0.0 and out.max_abs == 0.0
    assert effective_share(*(float(x) for x in out.ess)) == 1.0


def test_effective_share_of_nothing_is_nan():
    out = mismatch(row(-1, -2), row(-1, -2), mask(0, 0))
    assert np.isnan(effective_share(*(float(x) for x in out.ess)))


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="did you mean 'token_tis'"):
        CORRECTIONS.get("tokentis", "algorithm.correction")
