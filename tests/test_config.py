"""The configuration tree against the schema, and what the schema says about keys and values."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from evojax import cli  # registers the schema and the resolver  # noqa: F401
from evojax.config import EvojaxConf
from evojax.errors import InputError
from evojax.evolution.config_edit import bake_overrides, compose_conf
from evojax.overrides import check_file, check_overrides, explain, group_options, parse, quoted
from evojax.paths import conf_dir, merge_trees
from evojax.preflight import recipe_problems
from evojax.schema import check_value, is_known, nearest, schema_keys

TREE = conf_dir()
GROUPS = [
    f.name
    for f in dataclasses.fields(EvojaxConf)
    if dataclasses.is_dataclass(typing.get_type_hints(EvojaxConf)[f.name])
]
HYDRA_FILES = sorted(p for p in TREE.rglob("*.yaml") if "metrics" not in p.parts)


def composed(*overrides: str):
    with initialize_config_dir(str(TREE), version_base="1.3"):
        return compose("config", list(overrides))


def _plain(node: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(node)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def test_every_group_of_the_schema_has_options_and_a_default():
    defaults = OmegaConf.load(TREE / "config.yaml").defaults
    chosen = {
        name: option
        for entry in defaults
        if entry not in ("evojax_schema", "_self_")
        for name, option in entry.items()
    }
    assert set(chosen) == set(GROUPS)
    for name, option in chosen.items():
        assert option in group_options(name, [TREE])


@pytest.mark.parametrize("path", HYDRA_FILES, ids=lambda p: p.relative_to(TREE).as_posix())
def test_case_H05_defaults_lists_name_self(path: Path):
    """Without an explicit _self_ the order decides silently who wins."""
    defaults = yaml.safe_load(path.read_text()).get("defaults")
    if defaults is not None:
        assert defaults[-1] == "_self_"


@pytest.mark.parametrize("path", HYDRA_FILES, ids=lambda p: p.relative_to(TREE).as_posix())
def test_every_file_sets_known_keys_of_the_right_type(path: Path):
    assert check_file(path, TREE) == []


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_composes_and_sets_what_it_writes(group: str):
    for option in group_options(group, [TREE]):
        node = composed(f"{group}={option}", "+experiment=math").get(group)
        written = yaml.safe_load((TREE / group / f"{option}.yaml").read_text())
        if group not in ("policy", "domain"):  # the experiment chooses these
            assert {key: node[key] for key in written if key != "defaults"} == {
                key: value for key, value in written.items() if key != "defaults"
            }


def test_default_options_repeat_the_defaults_of_the_schema():
    cfg = OmegaConf.to_container(composed("+experiment=math"))
    plain = OmegaConf.to_container(OmegaConf.structured(EvojaxConf(experiment="math")))
    assert isinstance(cfg, dict) and isinstance(plain, dict)
    plain["domain"]["tasks"] = cfg["domain"]["tasks"]
    assert cfg == plain


@pytest.mark.parametrize("name", group_options("experiment", [TREE]))
def test_experiment_file_names_itself_and_the_command_line_wins(name: str):
    assert composed(f"+experiment={name}").experiment == name
    assert composed(f"+experiment={name}", "train.steps=3").train.steps == 3


def test_case_H05_the_experiment_beats_the_group_file():
    assert composed("+experiment=math_tiny").algorithm.lr == 3e-3
    assert composed("+experiment=math_tiny", "algorithm.lr=0.5").algorithm.lr == 0.5


def test_case_H04_unknown_keys_are_all_listed_with_the_nearest_name():
    texts = ["algorithm.lrr=3", "hydra.ouput_subdir=x", "++grpo.clip_hi=0.3", "+foo=1", "seed=2"]
    problems = check_overrides(parse(texts), [TREE])
    assert [p.where for p in problems] == [
        "algorithm.lrr",
        "hydra.ouput_subdir",
        "grpo.clip_hi",
        "foo",
    ]
    assert all(p.what == "unknown key" for p in problems)
    assert "algorithm.lr?" in problems[0].remedy
    assert "hydra.output_subdir?" in problems[1].remedy
    assert nearest("grpo.eps_hi") == "algorithm.eps_high"
    assert nearest("polcy", ["policy"]) == "policy"


def test_wrong_types_and_options_are_listed_together():
    texts = [
        "seed=x",
        "sampling.group_size=2.5",
        "live=maybe",
        "policy=random_tin",
        "reward.components.partial=much",
        "algorithm={lr: 1}",
    ]
    problems = check_overrides(parse(texts), [TREE])
    assert [p.where for p in problems] == [
        "seed",
        "sampling.group_size",
        "live",
        "policy",
        "reward.components.partial",
        "algorithm",
    ]
    assert "random_tiny" in problems[3].remedy


def test_valid_overrides_pass_the_check():
    texts = [
        "seed=1,2",
        "+experiment=math,math_tiny",
        "reward.components.partial=0.3",
        "~live",
        "domain.tasks=[gcd]",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "hydra.job.env_set.A=b",
        "train.steps=range(1,4)",
        "policy=glob(*)",
        "version=null",
        "policy.path='a=b'",
        "+algorithm.lr=1e-4",
    ]
    assert check_overrides(parse(texts), [TREE]) == []


def test_case_H01_unparsable_overrides_are_all_listed():
    with pytest.raises(InputError) as caught:
        parse(["policy.path=epoch=9", "seed=1", "policy.path=a)"])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    "text", ["run/epoch=9.ckpt", "don't", "a,b", "null", "1e6", "end\\", "\\'", "${x}", "a b#c;d"]
)
def test_case_H01_quoted_paths_round_trip(text: str):
    assert parse([f"policy.path={quoted(text)}"])[0].value() == text


def test_schema_lookup():
    assert schema_keys()["algorithm.lr"] is float
    assert is_known("algorithm") and is_known("reward.components.any")
    assert not is_known("algorithm.lr.x") and not is_known("nothing")
    assert check_value("policy.path", None) == []
    assert check_value("hydra.job.chdir", "sideways")[0].where == "hydra.job.chdir"


def test_every_problem_of_a_faulty_file_is_explained(tmp_path: Path):
    tree = merge_trees(
        [_overlay(tmp_path, "lr: 1e-3\n  eps_hgh: 0.3\n  epochs: two"), TREE], tmp_path / "t"
    )
    with pytest.raises(Exception) as caught, initialize_config_dir(str(tree), version_base="1.3"):
        compose("config", ["+experiment=mine"])
    problems = explain(caught.value, [tree]).problems
    assert [p.where.rpartition(": ")[2] for p in problems] == [
        "algorithm.eps_hgh",
        "algorithm.epochs",
    ]
    assert all("experiment/mine.yaml" in p.where for p in problems)


def _overlay(tmp_path: Path, algorithm: str) -> Path:
    folder = tmp_path / "overlay" / "experiment"
    folder.mkdir(parents=True)
    text = f"# @package _global_\nexperiment: mine\nalgorithm:\n  {algorithm}\n"
    (folder / "mine.yaml").write_text(text)
    return folder.parent


def test_case_G13_a_kl_setting_that_nothing_would_read_is_refused():
    problems = check_overrides(parse(["++algorithm.kl_beta=0.1", "algorithm.beta=0.1"]), [TREE])
    assert [p.where for p in problems] == ["algorithm.kl_beta", "algorithm.beta"]
    assert all(p.what == "unknown key" for p in problems)


@pytest.mark.parametrize("name", group_options("algorithm", [TREE]))
@pytest.mark.parametrize("experiment", group_options("experiment", [TREE]))
def test_every_preset_is_a_configuration_without_a_problem(name: str, experiment: str):
    cfg = composed(f"+experiment={experiment}", f"algorithm={name}")
    assert recipe_problems(cfg) == []


def test_a_preset_brings_its_filter_and_reward_and_the_command_line_wins():
    dapo = composed("+experiment=math", "algorithm=dapo")
    assert dapo.filter.refill_rounds == 2
    assert dict(dapo.reward.components) == {"correct": 1.0, "overlong": 0.5}
    own = composed("+experiment=math", "algorithm=dapo", "filter=none", "reward=partial")
    assert own.filter.refill_rounds == 0 and own.reward.overlong_buffer == 0
    assert dict(own.reward.components) == {"correct": 1.0, "partial": 0.3}
    evotrainer = composed("+experiment=math", "algorithm=evotrainer")
    assert (evotrainer.filter.group, evotrainer.reward.clip) == ("ema_quantile", 2.0)


def test_a_preset_written_into_a_version_gives_the_same_configuration(tmp_path: Path):
    for overrides in (["algorithm=dapo"], ["algorithm=dapo", "filter=none", "algorithm.lr=0.5"]):
        tree = merge_trees([TREE], tmp_path / str(len(overrides)))
        bake_overrides(tree, "math", overrides)
        assert compose_conf(tree, ["+experiment=math"]) == composed("+experiment=math", *overrides)
