"""One update of every family on its own samples: what was rewarded becomes likelier."""

from __future__ import annotations

import numpy as np
import pytest
from family_shapes import SHAPES, family_params

from evojax.config import AlgorithmConf
from evojax.grpo.advantages import RewardTable, estimate
from evojax.grpo.logprobs import score
from evojax.grpo.pack import pack
from evojax.grpo.update import Updater
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_raises_what_was_rewarded_and_sampler_and_trainer_agree(name: str):
    cfg, params = SHAPES[name], family_params(name)
    engine = EmbeddedEngine(cfg, pad_id=0, max_batch=16)
    engine.load_weights(params, "v0")
    prompts = [np.array(ids, np.int32) for ids in ([1, 2, 3, 4], [1, 2, 9], [20, 21, 22, 23, 24])]
    completions = engine.generate(prompts, SamplingParams(1.0, 6, (31,)), 4, [1, 2, 3])
    rewards = np.array([[1.0, 0.0, 0.0, 1.0]] * 3)
    batch = pack(
        prompts,
        completions,
        estimate("grpo", RewardTable(rewards, 1e-6)),
        2,
        aggregation="token_mean",
        horizon=6,
        share=cfg.linear is None,
    )
    assert batch is not None
    rows = batch.rows
    before = np.asarray(score(params, cfg, rows, 1.0))
    valid = rows.response_mask
    np.testing.assert_allclose(before[valid], rows.logp_rollout[valid], atol=1e-4)
    updater = Updater(cfg, AlgorithmConf(lr=1e-3), 1.0)
    state, metrics = updater.step(updater.init(params), batch)
    assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0
    after = np.asarray(score(state["params"], cfg, rows, 1.0))
    assert ((after - before) * rows.advantages * rows.weight)[valid].sum() > 0
