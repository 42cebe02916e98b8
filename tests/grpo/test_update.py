from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_grpo import TINY, completion, random_batch, sharp_params
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.config import AlgorithmConf
from evojax.grpo import logprobs
from evojax.grpo import update as update_module
from evojax.grpo.advantages import group_normalised
from evojax.grpo.objective import clipped_token_loss
from evojax.grpo.pack import pack
from evojax.grpo.update import Updater, batch_gradient, learning_rate, update
from evojax.policy.decoder import hidden_states, init_params, lm_logits

TEMPERATURE = 0.8


def packed_batch(seed=0, per_row=2):
    prompts, completions, rewards = random_batch(seed)
    advantages = group_normalised(rewards, tolerance=1e-6)
    return pack(prompts, completions, advantages, per_row)


def updater(**changes):
    conf = dataclasses.replace(AlgorithmConf(lr=1e-2), **changes)
    return Updater(TINY, conf, TEMPERATURE)


gradient_of = jax.jit(batch_gradient, static_argnames=("cfg", "remat"))
WIDTH = 16


@jax.jit
def plain_gradient(params, ids, start, stop, old, advantages, count):
    """The unpacked form: one sequence a row, causal mask, one big batch, dead groups included."""
    index = jnp.arange(WIDTH)[None]
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((WIDTH, WIDTH), bool)), (len(ids), WIDTH, WIDTH))
    positions = jnp.broadcast_to(index, ids.shape)
    valid = ((index >= start[:, None]) & (index < stop[:, None]))[:, 1:]

    def loss(weights):
        hidden = hidden_states(weights, TINY, ids, positions, causal)
        logp = jax.nn.log_softmax(lm_logits(weights, TINY, hidden)[:, :-1] / TEMPERATURE)
        chosen = jnp.take_along_axis(logp, ids[:, 1:, None], -1)[..., 0]
        adv = jnp.broadcast_to(advantages[:, None], chosen.shape)
        return clipped_token_loss(chosen, old[:, 1:], adv, valid, 0.2, 0.28).loss.sum() / count

    return jax.value_and_grad(loss)(params)


def unpacked(params, prompts, completions, rewards):
    adv = group_normalised(rewards, tolerance=1e-6)
    total = rewards.size
    ids, old = np.zeros((total, WIDTH), np.int32), np.zeros((total, WIDTH), np.float32)
    start, stop = np.zeros(total, int), np.zeros(total, int)
    for i, (g, s) in enumerate(np.ndindex(rewards.shape)):
        sample, begin = completions[g][s], len(prompts[g])
        start[i], stop[i] = begin, begin + len(sample.token_ids) * int(adv.weight[g, s])
        end = begin + len(sample.token_ids)
        ids[i, :begin], ids[i, begin:end] = prompts[g], sample.token_ids
        old[i, begin:end] = sample.logprobs
    count = int((stop - start).sum())
    return plain_gradient(params, ids, start, stop, old, adv.advantages.ravel(), count)


def assert_same(left, right, rtol=1e-5):
    """Equal leaf by leaf, to ``rtol`` of the leaf's largest element (others cancel in sums)."""

    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(np.abs(b).max()) + 1e-7)

    jax.tree.map(compare, left, right)


@pytest.mark.parametrize("unscorable", [False, True])
def test_packed_loss_and_gradient_equal_the_unpacked_form(unscorable):
    prompts, completions, rewards = random_batch(5)
    if unscorable:
        rewards[2, 1] = np.nan
        rewards[3, 1:] = np.nan
    packed = pack(prompts, completions, group_normalised(rewards, tolerance=1e-6), 2)
    assert packed is not None
    params = sharp_params()
    gradient, sums = gradient_of(params, TINY, updater().hyper, packed.rows)
    loss, expected = unpacked(params, prompts, completions, rewards)
    np.testing.assert_allclose(sums["loss"] / packed.rows.token_count, loss, rtol=1e-5)
    assert_same(gradient, expected)
    assert optax.tree.norm(gradient) > 1e-2


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 50), st.permutations(range(4)), st.sampled_from([1, 2, 4]))
def test_rows_padding_and_order_of_groups_do_not_change_the_gradient(seed, order, per_row):
    prompts, completions, rewards = random_batch(seed)
    params = sharp_params()
    hyper = updater().hyper
    one = packed_batch(seed, per_row=3)
    other = pack(
        [prompts[g] for g in order],
        [completions[g] for g in order],
        group_normalised(rewards[order], tolerance=1e-6),
        per_row,
    )
    assert one is not None and other is not None
    left, sums = gradient_of(params, TINY, hyper, one.rows)
    right, other_sums = gradient_of(params, TINY, hyper, other.rows)
    assert_same(left, right)
    assert_same(sums, other_sums)


def test_gradient_equals_finite_differences():
    params = sharp_params()
    packed = packed_batch(5)
    assert packed is not None
    hyper = updater().hyper
    gradient, _ = gradient_of(params, TINY, hyper, packed.rows)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    step = 1e-3

    def loss(sign):
        moved = jax.tree.map(lambda p, d: p + sign * step * d, params, direction)
        return float(gradient_of(moved, TINY, hyper, packed.rows)[1]["loss"])

    slope = (loss(1) - loss(-1)) / (2 * step * float(packed.rows.token_count))
    products = jax.tree.map(lambda g, d: jnp.vdot(g, d), gradient, direction)
    assert slope == pytest.approx(float(sum(jax.tree.leaves(products))), rel=2e-2)


def test_chunked_head_and_remat_give_the_same_gradient(monkeypatch):
    params, hyper, packed = sharp_params(), updater().hyper, packed_batch(5)
    assert packed is not None
    plain, sums = gradient_of(params, TINY, hyper, packed.rows)
    monkeypatch.setattr(logprobs, "_CHUNK", 5)  # does not divide the slots
    other, other_sums = jax.jit(lambda p, rows: batch_gradient(p, TINY, hyper, rows, True))(
        params, packed.rows
    )
    assert_same(plain, other)
    assert_same(sums, other_sums)


def test_one_step_is_clipped_adamw_with_warm_up():
    params, packed = sharp_params(), packed_batch(5)
    assert packed is not None
    conf = {"weight_decay": 0.1, "warmup_steps": 2, "grad_clip": 0.01}
    trainer = updater(**conf)
    gradient, _ = gradient_of(params, TINY, trainer.hyper, packed.rows)
    decayed = jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in str(path[-1]), params)
    oracle = optax.chain(
        optax.clip_by_global_norm(0.01),
        optax.adamw(5e-3, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed),
    )
    changes, _ = jax.jit(oracle.update)(gradient, oracle.init(params), params)
    state, metrics = trainer.step(trainer.init(params), packed)
    assert_same(state["params"], optax.apply_updates(params, changes))
    assert metrics["lr"] == pytest.approx(5e-3)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
    assert int(state["step"]) == 1


def test_warm_up_is_linear_then_flat():
    hyper = updater(warmup_steps=4).hyper
    rates = [float(learning_rate(hyper, jnp.int32(step))) for step in range(6)]
    np.testing.assert_allclose(rates, [2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2, 1e-2], rtol=1e-6)
    assert float(learning_rate(updater().hyper, jnp.int32(0))) == pytest.approx(1e-2)


def test_training_raises_the_probability_of_the_rewarded_token():
    trainer = updater(lr=3e-2)
    state = trainer.init(init_params(TINY, 0))
    logp = [float(np.log(1 / 11))]
    completions = [[completion([3], logp), completion([4], logp)]]
    advantages = group_normalised([[1.0, 0.0]], tolerance=1e-6)
    packed = pack([np.array([1, 2])], completions, advantages, 1)
    history = [trainer.step(state, packed)]
    for _ in range(5):
        history.append(trainer.step(history[-1][0], packed))
    first, last = history[0][1], history[-1][1]
    assert first["ratio_max"] == pytest.approx(1.0, abs=0.1) and first["clip_high"] == 0.0
    assert last["loss"] < first["loss"]
    assert last["ratio_max"] > 1.28 and last["clip_high"] > 0.0
    assert first["entropy"] == pytest.approx(np.log(11), abs=0.05)
    assert all(m["mismatch_k3"] >= 0 for _, m in history)


def test_bad_gradient_is_skipped_counted_and_recovered_from():
    trainer, packed = updater(), packed_batch(5)
    assert packed is not None
    poisoned = packed.rows._replace(advantages=packed.rows.advantages * np.nan)
    bad = type(packed)(poisoned, packed.owner, packed.stats)
    state, _ = trainer.step(trainer.init(sharp_params()), packed)
    before = jax.tree.map(np.array, state)
    for turn in (1, 2):
        state, metrics = trainer.step(state, bad)
        assert metrics["skipped"] == 1.0 and metrics["nonfinite_consecutive"] == turn
    chex.assert_trees_all_equal(state["params"], before["params"])
    chex.assert_trees_all_equal(state["opt_state"], before["opt_state"])
    assert int(state["step"]) == 1 and int(state["nonfinite"]) == 2
    state, metrics = trainer.step(state, packed)
    assert metrics["skipped"] == 0.0 and metrics["nonfinite_consecutive"] == 0.0
    assert int(state["nonfinite"]) == 2 and int(state["step"]) == 2


def test_no_live_group_changes_nothing_and_is_counted():
    trainer = updater()
    state = trainer.init(sharp_params())
    before = jax.tree.map(np.array, state["params"])
    state, metrics = trainer.step(state, None)
    chex.assert_trees_all_equal(state["params"], before)
    assert int(state["no_signal"]) == 1 and int(state["step"]) == 0
    assert metrics["no_signal"] == 1.0 and np.isnan(metrics["loss"]) and metrics["tokens"] == 0.0
    assert set(metrics) == set(trainer.step(state, packed_batch(5))[1])


def test_state_is_donated_but_the_callers_weights_survive():
    trainer, packed = updater(), packed_batch(5)
    assert packed is not None
    params = sharp_params()
    state = trainer.init(params)
    text = update.lower(state, TINY, trainer.hyper, packed.rows).as_text()
    leaves = len(jax.tree.leaves(state))
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") >= leaves - 1
    trainer.step(state, packed)
    assert state["params"]["embed"].is_deleted()
    assert np.isfinite(params["embed"]).all()


def test_other_settings_and_other_numbers_of_live_groups_share_a_compilation(monkeypatch):
    cfg = dataclasses.replace(TINY, rms_eps=2e-5)  # compiled by no other test
    traces = []

    def counted(*args):
        traces.append(args)
        return batch_gradient(*args)

    monkeypatch.setattr(update_module, "batch_gradient", counted)
    state, shapes, live = updater().init(sharp_params()), set(), set()
    for seed in range(5):
        prompts, completions, rewards = random_batch(seed, groups=6)
        rewards[: seed + 1] = 0.0
        packed = pack(prompts, completions, group_normalised(rewards, tolerance=1e-6), 2)
        assert packed is not None
        conf = AlgorithmConf(lr=1e-3 * (seed + 1), eps_high=0.2 + 0.01 * seed)
        state, _ = Updater(cfg, conf, TEMPERATURE + 0.1 * seed).step(state, packed)
        shapes.add(tuple(x.shape for x in packed.rows))
        live.add(packed.stats["groups_packed"])
    assert len(traces) == len(shapes) <= 3 and live == {1, 2, 3, 4}


def test_abstract_state_describes_the_state():
    params = sharp_params()
    trainer = updater()
    state = trainer.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, trainer.abstract_state())
