"""The whole loop on a tiny model: outputs, harness, resume after a kill, stored modes."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evojax.cli import main
from evojax.evidence.reader import load
from evojax.evolution.reproduce import same_rollouts
from evojax.policy.hf import load_hf

BUDGET = ["train.steps=12", "train.candidate_steps=6", "train.checkpoint_every=4"]
BUDGET += ["train.prompts_per_step=8", "evolution.gate.resamples=500"]


def run_dir_of(root: Path) -> Path:
    (found,) = (root / "math_tiny").iterdir()
    return found


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def git(run: Path, *args: str) -> str:
    command = ["git", "-C", str(run / "harness"), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run."""
    root = tmp_path_factory.mktemp("straight")
    assert main(["+experiment=math_tiny", f"output_root={root}", *BUDGET]) == 0
    return run_dir_of(root)


def test_summary_has_its_schema(finished: Path) -> None:
    found = summary_of(finished)
    assert found["schema"] == 1
    assert {"experiment", "seed", "device", "wall_s", "base", "versions", "promoted", "final",
            "rollouts", "updates", "report"} <= found.keys()  # fmt: skip
    names = [v["version"] for v in found["versions"]]
    assert names[:2] == ["v000", "v001"]
    assert "r1-control" in names and len(names) == 5
    for version in found["versions"]:
        assert 0 <= version["ci95"][0] <= version["score"] <= version["ci95"][1] <= 1
        if version["role"] == "candidate":
            assert version["delta"]["vs"] == "r1-control"
            assert version["verdict"] in ("promoted", "rejected", "undecided", "invalid")
            assert "one training seed" in version["words"]
    assert found["final"]["audit"]["ci95"][0] <= found["final"]["audit"]["score"]
    assert found["updates"] + 0 <= 12 + 3 * 6


def test_arms_see_the_same_first_items_and_differ_in_their_config(finished: Path) -> None:
    runs = {
        v["version"]: load(finished / "versions" / v["version"])
        for v in summary_of(finished)["versions"]
    }
    arms = [v for v in runs if v not in ("v000", "v001")]
    firsts = []
    for arm in arms:
        rows = runs[arm].rollouts("train").to_pylist()
        firsts.append([r["item"] for r in rows if r["step"] == 12 and r["refill_round"] == 0])
    assert firsts[0] == firsts[1] == firsts[2]
    hashes = [
        json.loads((finished / "versions" / a / "result.json").read_text())["config_hash"]
        for a in arms
    ]
    assert len(set(hashes)) == 3


def test_case_E03_the_config_that_ran_is_the_one_committed(finished: Path) -> None:
    plan = json.loads((finished / "rounds" / "r1.json").read_text())
    for candidate in plan["candidates"]:
        diff = git(finished, "show", candidate["commit"], "--", "conf")
        for key, value in candidate["proposal"]["edits"].items():
            name = key.rpartition(".")[2]
            assert re.search(rf"^\+\s*{name}: {re.escape(str(value))}", diff, re.MULTILINE)
        result = json.loads(
            (finished / "versions" / candidate["version"] / "result.json").read_text()
        )
        assert result["commit"] == candidate["commit"]


def test_harness_reads_as_a_story(finished: Path) -> None:
    plan = json.loads((finished / "rounds" / "r1.json").read_text())
    for candidate in plan["candidates"]:
        message = git(finished, "show", "-s", "--format=%B", candidate["commit"])
        for name in ("Version", "Parent", "Factor", "Hypothesis", "Predicts", "Backtest"):
            assert f"Evojax-{name}: " in message
        changed = git(finished, "show", "--name-only", "--format=", candidate["commit"]).split()
        assert changed and all(path.startswith("conf/") for path in changed)
    everything = git(finished, "log", "--all", "--format=%B")
    for version in ("v000", "v001", "r1-control", "v002", "v003"):
        assert f"Evojax-Version: {version}\n" in everything
    assert everything.count("Evojax-Verdict: ") >= 3
    assert git(finished, "status", "--porcelain") == ""


def test_ledger_audit_and_leftovers(finished: Path) -> None:
    with sqlite3.connect(finished / "ledger.sqlite") as db:
        versions = {row[0] for row in db.execute("SELECT version FROM versions")}
        cases = db.execute("SELECT count(*) FROM cases").fetchone()[0]
    assert versions == {"v000", "v001", "r1-control", "v002", "v003"}
    assert cases == 2
    assert json.loads((finished / "audit.json").read_text())["opened"] == 2
    assert not list(finished.glob("versions/*/checkpoint"))
    assert not [p for p in finished.iterdir() if p.name.startswith((".seed", ".rehearsal"))]
    assert (finished / "tensorboard" / "v001").is_dir()
    health = (finished / "versions" / "v001" / "health.md").read_text()
    assert "dead_group_share" in health


def test_saved_version_is_a_hugging_face_directory(finished: Path) -> None:
    directory = finished / "versions" / "v001" / "policy"
    assert {p.name for p in directory.iterdir()} >= {"config.json", "model.safetensors"}
    cfg, params = load_hf(directory)
    assert cfg.vocab_size == 16 and params


def comparable(run: Path) -> dict[str, Any]:
    """What must not depend on interruptions: everything but times and paths."""
    found = summary_of(run)
    for key in ("wall_s", "report", "harness", "rerun"):
        found.pop(key)
    for version in found["versions"]:
        version.pop("seconds")
        version.pop("commit")  # holds the time of the commit
    return found


def start(root: Path, *args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "evojax.main", *args, "live=false"]
    log = (root / "log.txt").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, cwd=root)


def wait_for(process: subprocess.Popen[bytes], pattern: str, root: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if any(root.glob(pattern)):
            return
        assert process.poll() is None, (root / "log.txt").read_text()[-3000:]
        time.sleep(0.02)
    raise AssertionError(f"{pattern} did not appear:\n{(root / 'log.txt').read_text()[-3000:]}")


def test_case_G14_killed_and_interrupted_run_ends_with_the_same_numbers(
    finished: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, "+experiment=math_tiny", f"output_root={tmp_path}", *BUDGET)
    wait_for(process, "math_tiny/*/versions/v001/evidence/updates-000006.parquet", tmp_path)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    run = run_dir_of(tmp_path)

    process = start(tmp_path, f"resume={run}")
    wait_for(process, "math_tiny/*/versions/r1-control/evidence/updates-000013.parquet", tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    assert "resume=" in (tmp_path / "log.txt").read_text()

    process = start(tmp_path, f"resume={run}")
    assert process.wait() == 0, (tmp_path / "log.txt").read_text()[-3000:]
    assert comparable(run) == comparable(finished)
    for version in ("v001", "r1-control", "v002", "v003"):
        straight, resumed = (load(r / "versions" / version) for r in (finished, run))
        assert same_rollouts(straight, resumed)
        assert straight.updates()["loss"].equals(resumed.updates()["loss"])


def test_a_finished_run_is_resumed_in_no_time_and_unchanged(finished: Path) -> None:
    before = comparable(finished)
    assert main([f"resume={finished}"]) == 0
    assert comparable(finished) == before


def test_checked_out_version_trains_to_the_same_rollouts(finished: Path, tmp_path: Path) -> None:
    (tree,) = (finished / "worktrees").glob("*v002*")
    args = ["--config-dir", str(tree / "conf"), "+experiment=math_tiny", "mode=train"]
    assert main([*args, f"output_root={tmp_path}"]) == 0
    found = json.loads((run_dir_of(tmp_path) / "reproduction.json").read_text())
    assert found["version"] == "v002"
    assert found["same_rollouts"] is True
    assert found["score"] == found["source_score"]


def test_two_rounds_never_try_the_same_edit_twice_from_one_parent(tmp_path: Path) -> None:
    more = ["evolution.rounds=2", "evolution.candidates=1"]
    assert main(["+experiment=math_tiny", f"output_root={tmp_path}", *BUDGET, *more]) == 0
    run = run_dir_of(tmp_path)
    plans = [json.loads((run / "rounds" / f"r{n}.json").read_text()) for n in (1, 2)]
    tried = [(p["parent"], str(c["proposal"]["edits"])) for p in plans for c in p["candidates"]]
    assert len(tried) == 2 and len(set(tried)) == 2
    names = {v["version"] for v in summary_of(run)["versions"]}
    same_parent = plans[0]["parent"] == plans[1]["parent"]
    assert ("r2-control" in names) is not same_parent
    assert {"v002", "v003", "r1-control"} <= names


def test_stored_modes(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([f"resume={finished}", "mode=evaluate", "version=v001"]) == 0
    assert "item scores identical" in capfd.readouterr().out
    assert main([f"resume={finished}", "mode=diagnose", "version=v001"]) == 0
    assert "v001: " in capfd.readouterr().out
    assert main([f"resume={finished}", "mode=backtest"]) == 0
    assert "on the rollouts of v001" in capfd.readouterr().out
    assert main([f"resume={finished}", "mode=backtest", "filter.refill_rounds=2"]) == 0
    assert "refill" in capfd.readouterr().out
    (finished / "report.html").unlink()
    assert main([f"resume={finished}", "mode=report"]) == 0
    assert (finished / "report.html").stat().st_size > 10_000


def test_what_a_stored_run_refuses(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([f"resume={finished}", "algorithm.lr=0.5"]) == 2
    assert "algorithm.lr = 0.5: the run keeps its configuration" in capfd.readouterr().err
    assert main([f"resume={finished}", "mode=evaluate", "version=v999"]) == 2
    assert "choose one of: r1-control, v000" in capfd.readouterr().err
    assert main([f"resume={finished}", "mode=backtest", "eval.samples=2"]) == 2
    assert "frozen for the loop" in capfd.readouterr().err
    assert main([f"resume={tmp_path}", "mode=report"]) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_damaged_checkpoint_falls_back_and_says_so(finished: Path, tmp_path: Path) -> None:
    """A truncated newest checkpoint costs the steps since the one before, nothing else."""
    process = start(
        tmp_path, "+experiment=math_tiny", f"output_root={tmp_path}", *BUDGET, "mode=train"
    )
    wait_for(process, "math_tiny/*/versions/v001/evidence/updates-000009.parquet", tmp_path)
    process.kill()
    process.wait()
    run = run_dir_of(tmp_path)
    newest = max((run / "versions" / "v001" / "checkpoint").glob("step_*"))
    for path in newest.rglob("manifest*"):
        os.truncate(path, 3)
    process = start(tmp_path, f"resume={run}", "mode=train")
    assert process.wait() == 0, (tmp_path / "log.txt").read_text()[-3000:]
    assert f"{newest.name} is damaged" in (tmp_path / "log.txt").read_text()
    assert same_rollouts(load(finished / "versions/v001"), load(run / "versions/v001"))
