from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from evojax.policy import cache, decoder
from evojax.policy.decoder import ModelConfig

CFG = ModelConfig(20, 16, 24, 2, 4, 2, 4, 10000.0, 1e-5, 64)
PARAMS = jax.tree.map(lambda a: a * 6, decoder.init_params(CFG, 0))
LAYERED = cache.unstack(PARAMS, CFG)
prefill = jax.jit(partial(cache.prefill, cfg=CFG))
decode = jax.jit(partial(cache.decode_step, cfg=CFG))


@jax.jit
def full(tokens: jax.Array) -> jax.Array:
    size = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, size, size), bool))
    return decoder.hidden_states(PARAMS, CFG, tokens, jnp.arange(size)[None], mask)


RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 20, (2, 12)).astype(np.int32)
LENGTHS = np.array([12, 7], np.int32)


def test_prefill_and_cached_steps_equal_the_full_forward_pass():
    sampled = RNG.integers(0, 20, (2, 3, 5)).astype(np.int32)  # two prompts, three samples each
    hidden, prompt = prefill(LAYERED, tokens=TOKENS, lengths=LENGTHS)
    own = cache.empty_cache(CFG, 2, 3, 8)
    got = [np.broadcast_to(np.asarray(hidden)[:, None], (2, 3, 16))]
    for t in range(5):
        step, own = decode(
            LAYERED, tokens=sampled[:, :, t], index=np.int32(t), prompt=prompt, own=own
        )
        got.append(np.asarray(step))
    for p in range(2):
        for s in range(3):
            row = np.zeros(20, np.int32)
            text = np.concatenate([TOKENS[p, : LENGTHS[p]], sampled[p, s]])
            row[: len(text)] = text
            want = np.asarray(full(row[None]))[0, LENGTHS[p] - 1 : len(text)]
            np.testing.assert_allclose(np.stack([g[p, s] for g in got]), want, atol=2e-5)


def test_prefill_in_two_parts_equals_prefill_at_once():
    whole, _ = prefill(LAYERED, tokens=TOKENS, lengths=LENGTHS)
    first = np.where(np.arange(8) < 5, TOKENS[:, :8], 0).astype(np.int32)  # five tokens, padded
    _, past = prefill(LAYERED, tokens=first, lengths=np.full(2, 5, np.int32))
    past = cache.gather(past, jnp.array([0, 1]))
    rest = np.zeros((2, 8), np.int32)
    rest[:, :7] = TOKENS[:, 5:]
    hidden, joined = prefill(LAYERED, tokens=rest, lengths=LENGTHS - 5, past=past)
    np.testing.assert_allclose(hidden, whole, atol=2e-5)
    assert joined.lengths.tolist() == [12, 7]
    assert joined.valid.sum(1).tolist() == [12, 7]


def test_unstacked_weights_are_copies():
    assert len(LAYERED["layers"]) == 2
    np.testing.assert_array_equal(LAYERED["layers"][1]["q"], PARAMS["layers"]["q"][1])
    weights = jax.tree.map(jnp.copy, PARAMS)
    copy = jax.jit(partial(cache.unstack, cfg=CFG))(weights)
    for leaf in jax.tree.leaves(weights):
        leaf.delete()
    np.testing.assert_array_equal(copy["embed"], PARAMS["embed"])
