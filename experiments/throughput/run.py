"""evojax beside TRL on the same machine, model, items and shapes, one after the other.

    python -m experiments.throughput.run [--shapes main_job medium long] [--repeats 3]

Each side is a process of its own; they alternate and never run at once. A row that
``results.jsonl`` already holds is not measured again, so the study can be stopped and gone on with.
``--tune`` measures the peer's micro-batch sizes first; the fastest one is used from then on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evojax.bench.shapes import SHAPES, Shape
from evojax.policy.tokenizer import HFTokenizer
from experiments.study import rows_of
from experiments.throughput.job import make_job
from experiments.throughput.peer_env import TUNED, peer_python
from experiments.throughput.table import row_of, write

HERE = Path(__file__).resolve().parent
TOP = HERE.parent.parent
STEPS = {"main_job": 8, "medium": 3, "long": 2}  # timed, after the warm-up
PEER_MICRO = {"main_job": 32, "medium": 16, "long": 8}  # sequences a backward pass; see --tune
TUNING = (8, 16, 32, 64)
LOADED = 0.5  # load average of the last minute from which a warning is given
KEY = ("kind", "side", "shape", "dtype", "reward", "repeat", "micro")


def order(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What to measure, in order: within a repeat the sides alternate, and so does who is first."""
    names = [] if options.peer_only else ["evojax"]
    names += [] if options.ours_only else ["trl"]
    sides = [(name, dtype) for dtype in options.dtypes for name in names]
    for repeat in range(options.repeats):
        for shape in options.shapes:
            for reward in options.rewards:
                if reward == "natural" and SHAPES[shape].forced:
                    continue  # whole budgets of forced tokens have no natural reward
                for side, dtype in sides if repeat % 2 == 0 else sides[::-1]:
                    yield {"kind": "run", "side": side, "shape": shape, "dtype": dtype,
                           "reward": reward, "repeat": repeat}  # fmt: skip


def tuning(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One timed step of the peer for each micro-batch size, shape and dtype."""
    for shape in options.shapes:
        sequences = SHAPES[shape].prompts * SHAPES[shape].samples
        for dtype in options.dtypes:
            for micro in (m for m in TUNING if m <= sequences):
                yield {"kind": "tuning", "side": "trl", "shape": shape, "dtype": dtype,
                       "reward": "live", "repeat": 0, "micro": micro}  # fmt: skip


def best_micro(rows: Sequence[dict[str, Any]], want: dict[str, Any], given: int | None) -> int:
    """The micro-batch size of a run: as given, else the fastest of the tuning, else the default."""
    shape = SHAPES[want["shape"]]
    if want["side"] == "evojax":
        return shape.micro_batch_groups if given is None else given
    tuned = [
        r for r in rows if r["kind"] == "tuning"
        and all(r[k] == want[k] for k in ("side", "shape", "dtype"))
    ]  # fmt: skip
    if tuned:
        return min(tuned, key=lambda r: r["step_s"])["micro"]
    return PEER_MICRO[shape.name]


def command(side: str, job: Path, peer: Path | None) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one side."""
    if side == "evojax":
        return [sys.executable, "-m", "experiments.throughput.ours", str(job)], dict(os.environ)
    return [str(peer), str(HERE / "peer.py"), str(job)], {**os.environ, **TUNED}


def measured(side: str, job: dict[str, Any], scratch: Path, peer: Path | None) -> dict[str, Any]:
    """Run one side and return what it says, and where and when that was.

    Raises:
        SystemExit: the side failed; its standard error has been shown.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "job.json"
    path.write_text(json.dumps(job))
    load = os.getloadavg()[0]
    if load > LOADED:
        print(f"warning: load average {load:.1f}; the figures need a quiet machine", flush=True)
    words, environment = command(side, path, peer)
    began = time.perf_counter()
    done = subprocess.run(words, cwd=TOP, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{side} ended with code {done.returncode}: {' '.join(words)}")
    (scratch / "lines.jsonl").write_text(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        **row_of(lines, job),
        "items_sha256": job["items_sha256"],
        "load_1m": load,
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version() if side == "evojax" else None,
        "commit": _commit(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "process_s": round(time.perf_counter() - began, 1),
    }


def _commit() -> str:
    """Commit of this checkout, with ``+`` when files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=TOP, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "evojax", "conf")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def run(options: argparse.Namespace) -> None:
    """Measure what is missing, row by row, then write the table."""
    model = options.model or _smollm2()
    tokenizer = HFTokenizer.load(model)
    wanted = list(tuning(options) if options.tune else order(options))
    peer = None
    if any(want["side"] == "trl" for want in wanted):
        peer = peer_python(options.peer_python, options.output_root / "peer")
    results = options.results
    for number, want in enumerate(wanted, start=1):
        rows = rows_of(results)
        want = {"micro": best_micro(rows, want, options.micro_batch_groups), **want}
        label = " ".join(str(want[k]) for k in KEY)
        if any(all(row[k] == want[k] for k in KEY) for row in rows):
            print(f"{number}/{len(wanted)} {label}: in the table already", flush=True)
            continue
        print(f"{number}/{len(wanted)} {label} ...", flush=True)
        shape: Shape = SHAPES[want["shape"]]
        if options.tune:
            shape = replace(shape, warmup=1)
        timed = 1 if options.tune else options.steps or STEPS[shape.name]
        job = make_job(
            model, tokenizer, shape, dtype=want["dtype"], reward=want["reward"],
            steps=shape.warmup + timed, micro=want["micro"],
        )  # fmt: skip
        scratch = options.output_root / "-".join(str(want[k]) for k in KEY)
        row = {**want, **measured(want["side"], job, scratch, peer)}
        with results.open("a") as file:
            file.write(json.dumps(row, sort_keys=True) + "\n")
        print(f"  {row['step_s']:.2f} s a step (rollout {row['rollout_s']:.2f}, update "
              f"{row['update_s']:.2f}), {row['peak_rss_gb']:.1f} GB", flush=True)  # fmt: skip
    if results == HERE / "results.jsonl":
        write(rows_of(results), HERE, TOP / "README.md")


def _smollm2() -> Path:
    from evojax.policy.smollm2 import smollm2_directory

    return smollm2_directory()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    words = argparse.ArgumentParser(
        prog="python -m experiments.throughput.run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    words.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    words.add_argument("--repeats", type=int, default=3)
    words.add_argument("--steps", type=int, help=f"timed steps of each run; default {STEPS}")
    words.add_argument("--dtypes", nargs="+", choices=["f32", "bf16"], default=["f32", "bf16"])
    words.add_argument(
        "--rewards", nargs="+", choices=["live", "natural"], default=["live", "natural"]
    )
    words.add_argument("--micro-batch-groups", type=int, help="evojax; the shape's by default")
    words.add_argument("--tune", action="store_true", help="measure the peer's micro sizes only")
    only = words.add_mutually_exclusive_group()
    only.add_argument("--ours-only", action="store_true")
    only.add_argument("--peer-only", action="store_true")
    words.add_argument("--peer-python", type=Path, help="made under --output-root by default")
    words.add_argument("--model", type=Path, help="Hugging Face directory; default SmolLM2-135M")
    words.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    words.add_argument("--output-root", type=Path, default=TOP / "outputs/studies/throughput")
    return words


if __name__ == "__main__":
    run(parser().parse_args())
