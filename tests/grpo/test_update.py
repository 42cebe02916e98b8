from __future__ import annotations

import dataclasses

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_grpo import TINY, completion, packed_of, random_batch, sharp_params

from evojax.config import AlgorithmConf
from evojax.grpo import token_scores
from evojax.grpo import update as update_module
from evojax.grpo.gradient import batch_gradient
from evojax.grpo.optimizer import OPTIMIZERS
from evojax.grpo.update import Updater
from evojax.policy.decoder import init_params

TEMPERATURE = 0.8

gradient_of = jax.jit(batch_gradient, static_argnames=("cfg", "spec"))


def updater(remat="none", **changes):
    conf = dataclasses.replace(AlgorithmConf(lr=1e-2), **changes)
    return Updater(dataclasses.replace(TINY, remat=remat), conf, TEMPERATURE)


def batch(seed=5, per_row=2, **options):
    packed = packed_of(*random_batch(seed), per_row=per_row, **options)
    assert packed is not None
    return packed


def gradient(params, trainer, packed):
    return gradient_of(params, trainer.cfg, trainer.spec, trainer.hyper, packed.rows)


def assert_same(left, right, rtol=1e-5):
    """Equal leaf by leaf, to ``rtol`` of the leaf's largest element (others cancel in sums)."""

    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(np.abs(b).max()) + 1e-7)

    jax.tree.map(compare, left, right)


def nudged(params, size, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: p + size * jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective": "gspo", "old_logprobs": "trainer", "epochs": 2},
        {"kl_coef": 0.3, "kl_loss": "k2"},
        {"kl_coef": 0.3, "kl_loss": "k3_is", "old_logprobs": "trainer", "epochs": 2},
        {"entropy_coef": 0.2},
    ],
)
def test_gradient_equals_finite_differences(changes):
    params, trainer = sharp_params(), updater(**changes)
    packed = batch(include_dead=trainer.spec.needs_dead)
    trainer.reference(nudged(params, 0.02))
    packed = trainer.score_reference(packed)
    packed = trainer.score_old({"params": nudged(params, 0.01, seed=1)}, packed)
    found, _ = gradient(params, trainer, packed)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    step = 1e-3

    def loss(sign):
        moved = jax.tree.map(lambda p, d: p + sign * step * d, params, direction)
        return float(gradient(moved, trainer, packed)[1]["loss"])

    slope = (loss(1) - loss(-1)) / (2 * step)
    products = jax.tree.map(lambda g, d: jnp.vdot(g, d), found, direction)
    assert slope == pytest.approx(float(sum(jax.tree.leaves(products))), rel=2e-2, abs=1e-3)
    assert optax.tree.norm(found) > 1e-2


def test_chunked_head_and_remat_give_the_same_gradient(monkeypatch):
    params, packed = sharp_params(), batch()
    plain, sums = gradient(params, updater(entropy_coef=0.1), packed)
    monkeypatch.setattr(token_scores, "_KEEP", 0)
    monkeypatch.setattr(token_scores, "_CHUNK", 5 * 11 * 4)  # rows that do not divide the slots
    other = updater(remat="full", entropy_coef=0.1)
    again, other_sums = gradient(params, other, packed)
    assert_same(plain, again)
    assert_same(sums, other_sums)


@pytest.mark.parametrize("chunked", [False, True])
def test_the_gradient_in_bfloat16_points_where_that_in_float32_does(monkeypatch, chunked):
    params, packed, trainer = sharp_params(), batch(), updater(entropy_coef=0.1)
    exact, sums = gradient(params, trainer, packed)
    if chunked:
        monkeypatch.setattr(token_scores, "_KEEP", 0)
        monkeypatch.setattr(token_scores, "_CHUNK", 5 * 11 * 4)
    half = dataclasses.replace(TINY, compute_dtype="bfloat16")
    found, other = gradient_of(params, half, trainer.spec, trainer.hyper, packed.rows)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))
    ours, theirs = (jax.flatten_util.ravel_pytree(g)[0] for g in (found, exact))
    cosine = jnp.vdot(ours, theirs) / jnp.linalg.norm(ours) / jnp.linalg.norm(theirs)
    assert float(cosine) > 0.99
    assert float(other["entropy"]) == pytest.approx(float(sums["entropy"]), rel=2e-2)


def test_the_entropy_costs_no_backward_pass_unless_it_has_a_coefficient():
    packed = batch()

    def operations(trainer):
        text = trainer.lower(trainer.abstract_state(), packed).as_text()
        return text.count(" = stablehlo.")

    assert operations(updater(entropy_coef=0.1)) > operations(updater()) + 5


def test_one_step_is_clipped_adamw_with_warm_up():
    params, packed = sharp_params(), batch()
    trainer = updater(weight_decay=0.1, warmup_steps=2, grad_clip=0.01)
    found, _ = gradient(params, trainer, packed)
    decayed = jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in str(path[-1]), params)
    oracle = optax.chain(
        optax.clip_by_global_norm(0.01),
        optax.adamw(5e-3, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed),
    )
    changes, _ = jax.jit(oracle.update)(found, oracle.init(params), params)
    state, metrics = trainer.step(trainer.init(params), packed)
    assert_same(state["params"], optax.apply_updates(params, changes))
    assert metrics["lr"] == pytest.approx(5e-3)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(found)), rel=1e-5)
    assert int(state["step"]) == 1


@pytest.mark.parametrize(
    ("name", "objective"), [("adamw", "clip"), ("lion", "gspo"), ("adafactor", "cispo")]
)
def test_training_raises_the_probability_of_the_rewarded_token(name, objective):
    trainer = updater(lr=3e-2, optimizer=name, objective=objective)
    state = trainer.init(init_params(TINY, 0))
    logp = [float(np.log(1 / 11))]
    completions = [[completion([3], logp), completion([4], logp)]]
    packed = packed_of([np.array([1, 2])], completions, [[1.0, 0.0]], 1)
    history = []
    for _ in range(6):
        state, metrics = trainer.step(state, packed)
        history.append(metrics)
    first, last = history[0], history[-1]
    assert first["ratio_max"] == pytest.approx(1.0, abs=0.1) and first["clip_high"] == 0.0
    assert first["ess"] == pytest.approx(1.0, abs=0.05) and last["ess"] < first["ess"]
    assert last["ratio_max"] > 1.28 and last["clip_high"] > 0.0
    assert first["entropy"] == pytest.approx(np.log(11), abs=0.05)
    assert all(m["mismatch_k3"] >= 0 for m in history)


def test_old_logprobs_of_the_trainer_are_reused_when_there_is_one_step():
    """One step: ratio 1 without a forward pass of its own, whatever the sampler said."""
    params, packed = sharp_params(), batch()
    reused, scored = updater(old_logprobs="trainer"), updater(old_logprobs="trainer", epochs=2)
    assert reused.spec.reuse_logp and not reused.spec.scores_old and scored.spec.scores_old
    left, sums = gradient(params, reused, packed)
    at_old = scored.score_old({"params": params}, packed)
    right, other = gradient(params, scored, at_old)
    assert_same(left, right)
    assert_same(sums, other)
    assert float(sums["ratio_max"]) == 1.0
    sampled, bypass = gradient(params, updater(), packed)
    assert float(bypass["ratio_max"]) > 2.0, "the handed log-probabilities are not the policy's"
    assert float(sums["mismatch_k3"]) == pytest.approx(float(bypass["mismatch_k3"]), rel=1e-5)
    assert optax.tree.norm(jax.tree.map(jnp.subtract, left, sampled)) > 1e-2


def test_a_correction_weights_the_loss_once():
    """Token TIS with one step: every token's gradient is min(rho, cap) times what it was."""
    params = sharp_params()
    conf = {"old_logprobs": "trainer", "correction": "token_tis", "correction_high": 1.5}
    packed = batch()
    trainer = updater(**conf)
    logp = np.asarray(trainer.score_old({"params": params}, packed).rows.logp_old)
    rho = np.minimum(np.exp(np.clip(logp - packed.rows.logp_rollout, -20, 20)), 1.5)
    by_hand = packed.rows._replace(weight=(packed.rows.weight * rho).astype(np.float32))
    expected, _ = gradient(params, updater(old_logprobs="trainer"), dataclasses.replace(
        packed, rows=by_hand))  # fmt: skip
    found, sums = gradient(params, trainer, packed)
    assert_same(found, expected)
    valid = packed.rows.response_mask
    over = np.exp(logp - packed.rows.logp_rollout)[valid] > 1.5
    assert float(sums["correction_truncated"]) == over.sum() > 0
    assert float(sums["correction_kept"]) == valid.sum()


def test_case_G13_the_kl_term_reaches_the_loss_and_the_reference_stays():
    params = sharp_params()
    before = jax.tree.map(np.array, params)
    packed = batch(include_dead=True)
    states = {}
    for coef in (0.0, 0.1):
        trainer = updater(kl_coef=coef, lr=1e-2)
        trainer.reference(params)
        scored = trainer.score_reference(packed)
        state, history = trainer.init(params), []
        for _ in range(5):
            state, metrics = trainer.step(state, scored)
            history.append(metrics)
        assert history[0]["kl_k3"] == pytest.approx(0.0, abs=1e-6)
        assert history[0]["kl_k1"] == pytest.approx(0.0, abs=1e-4)
        assert history[-1]["kl_k3"] > 1e-3
        states[coef] = state["params"]
    chex.assert_trees_all_equal(params, before)
    apart = jax.tree.map(jnp.subtract, states[0.0], states[0.1])
    assert optax.tree.norm(apart) > 1e-3
    moved = nudged(params, 0.05)
    free, pulled = updater(), updater(kl_coef=0.1)
    pulled.reference(params)
    rows = pulled.score_reference(packed)
    without, _ = gradient(moved, free, rows)
    with_kl, _ = gradient(moved, pulled, rows)
    assert optax.tree.norm(jax.tree.map(jnp.subtract, without, with_kl)) > 1e-3


def test_reference_must_be_given_before_it_is_scored():
    with pytest.raises(RuntimeError, match="reference comes before"):
        updater().score_reference(batch())


def test_entropy_bonus_raises_the_entropy():
    packed = batch(include_dead=True)
    ends = []
    for coef in (0.0, 0.5):
        trainer = updater(entropy_coef=coef, lr=3e-3)
        state = trainer.init(sharp_params())
        for _ in range(6):
            state, metrics = trainer.step(state, packed)
        ends.append(metrics["entropy"])
    assert ends[1] > ends[0] + 0.05


def test_dual_clip_bounds_the_charge_of_a_bad_token_and_is_counted():
    rare = [completion([3], [-12.0]), completion([4], [-2.0])]
    packed = packed_of([np.array([1, 2])], [rare], [[0.0, 1.0]], 1)
    params = init_params(TINY, 0)
    _, plain = updater().step(updater().init(params), packed)
    _, dual = updater(dual_clip=3.0).step(updater().init(params), packed)
    assert plain["clip_dual"] == 0.0 and dual["clip_dual"] == 0.5
    assert plain["loss"] > 1000 and dual["loss"] < 3.0
    assert dual["grad_norm"] < plain["grad_norm"]


def test_bad_gradient_is_skipped_counted_and_recovered_from():
    trainer, packed = updater(), batch()
    poisoned = packed.rows._replace(advantages=packed.rows.advantages * np.nan)
    bad = dataclasses.replace(packed, rows=poisoned)
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
    assert set(metrics) == set(trainer.step(state, batch())[1])


def test_state_is_donated_but_the_callers_weights_survive():
    trainer, packed = updater(), batch()
    params = sharp_params()
    state = trainer.init(params)
    text = trainer.lower(state, packed).as_text()
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
        packed = packed_of(prompts, completions, rewards, aggregation="seq_mean_token_mean")
        assert packed is not None
        conf = AlgorithmConf(
            lr=1e-3 * (seed + 1), eps_high=0.2 + 0.01 * seed, beta1=0.9 - 0.1 * seed,
            warmup_steps=seed, decay_steps=10 + seed, correction_high=2.0 + seed,
        )  # fmt: skip
        state, _ = Updater(cfg, conf, TEMPERATURE + 0.1 * seed).step(state, packed)
        shapes.add(tuple(x.shape for x in packed.rows))
        live.add(packed.stats["groups_packed"])
    assert len(traces) == len(shapes) <= 3 and live == {1, 2, 3, 4}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_abstract_state_describes_the_state(name):
    trainer = updater(optimizer=name)
    state = trainer.init(sharp_params())
    chex.assert_trees_all_equal_shapes_and_dtypes(state, trainer.abstract_state())
