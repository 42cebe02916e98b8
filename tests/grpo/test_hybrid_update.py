from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from helpers_grpo import packed_of
from helpers_hybrid import HYBRID, hybrid_params

from evojax.config import AlgorithmConf
from evojax.grpo.logprobs import score
from evojax.grpo.update import Updater
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine

TEMPERATURE = 0.8
PROMPTS = [np.array(ids, np.int32) for ids in ([1, 2, 3], [1, 2, 4, 5, 6, 7], [9, 8])]
REWARDS = [[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 0, 0]]


@pytest.fixture(scope="module")
def completions():
    engine = EmbeddedEngine(HYBRID, pad_id=0, max_batch=16)
    engine.load_weights(hybrid_params(), "v0")
    return engine.generate(PROMPTS, SamplingParams(TEMPERATURE, 6, (10,)), 4, [1, 2, 3])


def packed(completions, per_row=2):
    """Nothing is shared: a token's memory is of its own sequence, not of a tree's."""
    found = packed_of(PROMPTS, completions, REWARDS, per_row, share=False)
    assert found is not None
    return found


def test_case_G03_sampler_and_trainer_of_a_hybrid_agree(completions):
    rows = packed(completions).rows
    assert rows.tail.max() > rows.tail.shape[2]  # sequences share lines
    valid = rows.response_mask
    assert valid.sum() == sum(len(c.token_ids) for group in completions for c in group)
    scored = np.asarray(score(hybrid_params(), HYBRID, rows, TEMPERATURE))
    np.testing.assert_allclose(scored[valid], rows.logp_rollout[valid], atol=1e-4)


def test_sampler_and_trainer_of_a_hybrid_stay_close_in_bfloat16():
    half = dataclasses.replace(HYBRID, compute_dtype="bfloat16")
    engine = EmbeddedEngine(half, pad_id=0, max_batch=16)
    engine.load_weights(hybrid_params(), "v0")
    rows = packed(engine.generate(PROMPTS, SamplingParams(1.0, 6, (10,)), 4, [1, 2, 3])).rows
    valid = rows.response_mask
    apart = np.abs(np.asarray(score(hybrid_params(), half, rows, 1.0)) - rows.logp_rollout)[valid]
    assert apart.max() < 0.3 and apart.mean() < 0.05


def test_a_step_lowers_the_loss_of_its_own_batch_and_moves_every_weight(completions):
    trainer = Updater(HYBRID, AlgorithmConf(lr=1e-3), TEMPERATURE)
    batch, state, losses = packed(completions), trainer.init(hybrid_params()), []
    for _ in range(4):
        state, metrics = trainer.step(state, batch)
        losses.append(metrics["loss"])
        assert metrics["skipped"] == 0
    assert losses[1] < losses[0] and losses[3] < losses[1]
    moved = jax.tree.map(
        lambda new, old: bool(np.abs(new - old).max() > 0), state["params"], hybrid_params()
    )
    assert all(jax.tree.leaves(moved))
