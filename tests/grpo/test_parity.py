from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers_grpo import TINY, packed_of, sharp_params

from evojax.config import AlgorithmConf
from evojax.grpo.logprobs import score
from evojax.grpo.update import Updater
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("old", ["rollout", "trainer"])
def test_case_G03_trainer_and_sampler_agree_before_any_update(temperature, old):
    """Policy, old policy and reference all score at the sampler's temperature."""
    params = sharp_params()
    engine = EmbeddedEngine(TINY, pad_id=0, max_batch=16)
    engine.load_weights(params, "v0")
    prompts = [np.array(ids, np.int32) for ids in ([1, 2, 3], [1, 2, 4, 5], [9, 8])]
    completions = engine.generate(prompts, SamplingParams(temperature, 5, (10,)), 4, [1, 2, 3])
    packed = packed_of(prompts, completions, [[1, 0, 0, 1]] * 3)
    assert packed is not None
    valid = packed.rows.response_mask
    scored = np.asarray(score(params, TINY, packed.rows, temperature))
    np.testing.assert_allclose(scored[valid], packed.rows.logp_rollout[valid], atol=1e-4)
    updater = Updater(TINY, AlgorithmConf(old_logprobs=old, epochs=2), temperature)
    updater.reference(params)
    state = updater.init(params)
    packed = updater.score_reference(packed)
    if updater.spec.scores_old:
        packed = updater.score_old(state, packed)
    _, metrics = updater.step(state, packed)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["mismatch_max"] < 1e-4 and metrics["clip_high"] == metrics["clip_low"] == 0.0
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-4)
    assert abs(metrics["kl_k1"]) < 1e-4 and metrics["kl_k3"] < 1e-6
    entropies = np.concatenate([c.entropies for group in completions for c in group])
    assert metrics["entropy"] == pytest.approx(float(entropies.mean()), abs=1e-3)


def test_sampler_and_trainer_stay_close_in_bfloat16():
    """Weights are rounded alike; the order of sums differs, and rounding makes it visible."""
    params, half = sharp_params(), dataclasses.replace(TINY, compute_dtype="bfloat16")
    engine = EmbeddedEngine(half, pad_id=0, max_batch=16)
    engine.load_weights(params, "v0")
    prompts = [np.array(ids, np.int32) for ids in ([1, 2, 3], [1, 2, 4, 5], [9, 8])]
    completions = engine.generate(prompts, SamplingParams(1.0, 5, (10,)), 8, [1, 2, 3])
    packed = packed_of(prompts, completions, [[1, 0, 0, 1, 1, 1, 0, 0]] * 3)
    assert packed is not None
    valid = packed.rows.response_mask
    apart = np.asarray(score(params, half, packed.rows, 1.0)) - packed.rows.logp_rollout
    assert np.abs(apart[valid]).max() < 0.2 and np.abs(apart[valid]).mean() < 0.03
