"""What is refused before a run begins: one problem at a time, and all of them together."""

from __future__ import annotations

import math
import shutil
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from evojax import preflight as pf
from evojax.config import EvojaxConf
from evojax.errors import InputError
from evojax.paths import conf_dir
from evojax.ranges import Range
from evojax.schema import schema_keys


def conf(tmp_path: Path, **changes: Any) -> DictConfig:
    """The tiny configuration with ``changes``; ``__`` in a name stands for a dot."""
    cfg = OmegaConf.structured(EvojaxConf(experiment="t"))
    assert isinstance(cfg, DictConfig)
    cfg.policy.source = "random"
    cfg.domain.tasks = ["tiny_copy"]
    cfg.output_root = str(tmp_path)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False)
    return cfg


def where(cfg: DictConfig) -> list[str]:
    return [problem.where for problem in pf.preflight(cfg)]


def test_a_sound_configuration_has_no_problem(tmp_path: Path):
    assert pf.preflight(conf(tmp_path)) == []
    pf.check(conf(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sampling__group_size", 1),
        ("sampling__temperature", 0.0),
        ("sampling__temperature", math.nan),
        ("sampling__max_new_tokens", 0),
        ("algorithm__lr", -1.0),
        ("algorithm__lr", math.inf),
        ("algorithm__eps_low", 0.0),
        ("algorithm__eps_high", 1.0),
        ("algorithm__epochs", 0),
        ("train__steps", 0),
        ("train__prompts_per_step", 0),
        ("evolution__gate__alpha", 1.0),
        ("evolution__gate__alpha", 0.0),
        ("policy__arch__num_layers", 0),
        ("mode", "evlove"),
        ("policy__source", "smollm"),
        ("rollout__engine", "sglang"),
        ("domain__name", "maths"),
        ("domain__tasks", ["tiny_copi"]),
        ("domain__tasks", []),
        ("data__selection", "hard"),
        ("reward__components", {"corect": 1.0}),
        ("reward__components", {"correct": 0.0}),
        ("reward__components", {"correct": math.nan}),
        ("algorithm__advantage", "grppo"),
        ("evolution__proposer", "oracle"),
        ("domain__chat", True),
        ("policy__compute_dtype", "float16"),
        ("algorithm__objective", "ppo"),
        ("algorithm__aggregation", "mean"),
        ("algorithm__old_logprobs", "none"),
        ("algorithm__optimizer", "sgd"),
        ("algorithm__schedule", "warm"),
        ("algorithm__minibatches", 9),
        ("algorithm__advantage_clip", 0.0),
        ("algorithm__kl_coef", -0.1),
        ("reward__clip", math.nan),
        ("filter__group", "variance"),
        ("filter__trajectory", ["trunkated"]),
        ("filter__trajectory", ["truncated", "truncated"]),
        ("filter__trajectory", ["truncated", "idle"]),
        ("policy__path", "/tmp"),
        ("resume", "/"),
    ],
)
def test_one_fault_is_one_problem(tmp_path: Path, key: str, value: Any):
    assert where(conf(tmp_path, **{key: value})) == [key.replace("__", ".")]


def test_maxrl_takes_no_reward_that_can_be_negative(tmp_path: Path):
    def problems(**components: float) -> list[str]:
        return where(conf(tmp_path, algorithm__advantage="maxrl", reward__components=components))

    assert problems(correct=1.0, partial=0.3) == []
    assert problems(correct=1.0, overlong=1.0) == ["algorithm.advantage"]
    assert problems(correct=1.0, partial=-0.3) == ["algorithm.advantage"]
    assert problems(correct=1.0, overlong=0.0) == []


def test_gdpo_hides_the_clip_of_the_composed_reward(tmp_path: Path):
    assert where(conf(tmp_path, algorithm__advantage="gdpo", reward__clip=1.0)) == ["reward.clip"]


def test_all_faults_are_listed_at_once(tmp_path: Path):
    cfg = conf(tmp_path, sampling__group_size=1, algorithm__lr=0.0, mode="trian", train__steps=0)
    assert set(where(cfg)) == {"sampling.group_size", "algorithm.lr", "mode", "train.steps"}
    with pytest.raises(InputError) as caught:
        pf.check(cfg)
    assert len(caught.value.problems) == 4
    assert "did you mean train?" in str(caught.value)


def test_every_number_of_the_schema_has_limits():
    numbers = {
        key
        for key, hint in schema_keys().items()
        if {int, float} & {hint, *typing.get_args(hint)}
        and typing.get_origin(hint) not in (list, dict)
        and not key.startswith(("hydra.", "policy.arch."))
    }
    assert numbers == set(pf.RANGES)


@given(st.floats(), st.floats(-10, 10), st.floats(-10, 10), st.booleans(), st.booleans())
def test_a_range_admits_exactly_what_it_says(value, low, high, open_low, open_high):
    limit = Range(low, high, open_low, open_high)
    inside = math.isfinite(value) and low <= value <= high
    edge = (open_low and value == low) or (open_high and value == high)
    assert (value in limit) == (inside and not edge)


@pytest.mark.parametrize("group", ["eval", "policy", "train", "evolution", "rewrad"])
def test_case_E06_frozen_groups_cannot_be_made_mutable(tmp_path: Path, group: str):
    cfg = conf(tmp_path, evolution__boundary__mutable=["reward", group])
    assert where(cfg) == ["evolution.boundary.mutable"]


def test_a_required_value_that_is_not_set_is_named(tmp_path: Path):
    assert where(conf(tmp_path, domain__path="???")) == ["domain.path"]


@pytest.mark.parametrize("mode", ["evaluate", "diagnose", "backtest", "report"])
def test_reading_modes_need_a_run(tmp_path: Path, mode: str):
    assert where(conf(tmp_path, mode=mode)) == ["resume"]
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    assert where(conf(tmp_path, mode=mode, resume=str(tmp_path / "run"))) == []


def test_model_directory(tmp_path: Path):
    model = tmp_path / "model"
    local = {"policy__source": "path", "policy__path": str(model)}
    assert where(conf(tmp_path, **local)) == ["policy.path"]
    model.mkdir()
    assert where(conf(tmp_path, **local)) == ["policy.path"]
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"0" * 10)
    assert where(conf(tmp_path, **local)) == []
    assert where(conf(tmp_path, policy__source="path")) == ["policy.path"]


def test_problem_file(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    assert where(conf(tmp_path, domain__path=str(file))) == ["domain.path"]
    file.write_text("")
    assert where(conf(tmp_path, domain__path=str(file))) == ["domain.path"]
    file.write_text("{}\n")
    assert where(conf(tmp_path, domain__path=str(file), domain__tasks=["ignored"])) == []


def test_output_root_must_be_a_writable_directory(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert where(conf(tmp_path, output_root=str(tmp_path / "file" / "x"))) == ["output_root"]
    assert where(conf(tmp_path, output_root=str(tmp_path / "new" / "deep"))) == []
    monkeypatch.setattr("os.access", lambda *_: False)
    assert where(conf(tmp_path)) == ["output_root"]


def test_a_full_disk_is_noticed_with_the_figures(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10**9))
    (problem,) = pf.preflight(conf(tmp_path, policy__source="smollm2_135m"))
    assert problem.where == "output_root" and "1.00 GB free" in problem.what
    # 4 bytes x 134,515,008 parameters x (3 for the training state + base + 3 arms) + 64 MiB
    assert pf.disk_need(conf(tmp_path, policy__source="smollm2_135m")) == 3_833_529_088
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    reading = conf(tmp_path, mode="report", resume=str(tmp_path / "run"))
    assert pf.preflight(reading) == []


def test_heads_must_divide(tmp_path: Path):
    sizes = ["policy.arch.num_heads", "policy.arch.hidden_size"]
    assert where(conf(tmp_path, policy__arch__num_heads=3)) == sizes


def test_experiment_must_be_chosen():
    (problem,) = pf.missing_experiment(OmegaConf.structured(EvojaxConf()), [conf_dir()])
    assert "math, math_tiny" in problem.remedy


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"algorithm__objective": "cispo", "algorithm__eps_high": 5.0}, None),
        ({"algorithm__objective": "gspo", "algorithm__eps_high": 5.0}, "algorithm.eps_high"),
        ({"algorithm__minibatches": 8}, None),
        ({"reward__components": {"overlong": 1.0}, "reward__overlong_buffer": 6}, None),
        (
            {"reward__components": {"overlong": 1.0}, "reward__overlong_buffer": 7},
            "reward.overlong_buffer",
        ),
        ({"filter__group": "top_p_mass", "filter__keep": 1.0}, None),
        ({"filter__group": "ema_quantile", "filter__keep": 1.0}, "filter.keep"),
        ({"algorithm__kl_coef": 0.1, "algorithm__kl_loss": "k1"}, "algorithm.kl_loss"),
        (
            {"algorithm__old_logprobs": "trainer", "algorithm__correction": "tis"},
            "algorithm.correction",
        ),
        ({"algorithm__correction_high": 1.0}, "algorithm.correction_low"),
        ({"algorithm__correction_low": 2.0}, "algorithm.correction_low"),
        ({"algorithm__correction_low": 0.99, "algorithm__correction_high": 1.01}, None),
    ],
)
def test_settings_of_the_core_that_contradict_each_other(tmp_path: Path, changes, key):
    if any("correction_" in name for name in changes):
        changes |= {"algorithm__old_logprobs": "trainer", "algorithm__correction": "token_mask"}
    assert where(conf(tmp_path, **changes)) == ([key] if key else [])


def test_notes_say_what_a_reader_must_know(tmp_path: Path):
    off = pf.notes(conf(tmp_path, algorithm__old_logprobs="trainer"))
    assert len(off) == 1 and "clipping is off by construction" in off[0]
    assert "difference between trainer and sampler" in pf.notes(conf(tmp_path))[0]
    anew = {"algorithm__old_logprobs": "trainer", "algorithm__minibatches": 2}
    assert pf.notes(conf(tmp_path, **anew)) == []
    assert "no other correction" in pf.notes(conf(tmp_path, algorithm__epochs=2))[0]
    assert len(pf.notes(conf(tmp_path, **anew, train__shuffle_rewards=True))) == 1
    partial = conf(tmp_path, **anew, reward__components={"correct": 1, "partial": 0.3})
    assert "share of right answers" in pf.notes(partial)[0]
    (wide,) = pf.notes(conf(tmp_path, **anew, algorithm__objective="gspo"))
    assert "hardly ever clip" in wide
    (half,) = pf.notes(conf(tmp_path, **anew, policy__compute_dtype="bfloat16"))
    assert "bfloat16" in half
