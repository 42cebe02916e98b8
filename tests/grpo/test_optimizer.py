from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from evojax.grpo.optimizer import OPTIMIZERS, SCHEDULES, learning_rate, optimizer

HYPER = {
    "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "grad_clip": 1e9, "lr": 1e-2,
    "lr_floor": 0.1, "warmup_steps": 0.0, "decay_steps": 4.0,
}  # fmt: skip


def hyper(**changes):
    return {name: jnp.float32(value) for name, value in (HYPER | changes).items()}


def directions(name, gradients, params, **changes):
    """The direction of each of some steps in turn."""
    rule = optimizer(name, hyper(**changes))
    state, found = rule.init(params), []
    for gradient in gradients:
        direction, state = rule.update(gradient, state, params)
        found.append(direction)
    return found


def test_adamw_by_hand():
    params = {"w": jnp.array([1.0, -2.0])}
    first, second = directions(
        "adamw", [{"w": jnp.array([0.5, -4.0])}, {"w": jnp.array([1.0, 0.0])}], params
    )
    np.testing.assert_allclose(first["w"], [1.0, -1.0], rtol=1e-6)  # g / |g|
    # m = .9 * .05 + .1 = .145 over 1 - .81; v = .95 * .0125 + .05 = .061875 over 1 - .9025
    expected = (0.145 / 0.19) / np.sqrt(0.061875 / 0.0975)
    assert float(second["w"][0]) == pytest.approx(expected, rel=1e-5)


def test_lion_by_hand():
    params = {"w": jnp.array([1.0, -2.0, 3.0])}
    gradients = [{"w": jnp.array([0.5, -4.0, 1.0])}, {"w": jnp.array([-0.1, 1.0, 0.0])}]
    first, second = directions("lion", gradients, params)
    np.testing.assert_array_equal(first["w"], [1.0, -1.0, 1.0])
    # m = .05 g1 = (.025, -.2, .05); .9 m + .1 g2 = (.0125, -.08, .045)
    np.testing.assert_array_equal(second["w"], [1.0, -1.0, 1.0])


def test_adafactor_by_hand():
    """The first step has decay 0: v = g^2, as a product of its row and column means."""
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=(128, 130)).astype(np.float32)
    (found,) = directions("adafactor", [{"w": jnp.asarray(gradient)}], {"w": jnp.zeros((128, 130))})
    square = gradient.astype(np.float64) ** 2
    v = square.mean(1)[:, None] * square.mean(0)[None] / square.mean()
    step = gradient / np.sqrt(v)
    step /= max(1.0, np.sqrt((step**2).mean()))
    np.testing.assert_allclose(found["w"], step, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_decay_is_decoupled_and_spares_the_norms(name):
    params = {"w": jnp.full((2, 2), 2.0), "attn_norm": jnp.full((2,), 2.0)}
    gradient = jax.tree.map(lambda p: 0.3 * jnp.ones_like(p), params)
    (plain,) = directions(name, [gradient], params)
    (decayed,) = directions(name, [gradient], params, weight_decay=0.1)
    np.testing.assert_allclose(decayed["w"] - plain["w"], 0.2, rtol=1e-5)
    np.testing.assert_array_equal(decayed["attn_norm"], plain["attn_norm"])


def test_gradient_is_clipped_by_its_global_norm_before_the_rule():
    params = {"w": jnp.zeros(2), "v": jnp.zeros(1)}
    gradient = {"w": jnp.array([3.0, 0.0]), "v": jnp.array([4.0])}
    rule = optimizer("adamw", hyper(grad_clip=0.5))
    _, state = rule.update(gradient, rule.init(params), params)
    moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(moment["w"], [0.1 * 0.3, 0.0], rtol=1e-6)
    np.testing.assert_allclose(moment["v"], [0.1 * 0.4], rtol=1e-6)


def test_adafactor_keeps_less_than_half_of_what_adam_keeps():
    params = {"layers": {"q": jnp.zeros((2, 256, 192)), "attn_norm": jnp.ones((2, 256))}}

    def size(name):
        leaves = jax.tree.leaves(optimizer(name, hyper()).init(params))
        return sum(leaf.nbytes for leaf in leaves)

    assert size("adafactor") < 0.05 * size("adamw")
    assert size("lion") < 0.51 * size("adamw")


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 4, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 0, [1] * 10),
        ("linear", 2, [0.5, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1, 0.1]),
        ("linear", 0, [1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", 0, [1, 0.1 + 0.45 * (1 + 0.5**0.5), 0.55, 0.1 + 0.45 * (1 - 0.5**0.5), 0.1]),
    ],
)
def test_schedules_by_hand(schedule, warmup, expected):
    values = hyper(warmup_steps=warmup)
    rates = [float(learning_rate(schedule, values, jnp.int32(n))) for n in range(len(expected))]
    np.testing.assert_allclose(rates, 1e-2 * np.array(expected), rtol=1e-5)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_schedules_go_from_one_to_the_floor(schedule):
    shape = SCHEDULES.get(schedule, "test")
    ends = shape(jnp.array([0.0, 1.0]), jnp.float32(0.25))
    np.testing.assert_allclose(ends, [1.0, 1.0 if schedule == "constant" else 0.25], rtol=1e-6)
