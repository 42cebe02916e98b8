from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_hybrid import HYBRID, hybrid_params

from evojax.policy import cache, decoder
from evojax.policy.decoder import ModelConfig

CFG = ModelConfig(20, 16, 24, 2, 4, 2, 4, 10000.0, 1e-5, 64)
HALF = dataclasses.replace(CFG, compute_dtype="bfloat16")
HALF_HYBRID = dataclasses.replace(HYBRID, compute_dtype="bfloat16")
PARAMS = jax.tree.map(lambda a: a * 6, decoder.init_params(CFG, 0))
LAYERED = cache.unstack(PARAMS, CFG)
prefill = jax.jit(cache.prefill, static_argnames="cfg")
decode = jax.jit(cache.decode_step, static_argnames="cfg")


def params(cfg: ModelConfig):
    return hybrid_params() if cfg.linear else PARAMS


@partial(jax.jit, static_argnames="cfg")
def full(tokens: jax.Array, cfg: ModelConfig) -> jax.Array:
    size = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, size, size), bool))
    return decoder.hidden_states(params(cfg), cfg, tokens, jnp.arange(size)[None], mask)


RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 20, (2, 12)).astype(np.int32)
LENGTHS = np.array([12, 7], np.int32)


@pytest.mark.parametrize(
    ("cfg", "median", "most"),
    [
        (CFG, 1e-6, 1e-5),
        (HALF, 0.02, 0.15),
        (HYBRID, 2e-6, 2e-5),
        (HALF_HYBRID, 0.02, 0.15),
    ],
)
def test_prefill_and_cached_steps_equal_the_full_forward_pass(cfg, median, most):
    layered = cache.unstack(params(cfg), cfg)
    sampled = RNG.integers(0, 20, (2, 3, 5)).astype(np.int32)  # two prompts, three samples each
    hidden, prompt = prefill(layered, cfg=cfg, tokens=TOKENS, lengths=LENGTHS)
    own = cache.own_cache(cfg, prompt, 3, 8)
    got = [np.broadcast_to(np.asarray(hidden)[:, None], (2, 3, 16))]
    for t in range(5):
        step, own = decode(
            layered, cfg=cfg, tokens=sampled[:, :, t], index=np.int32(t), prompt=prompt, own=own
        )
        got.append(np.asarray(step))
    apart = []
    for p in range(2):
        for s in range(3):
            row = np.zeros(20, np.int32)
            text = np.concatenate([TOKENS[p, : LENGTHS[p]], sampled[p, s]])
            row[: len(text)] = text
            want = np.asarray(full(row[None], cfg))[0, LENGTHS[p] - 1 : len(text)]
            found = np.stack([g[p, s] for g in got])
            apart.append(np.linalg.norm(found - want, axis=1) / np.linalg.norm(want, axis=1))
    assert np.median(apart) < median and np.max(apart) < most


@pytest.mark.parametrize("cfg", [CFG, HYBRID])
def test_prefill_in_two_parts_equals_prefill_at_once(cfg):
    layered = cache.unstack(params(cfg), cfg)
    whole, at_once = prefill(layered, cfg=cfg, tokens=TOKENS, lengths=LENGTHS)
    first = np.where(np.arange(8) < 5, TOKENS[:, :8], 0).astype(np.int32)  # five tokens, padded
    _, past = prefill(layered, cfg=cfg, tokens=first, lengths=np.full(2, 5, np.int32))
    past = cache.gather(past, jnp.array([0, 1]))
    rest = np.zeros((2, 8), np.int32)
    rest[:, :7] = TOKENS[:, 5:]
    hidden, joined = prefill(layered, cfg=cfg, tokens=rest, lengths=LENGTHS - 5, past=past)
    np.testing.assert_allclose(hidden, whole, atol=2e-5)
    assert joined.lengths.tolist() == [12, 7]
    assert joined.valid.sum(1).tolist() == [12, 7]
    if cfg.linear:
        for ours, theirs in zip(joined.layers[0], at_once.layers[0], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_prompts_without_tokens_and_padding_leave_a_memory_empty_or_as_it_was():
    layered = cache.unstack(hybrid_params(), HYBRID)
    run = partial(prefill, layered, cfg=HYBRID)
    _, nothing = run(tokens=TOKENS, lengths=np.array([0, 5], np.int32))
    assert not any(np.asarray(x)[0].any() for x in nothing.layers[0])
    other = np.where(np.arange(12) < 5, TOKENS, 9)
    _, same = run(tokens=other, lengths=np.array([0, 5], np.int32))
    jax.tree.map(np.testing.assert_array_equal, same.layers[0], nothing.layers[0])
    _, same = run(tokens=TOKENS, lengths=np.zeros(2, np.int32), past=nothing)
    jax.tree.map(np.testing.assert_array_equal, same.layers[0], nothing.layers[0])


def test_unstacked_weights_are_copies():
    assert len(LAYERED["layers"]) == 2
    np.testing.assert_array_equal(LAYERED["layers"][1]["q"], PARAMS["layers"]["q"][1])
    weights = jax.tree.map(jnp.copy, PARAMS)
    copy = jax.jit(partial(cache.unstack, cfg=CFG))(weights)
    for leaf in jax.tree.leaves(weights):
        leaf.delete()
    np.testing.assert_array_equal(copy["embed"], PARAMS["embed"])
