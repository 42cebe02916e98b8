"""The boundary of what the loop may change, on composed configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from evojax.evolution.boundary import (
    changed_keys,
    edit_problems,
    factor_of,
    path_problems,
    single_factor_check,
)
from evojax.evolution.config_edit import compose_conf

MUTABLE = ["reward", "filter", "sampling", "data", "algorithm", "diagnostics"]
FILE = ["conf/filter/none.yaml"]
PICK = "+experiment=math"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["filter.refill_rounds=2"], []),
        (["filter.refill_rounds=2", "filter.trajectory=[truncated]"], []),
        (["filter=dynamic"], []),
        (["filter.trajectory=[truncated,idle]", "filter.group=top_p_mass"], []),
        (["filter.trajectory=[tired]"], ["outside what is allowed"]),
        (["filter.trajectory=[idle,idle]"], ["outside what is allowed"]),
        (["filter.group=all"], ["outside what is allowed"]),
        (["filter.keep=0.0"], ["from 0.05 to 0.99"]),
        (["reward.clip=2.0", "+reward.components.overlong=0.5"], []),
        (["reward.overlong_buffer=-1"], ["a whole number from 0 to 4096"]),
        ([], ["nothing differs"]),
        (["filter.refill_rounds=2", "algorithm.lr=3e-5"], ["more than one factor"]),
        (["filter.refill_rounds=99"], ["a whole number from 0 to 8"]),
        (["algorithm.lr=5.0"], ["outside"]),
        (["algorithm.dead_tolerance=1.0"], ["not a key that the loop may set"]),
        (["sampling.group_size=64"], ["not a key"]),
        (["reward.components.correct=-1"], ["outside"]),
        (["+reward.components._target_=1"], ["not a key"]),
        (["data.selection='${experiment}'"], ["interpolations"]),
        (["hydra.job.chdir=true"], ["frozen"]),
        (["evolution.boundary.mutable=[eval]"], ["frozen"]),
    ],
)
def test_single_factor_check(
    shared_conf: Path, parent_cfg: DictConfig, overrides: list[str], words: list[str]
) -> None:
    candidate = compose_conf(shared_conf, [PICK, *overrides], with_hydra=True)
    problems = single_factor_check(parent_cfg, candidate, MUTABLE, FILE)
    assert bool(problems) == bool(words)
    for word in words:
        assert any(word in str(p) for p in problems)


@pytest.mark.parametrize(
    "override",
    ["eval.samples=1", "eval.seed=1", "domain.path=answers.jsonl", "domain.tasks=[gcd]",
     "train.steps=99", "seed=9", "policy.source=path", "domain.eval_items=1"],
)  # fmt: skip
def test_case_E06_evaluation_data_and_budget_are_frozen(
    shared_conf: Path, parent_cfg: DictConfig, override: str
) -> None:
    overrides = [PICK, "filter.refill_rounds=2", override]
    candidate = compose_conf(shared_conf, overrides, with_hydra=True)
    problems = single_factor_check(parent_cfg, candidate, MUTABLE, FILE)
    assert any("frozen" in p.what for p in problems)


def test_case_E06_only_recipe_files_may_differ() -> None:
    good = ["conf/filter/none.yaml", "conf/experiment/math.yaml",
            "skills_library/shared/some-skill/SKILL.md"]  # fmt: skip
    bad = ["conf/eval/default.yaml", "evojax/gate.py", "conf/config.yaml", "../x.yaml",
           "conf/filter/../eval/default.yaml", "skills_library/shared/x/run.py", "/etc/passwd",
           "conf/evolution/default.yaml", "conf/metrics/accuracy.yaml",
           "conf/filter/a.yaml\n"]  # fmt: skip
    assert path_problems(good, MUTABLE) == []
    assert [p.value for p in path_problems(bad, MUTABLE)] == bad


def test_two_trees_compare_like_one(conf_dir: Path, parent_cfg: DictConfig) -> None:
    other = compose_conf(conf_dir, [PICK], with_hydra=True)
    (problem,) = single_factor_check(parent_cfg, other, MUTABLE, [])
    assert "nothing differs" in problem.what


def test_declared_factor_must_be_the_one_that_changes(shared_conf: Path) -> None:
    parent = compose_conf(shared_conf, [PICK])
    candidate = compose_conf(shared_conf, [PICK, "filter.refill_rounds=2"])
    assert changed_keys(parent, candidate) == {"filter.refill_rounds": (0, 2)}
    assert single_factor_check(parent, candidate, MUTABLE, FILE, "filter") == []
    assert single_factor_check(parent, candidate, MUTABLE, FILE, "data")
    assert factor_of("domain.name") == "environment" and factor_of("seed") is None


def test_edits_are_checked_before_they_are_made() -> None:
    good = {"algorithm.epochs": 2, "diagnostics.metrics": ["accuracy"]}
    assert edit_problems(good, MUTABLE) == []
    bad = {"algorithm.epochs": True, "eval.samples": 1, "filter.trajectory": ["x"],
           "diagnostics.metrics": ["../x"], "data.selection": "evojax.x"}  # fmt: skip
    assert [p.where for p in edit_problems(bad, MUTABLE)] == list(bad)
    assert edit_problems({"algorithm.epochs": 2}, ["data"])
