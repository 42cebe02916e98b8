"""Which configuration and which repository an invocation works with, after stops included."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from omegaconf import DictConfig

from evojax import paths, rundir
from evojax.errors import InputError
from evojax.evolution.config_edit import compose_conf
from evojax.evolution.git import Git
from evojax.evolution.manifest import other_versions, read_manifest
from evojax.evolution.memory.ledger import Ledger
from evojax.modes import job as module
from evojax.modes.evolve import train
from evojax.modes.job import Job
from evojax.preflight import preflight
from evojax.training.interrupt import InterruptGuard
from evojax.training.version import write_json

BEGUN = ["+experiment=math_tiny", "seed=3"]


def composed(*more: str) -> DictConfig:
    return compose_conf(paths.conf_dir(), [*BEGUN, *more])


def directory(root: Path) -> Path:
    """A run directory as Hydra leaves it."""
    run = root / "run"
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text("".join(f"- {o}\n" for o in BEGUN))
    return run


def job(run: Path, cfg: DictConfig, *more: str) -> Job:
    return Job(cfg, run, [*BEGUN, *more], paths.conf_dir())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    shutil.copytree(paths.conf_dir(), top / "conf")
    shutil.copytree(paths.skills_dir(), top / "skills_library")
    git = Git(top)
    git.run("init", "--quiet", "--initial-branch=main")
    git.run("add", ".")
    git.run("commit", "--quiet", "--message=start")
    return top


def test_a_run_that_was_stopped_before_it_began_is_begun_anew(tmp_path: Path) -> None:
    run = directory(tmp_path)
    (run / "harness").mkdir()
    (run / "harness" / "stale").touch()
    resumed = job(run, composed(f"resume={run}", "algorithm.lr=0.5"), "algorithm.lr=0.5")
    resumed.refuse_edits()
    repo = resumed.repo()
    assert not (repo.path / "stale").exists()
    assert compose_conf(repo.path / "conf", BEGUN[:1]).algorithm.lr == 0.5
    with pytest.raises(InputError, match=r"no run\.json"):
        job(run, composed(f"resume={run}", "mode=report"))


def test_versions_without_a_manifest_are_never_begun_anew(tmp_path: Path) -> None:
    run = directory(tmp_path)
    (run / "versions").mkdir()
    with pytest.raises(InputError, match=r"no run\.json"):
        job(run, composed(f"resume={run}"))


def test_only_what_the_command_line_names_is_an_edit(tmp_path: Path) -> None:
    run = directory(tmp_path)
    job(run, composed()).begin("tiny", {})
    drifted = composed("algorithm.lr=0.5")  # as if a configuration file had been edited since
    resumed = job(run, drifted)
    assert resumed.edits == {} and resumed.remarks == []
    assert resumed.cfg.algorithm.lr == composed().algorithm.lr
    named = job(run, drifted, "algorithm.lr=0.5")
    with pytest.raises(InputError, match="keeps its configuration"):
        named.refuse_edits()


def test_a_run_of_another_installation_is_told_or_refused(tmp_path: Path) -> None:
    run = directory(tmp_path)
    job(run, composed()).begin("tiny", {})
    manifest = read_manifest(run)
    (told,) = other_versions(manifest | {"evojax": "0.0.1"})
    assert "evojax 0.0.1" in told
    manifest["config"]["colour"] = "red"
    write_json(run / "run.json", manifest)
    with pytest.raises(InputError, match="colour"):
        job(run, composed())
    write_json(run / "run.json", {"schema": 2})
    with pytest.raises(InputError, match="schema"):
        job(run, composed())


def test_training_only_is_refused_on_a_run_that_has_evolved(tmp_path: Path) -> None:
    run = directory(tmp_path)
    job(run, composed()).begin("tiny", {})
    (run / "rounds").mkdir()
    with pytest.raises(InputError, match="past its first training"):
        train(job(run, composed("mode=train"), "mode=train"), InterruptGuard())


def test_a_session_that_is_killed_has_put_its_seconds_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    run = directory(tmp_path)
    with Ledger(run / "ledger.sqlite") as ledger, job(run, composed()).session(ledger):
        deadline = time.monotonic() + 30
        while not ledger.events() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ledger.events()[0]["seconds"] > 0


def test_a_checkout_gets_the_command_line_and_must_hold_the_same_recipe(
    checkout: Path, tmp_path: Path
) -> None:
    run = directory(tmp_path)
    mine = job(run, composed(f"evolution.repo={checkout}"))
    repo = mine.repo()
    assert compose_conf(repo.trunk_dir / "conf", BEGUN[:1]).seed == 3
    with pytest.raises(InputError, match="sampling.temperature"):
        job(run, composed(f"evolution.repo={checkout}", "sampling.temperature=0.7")).repo()


def test_a_dirty_checkout_is_found_before_anything_is_written(checkout: Path) -> None:
    cfg = composed(f"evolution.repo={checkout}")
    assert [p for p in preflight(cfg) if p.where == "evolution.repo"] == []
    (checkout / "conf" / "config.yaml").write_text("changed\n")
    (problem,) = [p for p in preflight(cfg) if p.where == "evolution.repo"]
    assert "not committed" in problem.what


def test_a_merged_tree_is_kept_and_found_again(tmp_path: Path) -> None:
    run = directory(tmp_path)
    overlay = tmp_path / "mine" / "experiment"
    overlay.mkdir(parents=True)
    (overlay / "mine.yaml").write_text("# @package _global_\nexperiment: mine\n")
    assert rundir.saved_tree(run) is None
    paths.merge_trees([overlay.parent, paths.conf_dir()], run / "conf")
    kept = rundir.saved_tree(run)
    assert kept is not None and kept == run / "conf"
    again = paths.merge_trees([overlay.parent, kept], run / "conf")
    assert (again / "experiment" / "mine.yaml").is_file() and (again / "config.yaml").is_file()
    assert not (run / ".conf-new").exists()
