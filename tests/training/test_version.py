"""Training a version with the real engine: exact resume, skipped updates, what is recorded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from evojax.config import EvojaxConf
from evojax.domains.base import load_domain
from evojax.errors import Interrupted, TrainingFailed
from evojax.evidence.reader import load
from evojax.grpo.filters import FilterState
from evojax.policy.decoder import ModelConfig, init_params
from evojax.policy.tokenizer import CharTokenizer
from evojax.report.live import LiveView
from evojax.rollout.embedded import EmbeddedEngine
from evojax.training import steps
from evojax.training.collect import Sampler
from evojax.training.interrupt import InterruptGuard
from evojax.training.selection import ItemStats
from evojax.training.version import Arm, VersionTrainer

TINY = ModelConfig(
    vocab_size=16, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, rope_theta=10000.0, rms_eps=1e-5, max_position=64,
)  # fmt: skip
TIMES = {"rollout_s", "reward_s", "update_s", "sync_s", "checkpoint_s", "peak_rss_mb"}
STEPS = 6


def config() -> EvojaxConf:
    """Everything that remembers something between steps is on."""
    cfg = EvojaxConf(experiment="test")
    cfg.domain.tasks = ["tiny_copy", "tiny_succ"]
    cfg.domain.train_items = cfg.domain.eval_items = cfg.domain.audit_items = 8
    cfg.sampling.max_new_tokens = 1
    cfg.sampling.group_size = 16
    cfg.train.prompts_per_step = 8
    cfg.train.checkpoint_every = 2
    cfg.data.selection = "difficulty"
    cfg.filter.group = "ema_quantile"
    cfg.filter.ema_warmup = 2
    cfg.algorithm.old_logprobs = "trainer"
    cfg.algorithm.correction = "token_tis"
    cfg.algorithm.minibatches = 2
    cfg.algorithm.kl_every = 2
    cfg.algorithm.schedule = "cosine"
    cfg.algorithm.lr = 3e-3
    return cfg


class Stopper(InterruptGuard):
    """Asks for a stop once ``after`` steps are done."""

    def __init__(self, after: int):
        super().__init__()
        self.after = after

    def check(self) -> None:
        self.after -= 1
        if self.requested:
            raise Interrupted("stopped by a signal")
        self.requested = self.after == 1


class Setting:
    """What several trainers of one version share."""

    def __init__(self, root: Path, cfg: EvojaxConf):
        self.cfg = cfg
        self.domain = load_domain(cfg.domain)
        self.directory = root / "run" / "versions" / "v001"
        self.starts = 0
        self.first = init_params(TINY, 0)

    def start(self) -> Any:
        self.starts += 1
        return self.first

    def train(self, guard: InterruptGuard | None = None, updates: int = STEPS) -> Any:
        tokenizer = CharTokenizer(16)
        engine = EmbeddedEngine(TINY, tokenizer.pad_id, 64)
        trainer = VersionTrainer(
            TINY, Sampler(engine, self.domain, tokenizer), self.cfg, self.directory, "run",
            LiveView(False, updates), guard or InterruptGuard(),
        )  # fmt: skip
        arm = Arm("v001", 10, updates, "hash")
        return trainer.train(arm, self.start, self.domain.items("train"), ItemStats())


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Setting, Any, Any]:
    setting = Setting(tmp_path_factory.mktemp("straight"), config())
    params, totals = setting.train()
    return setting, params, totals


def untimed(setting: Setting) -> list[dict[str, Any]]:
    rows = load(setting.directory).updates().to_pylist()
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def test_case_G14_resume_repeats_filters_minibatches_schedule_and_reference(straight, tmp_path):
    whole, params, totals = straight
    setting = Setting(tmp_path, config())
    with pytest.raises(Interrupted):
        setting.train(Stopper(after=3))
    assert len(untimed(setting)) == 3
    resumed, counted = setting.train()
    assert setting.starts == 2, "the KL reference is loaded again"
    jax.tree.map(np.testing.assert_array_equal, params, resumed)
    assert untimed(setting) == untimed(whole)
    assert vars(counted) == vars(totals)


def test_case_G13_the_reference_is_untouched_and_measured_from(straight):
    setting, params, _ = straight
    before = init_params(TINY, 0)
    jax.tree.map(np.testing.assert_array_equal, setting.first, before)
    kl = [row["kl_k3"] for row in untimed(setting)]
    assert [value is None for value in kl] == [True, False] * 3
    assert kl[5] > kl[1] > 0
    assert not np.array_equal(params["embed"], before["embed"])


def test_rows_tell_what_a_step_did(straight):
    setting, _, totals = straight
    rows = load(setting.directory).updates().to_pylist()
    assert [row["step"] for row in rows] == list(range(10, 16))
    assert [row["checkpoint_s"] > 0 for row in rows] == [False, True] * 3
    for row in rows:
        assert 0 < row["useful_tokens"] <= row["tokens"]
        assert 0 < row["tokens_packed"] <= row["tokens_padded"]
        assert row["optimizer_steps"] in (1, 2) and row["skipped_steps"] == 0
        assert row["policy_age_mean"] == row["policy_age_max"] == 0.0
        assert row["ess"] == pytest.approx(1.0, abs=1e-3) and row["mismatch_max"] < 1e-3
        assert min(row["rollout_s"], row["reward_s"], row["update_s"], row["sync_s"]) > 0
    assert totals.updates == STEPS
    assert totals.optimizer_steps == sum(row["optimizer_steps"] for row in rows)
    assert any(row["filter_threshold"] for row in rows), "the warm-up of the filter ends"
    assert rows[-1]["lr"] < rows[0]["lr"]


def test_gradients_that_stay_non_finite_stop_the_run(tmp_path, monkeypatch):
    """Every advantage is broken: each step is skipped, and the second one is the last."""
    cfg = config()
    cfg.train.max_nonfinite = 2
    cfg.algorithm.minibatches = 1
    packed = steps.pack

    def poisoned(*args, **options):
        found = packed(*args, **options)
        assert found is not None
        rows = found.rows._replace(advantages=found.rows.advantages * np.nan)
        return dataclasses.replace(found, rows=rows)

    monkeypatch.setattr(steps, "pack", poisoned)
    setting = Setting(tmp_path, cfg)
    with pytest.raises(TrainingFailed, match=r"2 updates in a row .*step 11.*algorithm\.lr"):
        setting.train()
    rows = load(setting.directory).updates().to_pylist()
    assert [row["skipped_steps"] for row in rows] == [1, 1]
    assert [row["skipped"] for row in rows] == [True, True] and rows[1]["loss"] is None


def test_filter_state_is_in_the_checkpoint(straight):
    setting, _, _ = straight
    meta = setting.directory / "checkpoint" / "step_00000016" / "meta.json"
    state = FilterState.from_dict(json.loads(meta.read_text())["filter_state"])
    assert state.seen > 2 and state.mean > 0
