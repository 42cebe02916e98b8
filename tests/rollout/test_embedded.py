from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evojax.errors import InputError
from evojax.policy import decoder
from evojax.policy.decoder import ModelConfig
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine

CFG = ModelConfig(40, 16, 24, 2, 4, 2, 4, 10000.0, 1e-5, 256)
PARAMS = jax.tree.map(lambda a: a * 6, decoder.init_params(CFG, 0))  # sharper than at the start
PAD = 7


@pytest.fixture(scope="module")
def engine() -> EmbeddedEngine:
    made = EmbeddedEngine(CFG, pad_id=PAD, max_batch=16)
    made.load_weights(PARAMS, "v1")
    return made


def prompts(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 40, n).astype(np.int32) for n in lengths]


def family(count: int, seed: int = 0) -> list[np.ndarray]:
    """Prompts that share their first 40 tokens."""
    head = prompts(40, seed=seed)[0]
    return [np.concatenate([head, tail]) for tail in prompts(*range(2, 2 + count), seed=seed + 1)]


@partial(jax.jit, static_argnames="width")
def _score(tokens: jax.Array, temperature: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    positions = jnp.arange(width)[None]
    mask = jnp.tril(jnp.ones((1, width, width), bool))
    hidden = decoder.hidden_states(PARAMS, CFG, tokens, positions, mask)
    logp = jax.nn.log_softmax(decoder.lm_logits(PARAMS, CFG, hidden)[0] / temperature)
    return logp, -jnp.sum(jnp.exp(logp) * logp, -1)


def score(prompt, ids, temperature):
    """The trainer's view of a completion: one full forward pass, no cache."""
    tokens = np.zeros(96, np.int32)
    tokens[: len(prompt) + len(ids)] = np.concatenate([prompt, ids])
    logp, entropy = _score(tokens[None], temperature, 96)
    at = np.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
    return np.asarray(logp)[at, ids], np.asarray(entropy)[at]


def same(left, right, atol=2e-5):
    for row, other in zip(left, right, strict=True):
        for a, b in zip(row, other, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)
            np.testing.assert_allclose(a.entropies, b.entropies, atol=atol)
            assert a.finish_reason == b.finish_reason


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_case_G03_engine_and_trainer_agree_on_logprobs_and_entropy(engine, temperature):
    texts = family(3) + prompts(5, 30)
    rows = engine.generate(texts, SamplingParams(temperature, 7, (3,)), 3, range(5))
    for prompt, row in zip(texts, rows, strict=True):
        for c in row:
            logp, entropy = score(prompt, c.token_ids, temperature)
            np.testing.assert_allclose(c.logprobs, logp, atol=1e-4)
            np.testing.assert_allclose(c.entropies, entropy, atol=1e-4)
            assert c.logprobs.max() <= 0 and c.logprobs.dtype == np.float32


def test_completions_depend_on_seed_alone_whatever_shares_the_batch(engine):
    sampling = SamplingParams(1.0, 6, (3,))
    texts, seeds = family(3) + prompts(9), [11, 12, 13, 2**40 + 3]
    together = engine.generate(texts, sampling, 4, seeds)
    alone = [engine.generate([t], sampling, 4, [s])[0] for t, s in zip(texts, seeds, strict=True)]
    same(together, alone)
    same(together, engine.generate(texts, sampling, 4, seeds), atol=0)
    backwards = engine.generate(texts[::-1], sampling, 4, seeds[::-1])
    same(together, backwards[::-1])


def test_seeds_and_samples_are_separate_streams(engine):
    text = prompts(12)[0]
    rows = engine.generate([text] * 3, SamplingParams(1.0, 8, ()), 4, [1, 2, 2**32 + 1])
    streams = {tuple(c.token_ids) for row in rows for c in row}
    assert len(streams) == 12


def test_shared_prefixes_save_prefill_and_change_nothing(engine):
    texts, sampling = family(8), SamplingParams(1.0, 4, ())
    before = engine.health()["prefill_tokens"]
    shared = engine.generate(texts, sampling, 2, range(8))
    used = engine.health()["prefill_tokens"] - before
    assert used == 64 + 8 * 16  # one prefix bucket and eight rests, not 8 x 64
    alone = [engine.generate([t], sampling, 2, [i])[0] for i, t in enumerate(texts)]
    same(shared, alone)


def test_more_samples_than_rows_and_more_prompts_than_fit(engine):
    text, sampling = prompts(6)[0], SamplingParams(1.0, 3, ())
    many = engine.generate([text], sampling, 20, [5])[0]
    assert len(many) == 20
    same([many[:4]], engine.generate([text], sampling, 4, [5]))
    rows = engine.generate(prompts(*range(3, 14)), sampling, 4, range(11))
    assert [len(r) for r in rows] == [4] * 11


def test_case_G09_several_stop_ids_one_equal_to_pad(engine):
    stops = (PAD, 1, 22)
    rows = engine.generate(prompts(8, 8), SamplingParams(1.3, 24, stops), 8, [3, 4])
    seen, reasons = set(), set()
    for c in (c for row in rows for c in row):
        reasons.add(c.finish_reason)
        assert not set(c.token_ids[:-1]) & set(stops)
        if c.finish_reason == "stop":
            seen.add(int(c.token_ids[-1]))
        else:  # truncated: full budget, no stop id appended
            assert len(c.token_ids) == 24 and int(c.token_ids[-1]) not in stops
        assert len(c.token_ids) == len(c.logprobs) == len(c.entropies)
    assert PAD in seen and len(seen) > 1, "the seeds above must reach several stop ids"
    assert "stop" in reasons


def test_sampled_frequencies_follow_the_softmax(engine):
    text = prompts(4)[0]
    rows = engine.generate([text] * 40, SamplingParams(1.3, 1, ()), 16, range(40))
    counts = np.bincount([int(c.token_ids[0]) for r in rows for c in r], minlength=40)
    logp, _ = score(text, np.arange(1), 1.3)
    full = np.asarray(_score(np.pad(text, (0, 92))[None], 1.3, 96)[0])[3]
    expected = np.exp(full) * 640
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())


def test_traces_are_bounded_by_buckets_and_new_weights_do_not_retrace():
    made = EmbeddedEngine(CFG, PAD, max_batch=8)
    made.load_weights(PARAMS, "a")
    sampling = SamplingParams(1.0, 3, (1,))
    for length in range(17, 33):  # one length bucket
        made.generate(prompts(length, length - 1, seed=length), sampling, 2, [0, 1])
    assert made.health()["traces"] == 1
    made.generate(prompts(20, 21), SamplingParams(0.7, 5, (2, 4)), 2, [0, 1])
    other = jax.tree.map(lambda a: a * 0.5, PARAMS)
    made.load_weights(other, "b")
    rows = made.generate(prompts(20, 21), sampling, 2, [0, 1])
    assert made.health()["traces"] == 1
    assert rows[0][0].policy_version == "b" == made.health()["version"]


def test_donating_the_trainers_weights_leaves_the_engine_whole():
    made = EmbeddedEngine(CFG, PAD, max_batch=4)
    weights = jax.tree.map(jnp.copy, PARAMS)
    made.load_weights(weights, "a")
    step = jax.jit(lambda p: jax.tree.map(lambda a: a * 0, p), donate_argnums=0)
    jax.block_until_ready(step(weights))
    sampling = SamplingParams(1.0, 4, ())
    mine = made.generate(prompts(5), sampling, 2, [0])
    other = EmbeddedEngine(CFG, PAD, max_batch=4)
    other.load_weights(PARAMS, "a")
    same(mine, other.generate(prompts(5), sampling, 2, [0]), atol=0)


def test_broken_weights_abort_and_are_counted():
    made = EmbeddedEngine(CFG, PAD, max_batch=4)
    made.load_weights(jax.tree.map(lambda a: a * jnp.nan, PARAMS), "nan")
    row = made.generate(prompts(5), SamplingParams(1.0, 3, ()), 2, [0])[0]
    assert [c.finish_reason for c in row] == ["abort", "abort"]
    assert [len(c.token_ids) for c in row] == [0, 0]
    assert made.health()["aborted"] == 2


def test_every_problem_is_listed_at_once(engine):
    texts = [np.zeros(0, np.int32), np.zeros(250, np.int32), np.array([40], np.int32)]
    with pytest.raises(InputError) as caught:
        engine.generate(texts, SamplingParams(0.0, 8, (99,)), 0, [1])
    where = [p.where for p in caught.value.problems]
    assert where == [
        "temperature",
        "samples per prompt",
        "seeds",
        "stop_token_ids",
        "prompt 0",
        "prompt 1",
        "prompt 2",
    ]
    assert engine.generate([], SamplingParams(1.0, 8, ()), 2, []) == []


def test_health_counts_what_was_done():
    made = EmbeddedEngine(CFG, PAD, max_batch=8)
    made.load_weights(PARAMS, "v")
    rows = made.generate(prompts(5, 9), SamplingParams(1.0, 4, ()), 3, [0, 1])
    health = made.health()
    assert health["prompts"] == 2 and health["completions"] == 6 and health["calls"] == 1
    assert health["prompt_tokens"] == 14 and health["prefill_tokens"] == 2 * 16
    assert health["sampled_tokens"] == 24 == sum(len(c.token_ids) for r in rows for c in r)
    assert health["seconds_generate"] == health["seconds_tracing"] > 0
