"""Two processes, one run: the same result as one process, written by process 0 alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evojax.evidence.reader import load

BUDGET = ["+experiment=math_tiny", "mode=train", "train.steps=3", "train.checkpoint_every=2"]
BUDGET += ["train.prompts_per_step=6", "evolution.gate.resamples=200", "live=false"]
BUDGET += ["domain.eval_items=4", "domain.audit_items=2"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(root: Path, number: int, port: int, *args: str) -> subprocess.Popen[str]:
    env = os.environ | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(number),
    }
    command = [sys.executable, "-m", "evojax.main", *args]
    place = root / f"process{number}"
    place.mkdir(exist_ok=True)
    return subprocess.Popen(
        command, env=env, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def both(root: Path, *args: str) -> list[tuple[int, str]]:
    """Exit code and output of the two processes."""
    port = free_port()
    started = [start(root, number, port, *args) for number in (0, 1)]
    try:
        texts = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, texts, strict=True)]


def run_dir_of(root: Path) -> Path:
    (found,) = (root / "math_tiny").iterdir()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, list[str]]:
    """Run of one process, run of two, the latter's root, and what the two said."""
    root = tmp_path_factory.mktemp("two")
    one, two = root / "one", root / "two"
    subprocess.run(
        [sys.executable, "-m", "evojax.main", *BUDGET, f"output_root={one}"],
        check=True, cwd=root, timeout=200, capture_output=True,
    )  # fmt: skip
    ended = both(
        root, *BUDGET, f"output_root={two}", "hardware.distributed=true", "hardware.mesh.fsdp=2"
    )
    assert [code for code, _ in ended] == [0, 0], "\n".join(text[-2500:] for _, text in ended)
    return run_dir_of(one), run_dir_of(two), root, [text for _, text in ended]


def test_the_same_rollouts_losses_and_scores(runs: tuple[Path, Path, Path, list[str]]) -> None:
    one, two, _, _ = runs
    alone, shared = (load(run / "versions" / "v001") for run in (one, two))
    for name in ("item", "group", "sample", "token_ids", "reward", "advantage"):
        for split in ("train", "eval"):
            assert alone.rollouts(split)[name].equals(shared.rollouts(split)[name]), name
    for name in ("loss", "grad_norm", "entropy_trainer", "ratio_max"):
        left, right = (e.updates()[name].to_pylist() for e in (alone, shared))
        assert left == pytest.approx(right, rel=1e-4, abs=1e-6), name
    summaries: list[dict[str, Any]] = [
        json.loads((run / "summary.json").read_text()) for run in (one, two)
    ]
    assert summaries[0]["final"] == summaries[1]["final"]


def test_process_0_alone_writes(runs: tuple[Path, Path, Path, list[str]]) -> None:
    _, two, root, texts = runs
    assert "Verdict:" in texts[0] and "fsdp 2" in texts[0]
    assert "Verdict:" not in texts[1] and not list((root / "process1").iterdir())
    assert (two / "report.html").is_file() and (two / "ledger.sqlite").is_file()
    assert len(list((root / "two" / "math_tiny").iterdir())) == 1


def test_a_stopped_run_of_two_goes_on_with_one(tmp_path: Path) -> None:
    """The checkpoint of a mesh over two processes restores in one process on one device."""
    port = free_port()
    args = [*BUDGET, f"output_root={tmp_path}", "hardware.distributed=true"]
    args += ["hardware.mesh.data=2", "train.steps=6"]
    started = [start(tmp_path, number, port, *args) for number in (0, 1)]
    pattern = "math_tiny/*/versions/v001/checkpoint/step_00000002/COMPLETE.json"
    try:
        while not list(tmp_path.glob(pattern)):
            assert started[0].poll() is None, started[0].communicate()[0][-3000:]
        for process in started:
            process.terminate()
        codes = [process.wait(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [130, 0]
    run = run_dir_of(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "evojax.main", f"resume={run}", "hardware.distributed=false",
         "hardware.mesh.data=1"],
        cwd=tmp_path, timeout=200, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "going on after update" in done.stdout + done.stderr
    assert json.loads((run / "summary.json").read_text())["updates"] <= 6
