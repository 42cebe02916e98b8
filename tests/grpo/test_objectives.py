from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.errors import InputError
from evojax.grpo.objectives import OBJECTIVES, Bounds, log_ratio, masked_sum

BOUNDS = Bounds(0.2, 0.28)
NAMES = ["clip", "gspo", "cispo"]


def row(*values):
    return jnp.array([values], jnp.float32)


def mask(*values):
    return jnp.array([values], bool)


def call(name, logp_cur, logp_old, advantages, response_mask, bounds=BOUNDS):
    objective = OBJECTIVES.get(name, "algorithm.objective")
    return objective(logp_cur, logp_old, advantages, response_mask, bounds)


def mean_loss(logp_cur, logp_old, advantages, response_mask, name="clip"):
    out = call(name, logp_cur, logp_old, advantages, response_mask)
    total, count = masked_sum(out.loss, response_mask)
    return total / count


def flags(array):
    return np.asarray(array, int).tolist()


def test_case_G05_far_off_padded_token_leaves_an_exact_finite_gradient():
    args = row(-1, -1, -200), row(-1, -1, -1), mask(1, 1, 0)
    for name in NAMES:
        gradient = jax.jit(jax.grad(lambda x, n=name: mean_loss(x, *args, n)))(row(-1, -1, 0))
        np.testing.assert_array_equal(gradient, [[0.5, 0.5, 0.0]], err_msg=name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padding", [jnp.inf, -jnp.inf, jnp.nan, 1e30])
def test_case_G05_padding_may_hold_anything(name, padding):
    cur, old = row(-1, padding), row(-1, -padding)
    gradient = jax.grad(lambda x: mean_loss(x, old, row(2, padding), mask(1, 0), name))(cur)
    np.testing.assert_array_equal(gradient, [[-2.0, 0.0]])
    out = call(name, cur, old, row(2, padding), mask(1, 0))
    assert all(np.isfinite(np.asarray(x, float)).all() for x in out)
    assert out.ratio[0, 1] == 1.0 and out.loss[0, 1] == 0.0
    assert not any(np.asarray(x)[0, 1] for x in out[2:])


def test_case_G05_a_huge_ratio_inside_the_mask_is_clamped_before_exp():
    loss, gradient = jax.value_and_grad(mean_loss)(row(0.0), row(-200.0), row(-1.0), mask(1))
    np.testing.assert_allclose(loss, np.exp(20.0), rtol=1e-6)
    assert np.isfinite(gradient).all()


def test_lines_without_tokens_are_nothing():
    for name in NAMES:
        args = row(-jnp.inf, 3), row(jnp.nan, 0), row(1, 1), mask(0, 0)
        out = call(name, *args)
        gradient = jax.grad(lambda x, n=name, a=args: call(n, x, *a[1:]).loss.sum())(args[0])
        assert not np.asarray(out.loss).any() and not np.asarray(gradient).any(), name


def test_clip_loss_and_masks_by_hand():
    ratios = np.array([1.5, 1.5, 0.5, 0.5, 1.0, 9.0])
    advantages = row(1, -1, 1, -1, 2, 1)
    out = call("clip", jnp.log(row(*ratios)), jnp.zeros((1, 6)), advantages, mask(1, 1, 1, 1, 1, 0))
    # r A against clip(r, .8, 1.28) A: 1.28, -1.5, .5, -.8, 2 and the masked 0
    np.testing.assert_allclose(out.loss, [[-1.28, 1.5, -0.5, 0.8, -2.0, 0.0]], rtol=1e-6)
    assert flags(out.clip_high) == [[1, 0, 0, 0, 0, 0]]
    assert flags(out.clip_low) == [[0, 0, 0, 1, 0, 0]]
    assert not np.asarray(out.clip_dual).any()


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    ratios, advantages = row(2.9, 3.5, 3.5, 0.5), row(-2, -2, 2, -1)
    args = jnp.log(ratios), jnp.zeros((1, 4)), advantages, mask(1, 1, 1, 1)
    out = call("clip", *args, Bounds(0.2, 0.28, 3.0))
    np.testing.assert_allclose(out.loss, [[5.8, 6.0, -2.56, 0.8]], rtol=1e-5)
    assert flags(out.clip_dual) == [[0, 1, 0, 0]]
    assert flags(out.clip_high) == [[0, 0, 1, 0]] and flags(out.clip_low) == [[0, 0, 0, 1]]
    gradient = jax.grad(
        lambda x: call("clip", x, *args[1:], Bounds(0.2, 0.28, jnp.float32(3.0))).loss.sum()
    )(args[0])
    np.testing.assert_allclose(gradient, [[5.8, 0, 0, 0]], rtol=1e-5, atol=1e-7)


def test_clipped_tokens_have_no_gradient_and_others_have_minus_r_times_a():
    gradient = jax.grad(
        lambda x: call("clip", x, jnp.zeros_like(x), row(1, -1, 3), mask(1, 1, 1)).loss.sum()
    )(jnp.log(row(1.5, 0.5, 1.1)))
    np.testing.assert_allclose(gradient, [[0.0, 0.0, -3.3]], rtol=1e-5, atol=1e-7)


def test_a_bound_of_zero_does_not_halve_the_gradient_at_ratio_one():
    gradient = jax.grad(
        lambda x: call("clip", x, x, row(1, -1), mask(1, 1), Bounds(0.0, 0.0)).loss.sum()
    )(row(-1, -2))
    np.testing.assert_array_equal(gradient, [[-1.0, 1.0]])


def test_gspo_ratio_is_the_geometric_mean_of_the_line():
    logs = jnp.array([[0.3, -0.1, 9.0], [-0.6, 0.0, 0.0]])
    valid = jnp.array([[1, 1, 0], [1, 1, 1]], bool)
    advantages = jnp.array([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
    out = call("gspo", logs, jnp.zeros((2, 3)), advantages, valid, Bounds(0.15, 0.05))
    s = np.exp([0.1, -0.2])
    np.testing.assert_allclose(out.ratio, [[s[0], s[0], 1], [s[1]] * 3], rtol=1e-6)
    # s = 1.105 > 1.05 and 0.819 < 0.85: both lines are cut, each of their tokens counts as such
    np.testing.assert_allclose(out.loss, [[-1.05, -1.05, 0], [0.85] * 3], rtol=1e-6)
    assert flags(out.clip_high) == [[1, 1, 0], [0, 0, 0]]
    assert flags(out.clip_low) == [[0, 0, 0], [1, 1, 1]]
    wide = Bounds(0.2, 0.2)
    gradient = jax.grad(
        lambda x: call("gspo", x, jnp.zeros((2, 3)), advantages, valid, wide).loss.sum()
    )(logs)
    np.testing.assert_allclose(gradient, [[-s[0], -s[0], 0], [s[1]] * 3], rtol=1e-6)


def test_cispo_caps_the_weight_and_keeps_every_gradient():
    ratios, advantages = row(1.5, 0.01, 1.5, 1.0, 1.5), row(1, -1, -1, 2, 0)
    args = jnp.log(ratios), jnp.zeros((1, 5)), advantages, mask(1, 1, 1, 1, 1)
    out = call("cispo", *args)
    weight = np.array([1.28, 0.01, 1.28, 1.0, 1.28])
    expected = -weight * np.array(advantages) * np.log(ratios)
    np.testing.assert_allclose(out.loss, expected, rtol=1e-5, atol=1e-6)
    assert flags(out.clip_high) == [[1, 0, 1, 0, 0]] and not np.asarray(out.clip_low).any()
    gradient = jax.grad(lambda x: call("cispo", x, *args[1:]).loss.sum())(args[0])
    np.testing.assert_allclose(gradient, -weight[None] * np.array(advantages), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_old_policy_and_advantages_take_no_gradient(name):
    def loss(old, advantages):
        return mean_loss(row(-1, -2), old, advantages, mask(1, 1), name)

    by_old, by_advantage = jax.grad(loss, argnums=(0, 1))(row(-1.1, -2.0), row(1, -1))
    assert not by_old.any() and not by_advantage.any()


@pytest.mark.parametrize("name", NAMES)
def test_on_the_first_update_every_objective_is_the_policy_gradient(name):
    old = row(-1, -2, -3)
    gradient = jax.grad(
        lambda x: call(name, x, jax.lax.stop_gradient(x), row(1, -2, 0.5), mask(1, 1, 1)).loss.sum()
    )(old)
    np.testing.assert_allclose(gradient, [[-1.0, 2.0, -0.5]], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_that_would_broadcast_and_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="one shape"):
        call(name, row(1, 2), row(1, 2), jnp.ones((1, 1)), mask(1, 1))
    with pytest.raises(InputError, match=f"did you mean '{name}'"):
        OBJECTIVES.get(name + "x", "algorithm.objective")


def oracle(name, cur, old, advantages, valid, low, high, dual):
    """Token losses once more, one Python number at a time."""
    out = np.zeros(cur.shape)
    for i, t in np.argwhere(valid):
        logs = [cur[i, u] - old[i, u] for u in np.flatnonzero(valid[i])]
        ratio = np.exp(np.mean(logs) if name == "gspo" else cur[i, t] - old[i, t])
        a = advantages[i, t]
        if name == "cispo":
            out[i, t] = -min(ratio, 1 + high) * a * cur[i, t]
            continue
        value = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        out[i, t] = -(max(value, dual * a) if a < 0 and dual else value)
    return out


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(NAMES), st.sampled_from([None, 1.5, 3.0]))
def test_objectives_equal_their_oracle(seed, name, dual):
    rng = np.random.default_rng(seed)
    cur, old = rng.normal(-1, 0.6, (2, 3, 5))
    advantages = np.repeat(rng.normal(size=(3, 1)), 5, axis=1)
    valid = rng.random((3, 5)) < 0.7
    arrays = (jnp.array(x, jnp.float32) for x in (cur, old, advantages))
    out = call(name, *arrays, response_mask=jnp.array(valid), bounds=Bounds(0.2, 0.28, dual))
    expected = oracle(name, cur, old, advantages, valid, 0.2, 0.28, dual)
    np.testing.assert_allclose(out.loss, expected, rtol=2e-4, atol=1e-5)


@given(st.lists(st.floats(-15, 0, width=32), min_size=1, max_size=6))
def test_log_ratio_is_bounded(values):
    cur = row(*values)
    valid = jnp.ones_like(cur, bool)
    assert jnp.abs(log_ratio(cur * 100, jnp.flip(cur), valid)).max() <= 20.0
