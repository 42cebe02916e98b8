from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evojax.rollout.sampling import draw, seed_words, stream_keys

_draw = jax.jit(draw)


def keys(rows: int, seed: int = 0) -> jax.Array:
    return stream_keys(jnp.asarray(seed_words(seed)[None]), jnp.arange(rows))[0]


@pytest.mark.parametrize("size", [5, 256, 700])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprob_and_entropy_match_float64(size, temperature):
    logits = np.random.default_rng(size).normal(0, 4, (6, size)).astype(np.float32)
    drawn = _draw(logits, keys(6), 0, temperature)
    z = logits.astype(np.float64) / temperature
    logp = z - np.log(np.exp(z).sum(1, keepdims=True))
    np.testing.assert_allclose(drawn.logprob, logp[np.arange(6), drawn.token], atol=1e-5)
    np.testing.assert_allclose(drawn.entropy, -(np.exp(logp) * logp).sum(1), atol=1e-5)


def test_frequencies_follow_the_softmax_across_blocks():
    size, rows = 600, 20_000
    logits = np.full(size, -30.0, np.float32)
    hot = {3: 0.0, 255: 1.0, 256: 0.5, 511: -1.0, 599: 1.5}
    for place, value in hot.items():
        logits[place] = value
    drawn = _draw(jnp.broadcast_to(logits, (rows, size)), keys(rows), 2, 1.0)
    share = np.bincount(drawn.token, minlength=size) / rows
    p = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(share - p).max() < 5 * np.sqrt(0.25 / rows)


def test_a_certain_token_has_logprob_and_entropy_zero():
    logits = np.full((3, 40), -200.0, np.float32)
    logits[:, 17] = 0
    drawn = _draw(logits, keys(3), 0, 1.0)
    assert drawn.token.tolist() == [17] * 3
    assert drawn.logprob.tolist() == [0.0] * 3 and drawn.entropy.tolist() == [0.0] * 3


def test_streams_differ_by_seed_sample_and_position():
    logits = np.zeros((4, 1000), np.float32)
    draws = [
        tuple(_draw(logits, keys(4, seed), index, 1.0).token.tolist())
        for seed in (0, 1, 2**32)
        for index in (0, 1)
    ]
    assert len(set(draws)) == 6 and all(len(set(d)) > 1 for d in draws)


def test_negative_and_huge_seeds_are_taken_modulo_two_to_the_64():
    assert seed_words(-1).tolist() == [2**32 - 1, 2**32 - 1]
    assert seed_words(2**64 + 9).tolist() == [0, 9]
