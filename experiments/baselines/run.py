"""Six recipes on the math domain, three seeds each: what does each gain, at equal rollouts?

    python -m experiments.baselines.run [--experiment math] [--seeds 0 1 2] [--steps 10]

Seed by seed, each run is a process of its own, with the overrides that one Hydra multirun would
give it. ``--print`` shows that multirun as a command; ``--gather DIR`` takes the runs of a multirun
into the table. A run that was cut short is resumed; one that the table has is not made again.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evojax.evidence.reader import load as load_evidence
from evojax.evolution.standing import BASE, FIRST
from evojax.evolution.store import VersionStore
from evojax.overrides import parse
from evojax.rundir import saved_overrides
from experiments.baselines.plot import draw
from experiments.baselines.stats import markdown, summarise
from experiments.study import append, measured, read_json, replace_block, rows_of, run_missing

HERE = Path(__file__).resolve().parent
CONF = HERE / "conf"
PLAIN = "base"
STEPS = 10  # of every run, as published
RECIPES = (PLAIN, "grpo_ch", "gspo_ch", "ragen_v1", "ragen_v2", "group_variance")


def overrides(experiment: str, steps: int) -> list[str]:
    """What every run has in common."""
    return [f"+experiment={experiment}", "mode=train", f"train.steps={steps}"]


def multirun(experiment: str, steps: int, recipes: Sequence[str], seeds: Sequence[int]) -> str:
    """The whole study as one command."""
    words = [
        "python -m evojax.main -m --config-dir experiments/baselines/conf",
        *overrides(experiment, steps),
        f"+recipe={','.join(recipes)}",
        f"seed={','.join(map(str, seeds))}",
        "live=false",
    ]
    return " ".join(words)


def details(run_dir: Path) -> dict[str, Any]:
    """What a run's row holds beside the summary: scores of every item, tokens, what was left out.

    Shares are over groups drawn: dead (all rewards equal) and filtered (live, but nothing of it in
    the loss); ``clip_share`` is over the packed tokens of all optimizer steps.
    """
    store = VersionStore(run_dir)
    first = store.require(FIRST)
    evidence = load_evidence(store.path(FIRST))
    groups = defaultdict(list)
    for row in evidence.rollouts("train").to_pylist():
        groups[row["step"], row["refill_round"], row["group"]].append(row)
    dead = [_dead(members) for members in groups.values()]
    kept = [any(row["kept"] for row in members) for members in groups.values()]
    updates = [row for row in evidence.updates().to_pylist() if row["clip_high"] is not None]
    clipped = [row["clip_high"] + row["clip_low"] for row in updates]
    return {
        "base_scores": store.require(BASE).scores,
        "scores": first.scores,
        "steps": first.steps,
        "tokens": first.totals["tokens"],
        "optimizer_steps": first.totals["optimizer_steps"],
        "dead_share": float(np.mean(dead)),
        "filtered_share": float(
            np.mean([k == 0 and d == 0 for k, d in zip(kept, dead, strict=True)])
        ),
        "clip_share": float(np.nanmean(clipped)) if clipped else 0.0,
    }


def _dead(members: Sequence[Mapping[str, Any]]) -> bool:
    rewards = {row["reward"] for row in members if row["reward"] is not None}
    return len(rewards) < 2


def gather(sweep: Path, table: Path) -> None:
    """Append the finished runs of a multirun that the table lacks.

    Raises:
        SystemExit: the directory holds no finished run.
    """
    done = {(row["arm"], row["seed"]) for row in rows_of(table)}
    found = sorted(sweep.glob("*/summary.json"))
    if not found:
        raise SystemExit(f"no finished run in {sweep}")
    for path in found:
        given = {o.key_or_group: o.value() for o in parse(saved_overrides(path.parent))}
        summary = read_json(path)
        key = {"arm": given["recipe"], "seed": summary["seed"]}
        if tuple(key.values()) not in done:
            append(table, {**key, **measured(summary, summary["wall_s"]), **details(path.parent)})


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the table lacks, then write the table, the summary and the picture."""
    args = parser().parse_args(argv)
    if args.print:
        print(multirun(args.experiment, args.steps, args.recipes, args.seeds))
        return
    published = args.experiment == "math" and args.steps == STEPS
    place = HERE if published else args.output_root / f"{args.experiment}-{args.steps}"
    place.mkdir(parents=True, exist_ok=True)
    table = place / "results.jsonl"
    if args.gather:
        gather(args.gather, table)
    else:
        wanted = [{"arm": arm, "seed": seed} for seed in args.seeds for arm in args.recipes]
        common = ["--config-dir", str(CONF), *overrides(args.experiment, args.steps)]
        arguments = {arm: [*common, f"+recipe={arm}"] for arm in args.recipes}
        run_missing(table, wanted, arguments, place_of_runs(args), details)
    entries = summarise(rows_of(table), RECIPES, PLAIN)
    (place / "summary.json").write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    draw(entries, f"Gain over the untrained policy, {args.experiment}", place / "results.svg")
    if published:
        replace_block(HERE / "README.md", markdown(entries))
        replace_block(HERE.parents[1] / "README.md", markdown(entries), "recipes")
    print(markdown(entries))


def place_of_runs(args: argparse.Namespace) -> Path:
    """Where the run directories go: apart for every length, for a row must be of one length."""
    return (args.output_root / f"{args.experiment}-{args.steps}" / "runs").resolve()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    words = argparse.ArgumentParser(
        prog="python -m experiments.baselines.run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    words.add_argument("--experiment", choices=["math", "math_tiny"], default="math")
    words.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    words.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    words.add_argument("--steps", type=int, default=STEPS, help="updates of each run")
    words.add_argument("--output-root", type=Path, default=Path("outputs/studies/baselines"))
    words.add_argument("--print", action="store_true", help="show the multirun, run nothing")
    words.add_argument("--gather", type=Path, help="directory of a finished multirun")
    return words


if __name__ == "__main__":
    main()
