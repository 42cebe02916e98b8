"""Two processes, one run: the same result as one process, written by process 0 alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evojax.evidence.reader import load

BUDGET = ["+experiment=math_tiny", "mode=train", "train.steps=4", "train.checkpoint_every=2"]
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


def run_dir_of(root: Path) -> Path:
    (found,) = (root / "math_tiny").iterdir()
    return found


def alone(place: Path, *args: str) -> str:
    """What a run of one process says."""
    done = subprocess.run(
        [sys.executable, "-m", "evojax.main", *args],
        cwd=place, timeout=280, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def stopped(root: Path, *args: str) -> list[str]:
    """What two processes said, stopped by a signal once the first checkpoint was there."""
    port = free_port()
    started = [start(root, number, port, *args) for number in (0, 1)]
    first = "*/math_tiny/*/versions/v001/checkpoint/step_00000002/COMPLETE.json"
    try:
        while not list(root.glob(first)):
            assert started[0].poll() is None, started[0].communicate()[0][-3000:]
            time.sleep(0.05)
        for process in started:
            process.terminate()
        texts = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [130, 0], "\n".join(texts)
    return texts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, list[str]]:
    """A run of one process; one begun by two and ended by one; and what the two said."""
    root = tmp_path_factory.mktemp("two")
    one, two = root / "one", root / "two"
    alone(root, *BUDGET, f"output_root={one}")
    several = ["hardware.distributed=true", "hardware.mesh.fsdp=2"]
    texts = stopped(root, *BUDGET, f"output_root={two}", *several)
    again = ["hardware.distributed=false", "hardware.mesh.fsdp=1"]
    said = alone(root, f"resume={run_dir_of(two)}", *again)
    assert "v001: going on after update" in said
    return run_dir_of(one), run_dir_of(two), root, texts


@pytest.mark.timeout(580)
def test_the_same_rollouts_losses_and_scores(runs: tuple[Path, Path, Path, list[str]]) -> None:
    one, two, _, _ = runs
    straight, shared = (load(run / "versions" / "v001") for run in (one, two))
    for name in ("item", "group", "sample", "token_ids", "reward", "advantage"):
        for split in ("train", "eval"):
            assert straight.rollouts(split)[name].equals(shared.rollouts(split)[name]), name
    losses, norms = (
        [e.updates()[name].to_pylist() for e in (straight, shared)]
        for name in ("loss", "grad_norm")
    )
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3), "rounding, after Adam's signs"
    summaries: list[dict[str, Any]] = [
        json.loads((run / "summary.json").read_text()) for run in (one, two)
    ]
    assert summaries[0]["final"] == summaries[1]["final"]


def test_process_0_alone_writes(runs: tuple[Path, Path, Path, list[str]]) -> None:
    _, two, root, texts = runs
    assert "fsdp 2" in texts[0] and "interrupted; go on with" in texts[0]
    assert "v001" not in texts[1] and not list((root / "process1").iterdir())
    assert [path.name for path in (root / "two" / "math_tiny").iterdir()] == [two.name]
