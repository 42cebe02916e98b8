from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from evojax import paths
from evojax.evolution.config_edit import bake_overrides, compose_conf
from experiments.baselines import run
from experiments.baselines.plot import draw
from experiments.baselines.stats import gains, markdown, summarise, two_level


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return paths.merge_trees([run.CONF, paths.conf_dir()], tmp_path_factory.mktemp("tree") / "conf")


def composed(tree: Path, recipe: str):
    return compose_conf(tree, [*run.overrides("math", run.STEPS), f"+recipe={recipe}"])


def test_every_recipe_shares_the_budget_and_differs_in_its_factor(tree):
    found = {recipe: composed(tree, recipe) for recipe in run.RECIPES}
    for conf in found.values():
        algorithm = conf.algorithm
        assert (algorithm.epochs, algorithm.minibatches, algorithm.lr) == (1, 2, 1e-5)
        assert conf.filter.refill_rounds == 0
        assert (conf.train.steps, conf.train.prompts_per_step) == (run.STEPS, 8)
    base, higher = found["base"], found["grpo_ch"]
    assert (base.algorithm.eps_low, base.algorithm.eps_high) == (0.2, 0.2)
    assert higher.algorithm.eps_high == 0.28
    higher.algorithm.eps_high = base.algorithm.eps_high
    assert base == higher, "Clip-Higher is the only difference"
    assert found["gspo_ch"].algorithm.objective == "gspo"
    filters = {recipe: conf.filter.group for recipe, conf in found.items()}
    assert filters == {
        "base": "none",
        "grpo_ch": "none",
        "gspo_ch": "none",
        "ragen_v1": "uncertainty",
        "ragen_v2": "top_p_mass",
        "group_variance": "absolute",
    }


@pytest.mark.parametrize("experiment", ["math", "math_tiny"])
def test_a_recipe_can_be_written_into_a_version(tree, tmp_path, experiment):
    shutil.copytree(tree, tmp_path / "conf")
    given = [f"+experiment={experiment}", "+recipe=ragen_v1", "mode=train", "seed=1"]
    bake_overrides(tmp_path / "conf", experiment, given)
    alone = compose_conf(tmp_path / "conf", [f"+experiment={experiment}"])
    assert (alone.filter.group, alone.algorithm.minibatches, alone.seed) == ("uncertainty", 2, 1)


def test_two_level_by_hand():
    mean, (low, high) = two_level(np.array([[0.0, 0.0], [1.0, 1.0]]))
    assert mean == 0.5 and (low, high) == (0.0, 1.0), "two seeds that disagree say nothing"
    mean, (low, high) = two_level(np.array([[0.0, 1.0, math.nan]]))
    assert mean == 0.5, "an unscorable item is left out, never 0"
    assert low >= 0.0 and high <= 1.0
    assert math.isnan(two_level(np.full((2, 2), math.nan))[0])


def test_two_level_is_wider_than_items_alone_when_seeds_disagree():
    rng = np.random.default_rng(0)
    items = rng.normal(0.2, 0.1, 80)
    agreeing = np.array([items, items, items])
    apart = agreeing + np.array([[-0.2], [0.0], [0.2]])
    width = [np.ptp(two_level(table)[1]) for table in (agreeing, apart)]
    assert width[1] > 2 * width[0]
    sem = 1.96 * items.std(ddof=1) / math.sqrt(80)
    assert width[0] == pytest.approx(2 * sem, rel=0.1), "one level left: the usual interval"


def a_row(arm: str, seed: int, scores: dict[str, float | None]) -> dict:
    return {
        "arm": arm,
        "seed": seed,
        "base_scores": {"a": 0.0, "b": 0.5},
        "scores": scores,
        **dict.fromkeys(("rollouts", "tokens", "optimizer_steps", "wall_s"), 60.0),
        **dict.fromkeys(("dead_share", "filtered_share", "clip_share"), 0.25),
    }


ROWS = [
    a_row("base", 0, {"a": 0.5, "b": 0.5}),
    a_row("base", 1, {"a": 0.5, "b": 0.5}),
    a_row("grpo_ch", 1, {"a": 1.0, "b": None}),
]


def test_gains_are_paired_by_item_and_by_seed():
    np.testing.assert_array_equal(gains(ROWS[:2]), [[0.5, 0.0], [0.5, 0.0]])
    np.testing.assert_array_equal(gains(ROWS[2:], ROWS[:2]), [[0.5, math.nan]])
    with pytest.raises(ValueError, match="2 different sets"):
        gains([a_row("base", 0, {"a": 1.0})])
    with pytest.raises(ValueError, match="0 pairs"):
        gains(ROWS[2:], ROWS[:1])


def test_summary_table_and_picture(tmp_path):
    entries = summarise(ROWS, run.RECIPES, run.PLAIN)
    assert [e["recipe"] for e in entries] == ["base", "grpo_ch"]
    base, higher = entries
    assert base["gain"] == 0.25 and base["by_seed"] == [0.25, 0.25]
    assert base["over_base"] is None and higher["over_base"]["mean"] == 0.5
    lines = markdown(entries).splitlines()
    assert len(lines) == 4 and "| base | +0.250 [" in lines[2]
    draw(entries, "a < b", tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert text.count("<circle") == 2 and "a &lt; b" in text


def test_the_printed_command_is_one_multirun(capsys):
    run.main(["--print", "--steps", "4", "--seeds", "0", "1", "--recipes", "base", "gspo_ch"])
    assert capsys.readouterr().out.strip() == (
        "python -m evojax.main -m --config-dir experiments/baselines/conf +experiment=math "
        "mode=train train.steps=4 +recipe=base,gspo_ch seed=0,1 live=false"
    )


def test_a_tiny_run_ends_in_a_row_a_table_and_a_picture(tmp_path, capsys):
    words = ["--experiment", "math_tiny", "--steps", "2", "--output-root", str(tmp_path)]
    words += ["--recipes", "ragen_v1", "--seeds", "0"]
    run.main(words)
    place = tmp_path / "math_tiny-2"
    (row,) = [json.loads(line) for line in (place / "results.jsonl").read_text().splitlines()]
    assert (row["arm"], row["seed"], row["steps"]) == ("ragen_v1", 0, 2)
    assert row["rollouts"] == row["tokens"] == 2 * 16 * 8, "one token each"
    assert 0 < row["optimizer_steps"] <= 4
    live = 1 - row["dead_share"]
    assert row["filtered_share"] == pytest.approx(max(0.0, live - 0.25), abs=0.1)
    assert row["base_scores"].keys() == row["scores"].keys() and len(row["scores"]) == 16
    assert (place / "results.svg").exists() and (place / "summary.json").exists()
    capsys.readouterr()
    run.main(words)
    assert "in the table already" in capsys.readouterr().out
