"""The command line as a user meets it: exit codes, messages, run directories, multirun."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from evojax import cli
from evojax.errors import InputError, Interrupted, UnavailableError
from evojax.paths import conf_dir

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in which the program is started."""
    place = tmp_path / "start"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def calls(start: Path, monkeypatch: pytest.MonkeyPatch) -> list[types.SimpleNamespace]:
    """Replaces the modes by a recorder; ``calls.behave`` style hooks go through the seed."""
    seen: list[types.SimpleNamespace] = []
    raising = {
        11: InputError.one("bad", "some.key", 1, "mend it"),
        12: UnavailableError("the grader is gone"),
        13: Interrupted("stopped"),
        14: KeyboardInterrupt(),
        15: ValueError("a bug"),
        16: OSError(errno.ENOSPC, "No space left on device", "x.parquet"),
    }

    def dispatch(cfg, run_dir, overrides, tree) -> int:
        seen.append(types.SimpleNamespace(cfg=cfg, run_dir=run_dir, over=overrides, tree=tree))
        if cfg.seed in raising:
            raise raising[cfg.seed]
        (run_dir / "run.json").write_text(json.dumps({"seed": cfg.seed}))
        return 0

    module = types.ModuleType("evojax.run")
    module.dispatch = dispatch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evojax.run", module)
    return seen


def tiny(*overrides: str) -> int:
    return cli.main(["+experiment=math_tiny", *overrides])


def program(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evojax.main", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write_experiment(folder: Path, body: str, name: str = "mine") -> Path:
    path = folder / "experiment" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\nexperiment: {name}\n{body}\n")
    return path


def test_a_run_gets_its_own_directory_config_and_overrides(calls, start: Path):
    assert tiny("seed=3") == 0
    call = calls[0]
    assert call.cfg.seed == 3 and call.cfg.policy.source == "random" and "hydra" not in call.cfg
    assert call.run_dir.parent == start / "outputs" / "math_tiny"
    assert call.over == ["+experiment=math_tiny", "seed=3"]
    assert call.tree == conf_dir()
    assert (call.run_dir / ".hydra" / "config.yaml").is_file()


def test_case_H03_runs_of_the_same_second_do_not_share_a_directory(calls):
    assert [tiny() for _ in range(4)] == [0] * 4
    assert len({call.run_dir for call in calls}) == 4


def test_case_H03_a_fixed_directory_is_not_written_twice(calls, start: Path, capsys):
    assert tiny("hydra.run.dir=out/x") == 0
    before = (start / "out/x/.hydra/config.yaml").read_bytes()
    assert tiny("hydra.run.dir=out/x", "seed=5") == 2
    assert "not empty" in capsys.readouterr().err
    assert (start / "out/x/.hydra/config.yaml").read_bytes() == before
    assert len(calls) == 1


def test_case_H03_a_directory_in_use_is_refused(calls, start: Path, capsys):
    with cli.rundir.claim(start / "out", resume=False):
        assert tiny("hydra.run.dir=out") == 2
    assert "another process" in capsys.readouterr().err and not calls


def test_resume_goes_on_in_the_same_directory_with_the_same_configuration(calls, start: Path):
    assert tiny("seed=7", "domain.train_items=5") == 0
    run_dir = calls[0].run_dir
    before = (run_dir / ".hydra/overrides.yaml").read_bytes()
    assert cli.main([f"resume={os.path.relpath(run_dir, start)}", "live=false"]) == 0
    again = calls[1]
    assert again.run_dir == run_dir and again.cfg.resume == str(run_dir)
    assert (again.cfg.seed, again.cfg.domain.train_items, again.cfg.live) == (7, 5, False)
    assert (run_dir / ".hydra/overrides.yaml").read_bytes() == before
    assert len(list((run_dir / ".hydra").glob("resume-*/config.yaml"))) == 1


def test_resume_is_for_one_run(calls, capsys):
    assert tiny() == 0
    assert cli.main([f"resume={calls[0].run_dir}", "-m", "seed=1,2"]) == 2
    assert "leave out -m" in capsys.readouterr().err and len(calls) == 1


def test_resume_of_something_else_is_refused(calls, start: Path, capsys):
    (start / "outputs").mkdir()
    assert cli.main(["resume=outputs"]) == 2
    assert "not a run directory" in capsys.readouterr().err
    assert list((start / "outputs").iterdir()) == []


def test_case_H04_every_problem_of_the_command_line_is_listed(calls, start: Path, capsys):
    assert tiny("algorithm.lrr=3", "hydra.ouput_subdir=x", "++grpo.clip_hi=0.3", "seed=x") == 2
    text = capsys.readouterr().err
    assert "4 problems" in text and "algorithm.lr?" in text and "Traceback" not in text
    assert list(start.iterdir()) == []


def test_case_H04_unknown_key_in_a_users_file(calls, start: Path, capsys):
    path = write_experiment(start / "own", "algorithm: {lrr: 1.0}\nsampling: {group_size: many}")
    assert cli.main(["--config-dir", "own", "+experiment=mine"]) == 2
    text = capsys.readouterr().err
    assert f"{path}: algorithm.lrr" in text and "algorithm.lr?" in text
    assert f"{path}: sampling.group_size" in text


@pytest.mark.parametrize("body", ["a: [", "a: 1\na: 2"])
def test_a_broken_yaml_file_is_named(calls, start: Path, capsys, body: str):
    path = write_experiment(start / "own", body)
    assert cli.main(["--config-dir", "own", "+experiment=mine"]) == 2
    text = capsys.readouterr().err
    assert str(path) in text and "Traceback" not in text


def test_problems_of_values_are_found_before_anything_is_written(calls, start: Path, capsys):
    assert tiny("sampling.group_size=1", "algorithm.lr=0", "mode=trian") == 2
    text = capsys.readouterr().err
    assert "3 problems" in text and "did you mean train?" in text
    assert list(start.iterdir()) == []


def test_no_experiment_lists_those_that_exist(calls, start: Path, capsys):
    assert cli.main([]) == 2
    assert cli.main(["-m", "seed=1,2"]) == 2
    assert capsys.readouterr().err.count("math, math_tiny") == 2
    assert list(start.iterdir()) == []


@pytest.mark.parametrize(
    ("seed", "code", "text"),
    [
        (11, 2, "some.key = 1: bad. Remedy: mend it"),
        (12, 3, "the grader is gone"),
        (13, 130, "interrupted"),
        (14, 130, "interrupted"),
        (15, 1, "unexpected error, ValueError: a bug"),
        (16, 3, "the disk is full (x.parquet)"),
    ],
)
def test_exit_codes_without_traceback(calls, capsys, seed: int, code: int, text: str):
    assert tiny(f"seed={seed}") == code
    said = capsys.readouterr().err
    assert text in said and "Traceback" not in said
    if code in (1, 3, 130):
        assert f"resume={calls[0].run_dir}" in said
    assert calls[0].run_dir.exists() == (code != 2)
    if code == 1:
        assert "Traceback" in (calls[0].run_dir / "error.log").read_text()


def test_debug_shows_the_traceback_of_a_bug(calls, capsys, monkeypatch):
    monkeypatch.setenv("EVOJAX_DEBUG", "1")
    assert tiny("seed=15") == 1
    assert "Traceback" in capsys.readouterr().err


def test_multirun_makes_one_directory_per_job_and_returns_the_worst_code(calls, start: Path):
    assert tiny("-m", "seed=1,12,11,2") == 3
    assert [call.cfg.seed for call in calls] == [1, 12, 11, 2]
    assert [call.run_dir.name for call in calls] == [f"{n}-math_tiny" for n in range(4)]
    assert tiny("seed=1,2", "hydra.mode=MULTIRUN") == 0
    assert len({call.run_dir.parent for call in calls}) == 2


def test_multirun_over_experiments(calls, start: Path):
    assert cli.main(["-m", "+experiment=math,math_tiny"]) == 0
    assert [call.cfg.experiment for call in calls] == ["math", "math_tiny"]


def test_an_interrupt_ends_the_whole_multirun(calls):
    assert tiny("-m", "seed=1,14,2") == 130
    assert [call.cfg.seed for call in calls] == [1, 14]


def test_a_sweep_without_multirun_is_refused(calls, capsys):
    assert tiny("seed=1,2") == 2
    assert "Traceback" not in capsys.readouterr().err and not calls


def test_case_E03_the_given_tree_is_the_one_that_runs(calls, start: Path):
    """A version checked out elsewhere must run as it is, not as evojax happens to ship it."""
    tree = cli.paths.merge_trees([conf_dir()], start / "w" / "conf")
    file = tree / "algorithm" / "grpo_clip_higher.yaml"
    file.write_text(file.read_text().replace("eps_high: 0.28", "eps_high: 0.31"))
    assert cli.main(["--config-dir", "w/conf", "+experiment=math_tiny", "mode=train"]) == 0
    assert calls[0].cfg.algorithm.eps_high == 0.31 and calls[0].tree == tree
    run_dir = calls[0].run_dir
    assert cli.main([f"resume={run_dir}"]) == 0
    assert calls[1].cfg.algorithm.eps_high == 0.31 and calls[1].tree == tree


def test_a_partial_tree_is_laid_over_the_shipped_one(calls, start: Path):
    write_experiment(start / "own", "algorithm: {lr: 0.125}")
    (start / "own" / "sampling").mkdir()
    (start / "own" / "sampling" / "default.yaml").write_text("temperature: 0.75\n")
    (start / "own" / "policy").mkdir()
    assert cli.main(["--config-dir", "own", "+experiment=mine", "policy=random_tiny"]) == 0
    call = calls[0]
    assert call.cfg.algorithm.lr == 0.125 and call.cfg.sampling.temperature == 0.75
    assert call.tree == call.run_dir / "conf"
    assert (call.tree / "experiment" / "mine.yaml").is_file()
    assert yaml.safe_load((call.tree / "sampling" / "default.yaml").read_text()) == {
        "temperature": 0.75
    }
    assert (call.tree / "config.yaml").is_file()


def test_a_search_path_adds_files_below_the_shipped_ones(calls, start: Path):
    write_experiment(start / "more", "algorithm: {lr: 0.5}", name="extra")
    write_experiment(start / "more", "algorithm: {lr: 0.5}", name="math_tiny")
    path = f"hydra.searchpath=[file://{start}/more]"
    assert cli.main([path, "+experiment=extra", "policy=random_tiny"]) == 0
    assert tiny(path) == 0
    assert [call.cfg.algorithm.lr for call in calls] == [0.5, 0.003]
    text = (calls[1].tree / "experiment" / "math_tiny.yaml").read_text()
    assert text == (conf_dir() / "experiment" / "math_tiny.yaml").read_text()


def test_rerun_from_a_pickle_is_not_offered(calls, capsys):
    assert tiny("--experimental-rerun", "x.pickle") == 2
    assert "resume=" in capsys.readouterr().err


def test_a_refused_run_leaves_other_files_alone(calls, start: Path):
    (start / "out").mkdir()
    assert tiny("seed=11", "hydra.run.dir=out") == 2
    assert not (start / "out").exists()
    (start / "out" / "kept").mkdir(parents=True)
    (start / "out" / "evojax.log").write_text("x")
    cli.rundir.discard_if_unused(start / "out")
    assert (start / "out" / "evojax.log").exists()


def test_config_dir_must_exist(calls, capsys):
    assert cli.main(["--config-dir", "nowhere", "+experiment=math"]) == 2
    assert "--config-dir" in capsys.readouterr().err


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_case_H07_relative_paths_mean_the_start_directory(calls, start: Path, chdir: str):
    (start / "x.jsonl").write_text("{}\n")
    (start / "own").mkdir()
    write_experiment(start / "own", "output_root: here", name="paths")
    arguments = [
        "--config-dir",
        "own",
        "+experiment=paths",
        "domain.path=x.jsonl",
        "policy=random_tiny",
        f"hydra.job.chdir={chdir}",
    ]
    assert cli.main(arguments) == 0
    call = calls[0]
    assert call.cfg.domain.path == str(start / "x.jsonl")
    assert call.cfg.output_root == str(start / "here")
    assert call.run_dir.parent == start / "here" / "paths"
    assert call.cfg.evolution.repo == "private"
    assert f"domain.path='{start}/x.jsonl'" in call.over


def test_cfg_job_and_help_do_not_make_a_run(start: Path):
    shown = program("--cfg", "job", "+experiment=math", "seed=4", cwd=start)
    assert shown.returncode == 0, shown.stderr
    assert OmegaConf.create(shown.stdout).seed == 4
    helped = program("--help", cwd=start)
    assert helped.returncode == 0 and "Exit codes" in helped.stdout
    assert program("--hydra-help", cwd=start).returncode == 0
    assert program("--no-such-flag", cwd=start).returncode == 2
    assert list(start.iterdir()) == []


_WORKER = """
import json, os, signal, sys, time, types
module = types.ModuleType("evojax.run")
def dispatch(cfg, run_dir, overrides, tree):
    (run_dir / "run.json").write_text(json.dumps({"seed": cfg.seed, "pid": os.getpid()}))
    print("begun", flush=True)
    if cfg.seed == 99:
        time.sleep(60)
    return 3 if cfg.seed == 2 else 0
module.dispatch = dispatch
sys.modules["evojax.run"] = module
"""


def _recorded(start: Path) -> dict[str, str]:
    """Environment in which every Python process, workers included, has the recorder."""
    (start / "site").mkdir()
    (start / "site" / "sitecustomize.py").write_text(_WORKER)
    return {**os.environ, "PYTHONPATH": f"{start / 'site'}{os.pathsep}{ROOT}"}


def test_joblib_launcher_runs_jobs_in_workers_and_returns_the_worst_code(start: Path):
    arguments = [
        "+experiment=math_tiny",
        "-m",
        "seed=1,2",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "evojax.main", *arguments],
        cwd=start,
        env=_recorded(start),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    runs = [json.loads(p.read_text()) for p in sorted(start.glob("outputs/multirun/*/*/run.json"))]
    assert [run["seed"] for run in runs] == [1, 2]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_130(start: Path, signum: int):
    # A shell in the background lets its children ignore Ctrl-C, so the handler is put back first.
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "runpy.run_module('evojax.main', run_name='__main__', alter_sys=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "+experiment=math_tiny", "seed=99"],
        cwd=start,
        env=_recorded(start),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().strip() == "begun"
    process.send_signal(signum)
    assert process.wait(timeout=60) == 130
    said = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    assert "interrupted" in said and "resume=" in said and "Traceback" not in said
