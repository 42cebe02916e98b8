"""A hybrid against transformers on a sequence of several chunks (slow, needs torch)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import torch_families

from evojax.policy import cache
from evojax.policy.decoder import hidden_states, lm_logits
from evojax.policy.hf import load_hf

PROMPT, LENGTH = 70, 150  # neither is a multiple of the 64 tokens of a chunk
LIMIT = 2e-4  # of logits up to 3.5; transformers' own float32 is 1e-4 from its float64 here


def largest(got, want) -> float:
    return float(np.abs(np.asarray(got) - want).max())


@pytest.mark.slow
def test_a_long_sequence_at_once_in_two_prefills_and_token_by_token(tmp_path: Path):
    torch_families.build("qwen3_5", tmp_path)
    cfg, params = load_hf(tmp_path)
    ids = np.random.default_rng(0).integers(0, cfg.vocab_size, LENGTH).astype(np.int32)
    (want,) = torch_families.logits(tmp_path, [ids])

    @jax.jit
    def whole(tokens, positions, mask):
        return lm_logits(params, cfg, hidden_states(params, cfg, tokens, positions, mask))

    mask = np.tril(np.ones((1, LENGTH, LENGTH), bool))
    apart = {"at once": largest(whole(ids[None], np.arange(LENGTH)[None], mask)[0], want)}

    layered = cache.unstack(params, cfg)
    prefill = jax.jit(partial(cache.prefill, layered, cfg))
    step = jax.jit(partial(cache.decode_step, layered, cfg))
    logits = jax.jit(partial(lm_logits, layered, cfg))
    _, past = prefill(ids[None, :PROMPT], np.array([PROMPT], np.int32))
    hidden, both = prefill(ids[None, PROMPT : 2 * PROMPT], np.array([PROMPT], np.int32), past)
    apart["two prefills"] = largest(logits(hidden)[0], want[2 * PROMPT - 1])

    own, found = cache.own_cache(cfg, both, 1, 16), []
    for i, token in enumerate(ids[2 * PROMPT :]):
        hidden, own = step(token.reshape(1, 1), np.int32(i), both, own)
        found.append(np.asarray(logits(hidden))[0, 0])
    apart["token by token"] = largest(np.stack(found), want[2 * PROMPT :])
    print(apart)
    assert max(apart.values()) < LIMIT
