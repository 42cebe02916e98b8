from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_hybrid import HYBRID, hybrid_params

from evojax.policy.decoder import hidden_states, lm_logits
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine

WIDTH = 96
RNG = np.random.default_rng(0)
HEAD = RNG.integers(0, 20, 60)
TAILS = [RNG.integers(0, 20, n).astype(np.int32) for n in range(2, 8)]
TEXTS = [*(np.concatenate([HEAD, tail]).astype(np.int32) for tail in TAILS), TAILS[3], TAILS[0]]


@pytest.fixture(scope="module")
def engine() -> EmbeddedEngine:
    made = EmbeddedEngine(HYBRID, pad_id=0, max_batch=24)
    made.load_weights(hybrid_params(), "v1")
    return made


@jax.jit
def _logprobs(tokens, temperature):
    mask = jnp.tril(jnp.ones((1, WIDTH, WIDTH), bool))
    hidden = hidden_states(hybrid_params(), HYBRID, tokens[None], jnp.arange(WIDTH)[None], mask)
    return jax.nn.log_softmax(lm_logits(hybrid_params(), HYBRID, hidden)[0] / temperature)


def score(prompt, ids, temperature):
    """One full forward pass over prompt and completion, no cache."""
    tokens = np.zeros(WIDTH, np.int32)
    tokens[: len(prompt) + len(ids)] = np.concatenate([prompt, ids])
    at = np.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
    return np.asarray(_logprobs(tokens, temperature))[at, ids]


def test_case_G03_samples_from_a_shared_prefix_score_what_one_pass_gives(engine):
    assert engine._plan(TEXTS, 3)[0] is not None  # the prefix is run once
    rows = engine.generate(TEXTS, SamplingParams(1.3, 7, (3,)), 3, range(8))
    for prompt, row in zip(TEXTS, rows, strict=True):
        for c in row:
            np.testing.assert_allclose(c.logprobs, score(prompt, c.token_ids, 1.3), atol=1e-4)


def test_a_hybrid_completes_a_prompt_alike_whatever_shares_the_batch(engine):
    sampling = SamplingParams(1.3, 7, (3,))
    together = engine.generate(TEXTS, sampling, 3, range(8))
    for i in (0, 7):
        (alone,) = engine.generate([TEXTS[i]], sampling, 3, [i])
        for ours, theirs in zip(alone, together[i], strict=True):
            np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=5e-5)
