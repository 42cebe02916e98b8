"""Epochs, minibatches and the row they become."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

from evojax.config import AlgorithmConf, EvojaxConf
from evojax.evidence.types import Completion, Grade, Item, Trajectory
from evojax.evidence.writer import EvidenceWriter
from evojax.grpo.filters import FilterState
from evojax.grpo.update import Updater
from evojax.policy.decoder import ModelConfig, init_params
from evojax.training.collect import Group, StepRollouts
from evojax.training.row import policy_age, update_row, useful_tokens
from evojax.training.signal import judge
from evojax.training.steps import BatchUpdate, measures_kl, merged

TINY = ModelConfig(
    vocab_size=7, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=4, rope_theta=10000.0, rms_eps=1e-5, max_position=64,
)  # fmt: skip


def config(**changes) -> EvojaxConf:
    cfg = EvojaxConf(experiment="test")
    cfg.sampling.max_new_tokens = 4
    cfg.algorithm = dataclasses.replace(AlgorithmConf(lr=1e-2), **changes)
    return cfg


def rollouts(cfg, rewards, sampled_at=3, seed=0) -> StepRollouts:
    """One group per row of ``rewards``; log-probabilities are those of a uniform policy."""
    rng = np.random.default_rng(seed)
    groups = []
    for g, row in enumerate(rewards):
        item = Item(f"i{g}", "t", "p", "a", "train", "line")
        prompt = np.array([g % 7, 1], np.int32)
        samples = []
        for s, reward in enumerate(row):
            n = int(rng.integers(1, 5))
            done = Completion(
                rng.integers(0, 7, n).astype(np.int32), np.full(n, -math.log(7), np.float32),
                np.full(n, math.log(7), np.float32), "stop", f"v001@{sampled_at}",
            )  # fmt: skip
            grade = Grade("correct" if reward else "wrong")
            components = {"correct": float(reward)}
            samples.append(
                Trajectory(item, prompt, done, "", grade, float(reward), 3, g, s, 0, components)
            )
        groups.append(Group(item, samples))
    signal = judge([g.trajectories for g in groups], cfg, FilterState())
    for g, group in enumerate(groups):
        group.trajectories = [
            dataclasses.replace(
                t,
                advantage=float(signal.advantages.advantages[g, s]),
                kept=bool(signal.advantages.weight[g, s]),
            )
            for s, t in enumerate(group.trajectories)
        ]
    return StepRollouts(groups, signal, 0, 0.5, 0.25)


REWARDS = [[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0], [1, 0, 1]]


def run(cfg, drawn, params=None, measure=False):
    updater = Updater(TINY, cfg.algorithm, 1.0)
    params = init_params(TINY, 0) if params is None else params
    updater.reference(params)
    state, metrics = BatchUpdate(updater, cfg).run(updater.init(params), drawn, 3, measure)
    return state, metrics


def test_one_step_by_default_and_as_many_as_asked_for():
    for changes, steps in (({}, 1), ({"epochs": 2}, 2), ({"epochs": 2, "minibatches": 2}, 4)):
        cfg = config(**changes)
        state, metrics = run(cfg, rollouts(cfg, REWARDS))
        assert int(state["step"]) == steps == metrics["optimizer_steps"]
        assert metrics["skipped_steps"] == metrics["no_signal"] == 0


def test_later_steps_move_away_from_the_sampler_but_the_mismatch_is_that_of_sampling():
    one, many = config(lr=0.1), config(lr=0.1, epochs=3)
    _, first = run(one, rollouts(one, REWARDS))
    _, last = run(many, rollouts(many, REWARDS))
    for name in ("mismatch_k1", "mismatch_k3", "mismatch_max", "ess"):
        assert last[name] == pytest.approx(first[name], rel=1e-6)
    assert first["clip_high"] == 0.0 and last["clip_high"] > 0.0
    assert last["ratio_max"] > first["ratio_max"]


def test_every_minibatch_is_scored_at_the_weights_that_sampled():
    """With old_logprobs=trainer the first step's ratio is 1, and later ones are against it."""
    cfg = config(old_logprobs="trainer", minibatches=2, lr=0.1)
    params = jax.tree.map(lambda p: p * 12 if p.ndim == 3 else p, init_params(TINY, 0))
    _, metrics = run(cfg, rollouts(cfg, REWARDS), params)
    full = config(old_logprobs="trainer")
    _, alone = run(full, rollouts(full, REWARDS), params)
    assert metrics["mismatch_max"] == pytest.approx(alone["mismatch_max"], rel=1e-5)
    assert metrics["mismatch_k3"] == pytest.approx(alone["mismatch_k3"], rel=1e-4)
    assert alone["ratio_max"] == 1.0 and metrics["ratio_max"] > 1.0


def test_order_of_minibatches_is_seeded_by_the_step():
    cfg = config(minibatches=2)
    drawn = rollouts(cfg, REWARDS)
    first, _ = run(cfg, drawn)
    again, _ = run(cfg, drawn)
    jax.tree.map(np.testing.assert_array_equal, first["params"], again["params"])
    cfg.seed = 1
    other, _ = run(cfg, drawn)
    assert not np.array_equal(first["params"]["embed"], other["params"]["embed"])


def test_kl_is_measured_when_it_is_due_and_else_is_not_a_number():
    cfg = config(lr=0.1, epochs=2)
    _, measured = run(cfg, rollouts(cfg, REWARDS), measure=True)
    assert measured["kl_k3"] > 0 and np.isfinite(measured["kl_k1"])
    _, plain = run(cfg, rollouts(cfg, REWARDS))
    assert np.isnan(plain["kl_k3"]) and np.isnan(plain["kl_k1"])
    always = AlgorithmConf(kl_coef=0.1, kl_every=4)
    assert all(measures_kl(always, n, 9) for n in range(9))


def test_a_kl_term_trains_on_dead_groups_too():
    cfg = config(kl_coef=0.1)
    _, metrics = run(cfg, rollouts(cfg, [[1, 1, 1], [0, 0, 0]]), measure=True)
    assert metrics["no_signal"] == 0 and metrics["optimizer_steps"] == 1
    plain = config()
    state, metrics = run(plain, rollouts(plain, [[1, 1, 1], [0, 0, 0]]))
    assert metrics["no_signal"] == 1 and metrics["optimizer_steps"] == 0
    assert np.isnan(metrics["loss"]) and metrics["tokens_packed"] == 0
    assert int(state["no_signal"]) == 1 and int(state["step"]) == 0


def step_metrics(**changes):
    names = ("loss", "ratio_mean", "entropy", "clip_high", "clip_low", "clip_dual")
    names += ("correction_kept", "correction_truncated", "kl_k1", "kl_k3")
    names += ("mismatch_k1", "mismatch_k3", "mismatch_max", "ess", "ratio_max")
    base = dict.fromkeys(names, 0.0) | {"tokens": 10.0, "grad_norm": 1.0, "lr": 0.1}
    return base | {"skipped": 0.0, "nonfinite_consecutive": 0.0, "no_signal": 0.0} | changes


def test_rows_of_several_steps_by_hand():
    nan = float("nan")
    steps = [
        step_metrics(tokens=10.0, loss=1.0, ratio_max=1.1, grad_norm=1.0, mismatch_k3=0.25, lr=0.1),
        step_metrics(
            tokens=30.0, loss=nan, ratio_max=nan, grad_norm=nan, skipped=1.0,
            nonfinite_consecutive=1.0,
        ),
        step_metrics(tokens=30.0, loss=3.0, ratio_max=1.5, grad_norm=3.0, mismatch_k3=4.0, lr=0.3),
    ]  # fmt: skip
    row = merged(steps, at_sampling=1)
    assert row["loss"] == (10 * 1 + 30 * 3) / 40
    assert row["ratio_max"] == 1.5 and row["grad_norm"] == 2.0 and row["lr"] == 0.3
    assert row["mismatch_k3"] == 0.25
    assert row["skipped_steps"] == 1 and row["optimizer_steps"] == 2
    assert row["nonfinite_consecutive"] == 1 and row["no_signal"] == 0
    assert merged(steps, at_sampling=3)["mismatch_k3"] == (10 * 0.25 + 30 * 4) / 40


def test_policy_age_is_the_steps_since_sampling():
    cfg = config()
    now = rollouts(cfg, REWARDS, sampled_at=3)
    assert policy_age((t.completion for t in now.trajectories), 3) == (0.0, 0.0)
    assert policy_age((t.completion for t in now.trajectories), 5) == (2.0, 2.0)
    assert math.isnan(policy_age([], 3)[0])


def test_the_row_fits_the_evidence_and_counts_useful_tokens(tmp_path):
    cfg = config()
    drawn = rollouts(cfg, REWARDS)
    _, metrics = run(cfg, drawn)
    row = update_row(drawn, metrics, {"update_s": 1.0, "sync_s": 0.1}, 3)
    EvidenceWriter(tmp_path, "run", "v001").update(row)
    live = [t for t in drawn.trajectories if t.group != 2]
    assert row["useful_tokens"] == useful_tokens(drawn)
    assert row["useful_tokens"] == sum(len(t.completion.token_ids) for t in live)
    assert row["dead_groups"] == 1 and row["live_groups"] == 4 and row["drawn_groups"] == 5
    assert row["tokens_packed"] <= row["tokens_padded"] and row["peak_rss_mb"] > 50
    assert row["rollout_s"] == 0.5 and row["reward_s"] == 0.25 and row["skipped"] is False
