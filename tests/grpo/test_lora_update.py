from __future__ import annotations

import dataclasses

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_grpo import TINY, packed_of, random_batch, sharp_params

from evojax.config import AlgorithmConf, LoraConf
from evojax.grpo.gradient import batch_gradient
from evojax.grpo.update import Updater
from evojax.policy.decoder import init_params
from evojax.policy.lora import init_adapters, merge, scale_of
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine

LORA = LoraConf(rank=2, alpha=6.0, targets=["q", "k", "v", "o", "gate", "up", "down"])
TEMPERATURE = 0.8

gradient_of = jax.jit(batch_gradient, static_argnames=("cfg", "spec"))


def made(lora=LORA, cfg=TINY, **changes):
    """An updater over frozen sharp weights, and adapters that change them somewhat."""
    conf = dataclasses.replace(AlgorithmConf(lr=1e-2), **changes)
    trainer = Updater(cfg, conf, TEMPERATURE, lora=lora)
    trainer.freeze(sharp_params())
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda a: a + 0.05 * jnp.asarray(rng.normal(size=a.shape), a.dtype),
        init_adapters(sharp_params(), lora, 0),
    )
    return trainer, adapters


def batch(**options):
    packed = packed_of(*random_batch(5), **options)
    assert packed is not None
    return packed


def test_adapters_get_the_gradient_of_the_whole_weights_by_the_chain_rule():
    trainer, adapters = made(entropy_coef=0.1)
    packed, spec, hyper = batch(include_dead=True), trainer.spec, trainer.hyper
    base = sharp_params()
    found, sums = gradient_of(adapters, TINY, spec, hyper, packed.rows, base)
    merged = merge(base, adapters, scale_of(LORA))
    plain = dataclasses.replace(spec, lora_scale=None)
    full, other = gradient_of(merged, TINY, plain, hyper, packed.rows)
    np.testing.assert_allclose(sums["loss"], other["loss"], rtol=1e-5)
    for name, pair in adapters["layers"].items():
        whole = np.asarray(full["layers"][name], np.float64)
        a, b = (np.asarray(pair[part], np.float64) for part in ("a", "b"))
        for part, wanted in (
            ("a", 3.0 * whole @ b.swapaxes(1, 2)),
            ("b", 3.0 * a.swapaxes(1, 2) @ whole),
        ):
            ours = found["layers"][name][part]
            np.testing.assert_allclose(ours, wanted, atol=1e-4 * np.abs(wanted).max())


def test_steps_lower_the_loss_and_leave_the_frozen_weights_as_they_are():
    base = init_params(TINY, 1)
    before = jax.tree.map(np.array, base)
    trainer = Updater(TINY, AlgorithmConf(lr=1e-2), TEMPERATURE, lora=LORA)
    trainer.freeze(base)
    adapters = init_adapters(base, LORA, 0)
    state = trainer.init(adapters)
    packed = trainer.score_old(state, batch())
    first = trainer.step(trainer.init(adapters), packed)[1]["loss"]
    for _ in range(8):
        state, metrics = trainer.step(state, packed)
    assert metrics["loss"] < first - 0.01
    chex.assert_trees_all_equal(base, before)
    assert jax.tree.structure(state["params"]) == jax.tree.structure(adapters)
    held = sum(leaf.size for leaf in jax.tree.leaves(state["opt_state"]))
    assert held < 2 * sum(leaf.size for leaf in jax.tree.leaves(adapters)) + 8
    after = trainer.weights(state)
    for name in LORA.targets:
        assert not np.array_equal(after["layers"][name], before["layers"][name])
    for name in ("attn_norm", "mlp_norm"):
        np.testing.assert_array_equal(after["layers"][name], before["layers"][name])
    np.testing.assert_array_equal(after["embed"], before["embed"])


def test_fresh_adapters_score_as_the_base_and_are_their_own_reference():
    trainer, _ = made(kl_coef=0.2)
    fresh = init_adapters(sharp_params(), LORA, 0)
    trainer.reference(fresh)
    packed = trainer.score_reference(batch(include_dead=True))
    plain = Updater(TINY, AlgorithmConf(), TEMPERATURE)
    plain.reference(sharp_params())
    wanted = plain.score_reference(batch(include_dead=True))
    np.testing.assert_array_equal(packed.rows.logp_ref, wanted.rows.logp_ref)
    state, first = trainer.step(trainer.init(fresh), packed)
    _, second = trainer.step(state, packed)
    assert abs(first["kl_k3"]) < 1e-9 < second["kl_k3"]


def test_the_sampler_of_merged_weights_agrees_with_the_trainer():
    trainer, adapters = made()
    state = trainer.init(adapters)
    engine = EmbeddedEngine(TINY, pad_id=0, max_batch=16)
    engine.load_weights(trainer.weights(state), "v0")
    prompts = [np.array([1, 4, 2], np.int32), np.array([3, 5], np.int32)]
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=4, stop_token_ids=(0,))
    completions = engine.generate(prompts, sampling, 3, [1, 2])
    packed = packed_of(prompts, completions, [[1, 0, 0], [0, 1, 0]])
    assert packed is not None
    scored = trainer.score_old(state, packed).rows
    mask = np.asarray(packed.rows.response_mask)
    difference = np.abs(np.asarray(scored.logp_old) - packed.rows.logp_rollout)[mask]
    assert difference.max() < 1e-4


def test_bfloat16_products_give_about_the_same_gradient():
    trainer, adapters = made()
    packed, half = batch(), dataclasses.replace(TINY, compute_dtype="bfloat16")
    exact, found = (
        gradient_of(adapters, cfg, trainer.spec, trainer.hyper, packed.rows, sharp_params())[0]
        for cfg in (TINY, half)
    )
    ours, wanted = (jax.flatten_util.ravel_pytree(tree)[0] for tree in (found, exact))
    cosine = jnp.vdot(ours, wanted) / jnp.linalg.norm(ours) / jnp.linalg.norm(wanted)
    assert float(cosine) > 0.99


def test_the_update_donates_its_state_and_nothing_of_the_base():
    trainer, adapters = made()
    packed = batch()
    state = trainer.init(adapters)
    program = trainer.lower(trainer.abstract_state(), packed).compile()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert program.memory_analysis().alias_size_in_bytes >= held
    trainer.step(state, packed)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(sharp_params()))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state["params"]))


def test_adapters_without_anything_frozen_are_a_mistake():
    trainer = Updater(TINY, AlgorithmConf(), TEMPERATURE, lora=LORA)
    state = trainer.init(init_adapters(sharp_params(), LORA, 0))
    with pytest.raises(RuntimeError, match="freeze comes before"):
        trainer.step(state, batch())
    off = Updater(TINY, AlgorithmConf(), TEMPERATURE, lora=LoraConf())
    assert off.lora is None and off.spec.lora_scale is None
