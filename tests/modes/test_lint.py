"""The inert-knob linter: the shipped configuration is clean, and a planted dead knob is caught."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from evojax import guards
from evojax.config import AlgorithmConf, EvojaxConf
from evojax.errors import InputError, UnavailableError
from evojax.evolution.config_edit import compose_conf
from evojax.guards import Guard
from evojax.lint.linter import Lint, Linter, Row
from evojax.lint.record import recorded
from evojax.lint.tiny import tiny
from evojax.lint.trail import Trail, digest
from evojax.lint.values import others
from evojax.modes import lint as mode
from evojax.overrides import group_options
from evojax.paths import conf_dir
from evojax.schema import leaf_keys
from evojax.training import collect

TREE = conf_dir()
OTHER_PRESETS = [n for n in group_options("algorithm", [TREE]) if n != "grpo_clip_higher"]
CORE = ("algorithm", "filter", "reward", "sampling", "data")


def composed(*overrides: str) -> DictConfig:
    return compose_conf(TREE, ["+experiment=math_tiny", *overrides])


@dataclass
class PlantedAlgorithm(AlgorithmConf):
    unread: float = 1.0
    idle: float = 1.0


@dataclass
class PlantedConf(EvojaxConf):
    algorithm: PlantedAlgorithm = field(default_factory=PlantedAlgorithm)


@pytest.fixture(scope="module")
def linter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linter]:
    """On the default preset, with one planted knob that nothing reads and one read in vain."""
    plain = OmegaConf.to_container(composed())
    cfg = OmegaConf.merge(OmegaConf.structured(PlantedConf), plain)
    assert isinstance(cfg, DictConfig)
    honest = collect.judge

    def judge(groups: Any, conf: Any, state: Any) -> Any:
        assert getattr(conf.algorithm, "idle", 1.0) > 0
        return honest(groups, conf, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "judge", judge)
        yield Linter(cfg, TREE, [], tmp_path_factory.mktemp("lint"))


@pytest.fixture(scope="module")
def whole(linter: Linter) -> Lint:
    return linter.run()


def test_every_setting_of_the_default_preset_acts_or_is_hidden(whole: Lint):
    rows = {row.leaf: row for row in whole.rows}
    assert set(rows) == {*leaf_keys(), "algorithm.unread", "algorithm.idle"}
    inert = {leaf: row.why for leaf, row in rows.items() if row.state == "inert"}
    assert set(inert) == {"algorithm.unread", "algorithm.idle"}, inert
    for leaf, guard in guards.hidden(composed()).items():
        assert rows[leaf].state == "hidden"
        assert rows[leaf].why == guard.words(composed())


def test_planted_dead_knobs_are_named_with_the_reason(whole: Lint):
    problems = {problem.where: problem.what for problem in whole.problems()}
    assert problems["algorithm.unread"] == "nothing reads it"
    assert problems["algorithm.idle"].startswith("it is read, but nothing that a run records")


def test_a_guard_that_is_not_true_is_caught(linter: Linter, monkeypatch: pytest.MonkeyPatch):
    lie = Guard(("algorithm.lr",), "algorithm.objective", lambda cfg: False, "set nothing")
    monkeypatch.setattr(guards, "GUARDS", (lie,))
    (row,) = linter.run(["algorithm.lr"]).rows[:1]
    assert row.leaf == "algorithm.lr" and row.state == "inert"
    assert row.why == "should have no effect while algorithm.objective is clip, but changes updates"


@pytest.mark.parametrize("name", OTHER_PRESETS)
def test_every_setting_of_the_core_acts_or_is_hidden_in_every_preset(name: str, tmp_path: Path):
    over = [f"algorithm={name}"]
    found = Linter(composed(*over), TREE, over, tmp_path).run(CORE)
    assert found.problems() == []
    assert len(found.rows) == sum(leaf.startswith(CORE) for leaf in leaf_keys())


def test_settings_of_a_file_of_problems_act(tmp_path: Path):
    file = tmp_path / "own.jsonl"
    line = {"messages": [{"role": "user", "content": ""}], "answer": "1", "domain": "math_rule"}
    with file.open("w") as out:
        for number in range(20):
            line["messages"] = [{"role": "user", "content": f"{number} + 1 = ?"}]
            out.write(json.dumps(line) + "\n")
    over = ["domain=jsonl", f"domain.path={file}", "domain.eval_items=8", "domain.audit_items=8"]
    found = Linter(composed(*over), TREE, over, tmp_path / "work").run(["domain"])
    assert {row.leaf for row in found.rows if row.state == "hidden"} == {"domain.tasks"}
    assert found.problems() == []


def test_a_tiny_run_that_is_refused_is_an_error_and_no_finding(tmp_path: Path, monkeypatch):
    linter = Linter(composed(), TREE, [], tmp_path)

    def gone(*_: object) -> None:
        raise UnavailableError("the disk is gone")

    monkeypatch.setattr(linter.benches["signal"], "probe", gone)
    with pytest.raises(UnavailableError, match="the disk is gone"):
        linter.run(["reward.clip"])


def test_what_is_cut_down_is_said():
    _, words = tiny(compose_conf(TREE, ["+experiment=math"]))
    assert any("smollm2_135m is replaced" in text for text in words)
    cfg, words = tiny(composed("algorithm=dapo"))
    assert not any("is replaced" in text for text in words)
    assert guards.problems(cfg) == []


def test_reads_are_recorded_and_values_stay():
    seen: set[str] = set()
    conf = recorded(EvojaxConf(experiment="t"), seen)
    assert seen == set() and isinstance(conf.algorithm, AlgorithmConf)
    assert conf.algorithm.kl_every == 8 and conf.reward.components == {"correct": 1.0}
    assert seen == {"algorithm", "algorithm.kl_every", "reward", "reward.components"}


@pytest.mark.parametrize("leaf", leaf_keys())
def test_every_setting_has_other_values_of_its_kind(leaf: str):
    cfg = OmegaConf.structured(EvojaxConf(experiment="t"))
    values = others(cfg, leaf)
    now = guards.plain(cfg, leaf)
    assert values and now not in values


def trail(
    *marks: tuple[str, Any], before: Trail | None = None, ignore: frozenset[str] = frozenset()
) -> tuple[Trail, str | None]:
    def probe(made: Trail) -> None:
        for name, value in marks:
            made.mark(name, value)

    made = Trail(before, ignore)
    return made, made.walk(probe)


def test_a_trail_names_the_first_difference():
    first, _ = trail(("a", np.zeros(2)), ("b", {"x": [1, 2]}))
    assert trail(("a", np.zeros(2)), ("b", {"x": [1, 2]}), before=first)[1] is None
    assert trail(("a", np.ones(2)), ("b", {"x": [1, 2]}), before=first)[1] == "a"
    assert trail(("a", np.zeros(2)), ("b", {"x": [2, 1]}), before=first)[1] == "b"
    assert trail(("a", np.zeros(2)), before=first)[1] == "end, where there was b"
    longer = (("a", np.zeros(2)), ("b", {"x": [1, 2]}), ("c", 0))
    assert trail(*longer, before=first)[1] == "c, where there was end"
    assert trail(("b", {"x": [1, 2]}), before=first, ignore=frozenset({"a"}))[1] is None
    assert digest(np.float32(0)) != digest(np.float64(0)) and digest([1]) != digest([[1]])


def job(tmp_path: Path) -> Any:
    return SimpleNamespace(cfg=composed(), conf_dir=TREE, overrides=[], run_dir=tmp_path)


@pytest.mark.parametrize("inert", [False, True])
def test_the_mode_writes_a_table_and_fails_for_an_inert_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inert: bool
):
    rows = [Row("seed", 0, "live", "rollouts"), Row("version", None, "hidden", "mode is evolve")]
    rows += [Row("algorithm.idle", 1.0, "inert", "nothing reads it")] if inert else []
    found = Lint(tuple(rows), ("sizes are cut down",), 1.5)
    monkeypatch.setattr(mode.Linter, "run", lambda self: found)
    if inert:
        with pytest.raises(InputError, match=r"algorithm.idle = 1.0: nothing reads it"):
            mode.lint(job(tmp_path), SimpleNamespace())  # type: ignore[arg-type]
    else:
        assert mode.lint(job(tmp_path), SimpleNamespace()) == 0  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    assert f"{len(rows)} settings: 1 live, 1 hidden, {int(inert)} inert" in shown
    assert "In the tiny run sizes are cut down." in shown
    stored = json.loads((tmp_path / "lint.json").read_text())
    assert [row["leaf"] for row in stored["rows"]] == [row.leaf for row in rows]
