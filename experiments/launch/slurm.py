"""Slurm: ``python -m experiments.launch.slurm job|sweep ...``.

``job`` prints an ``sbatch`` command with its script: one run on one or more nodes, which puts
itself back into the queue when it is preempted and then resumes. ``sweep`` prints a multirun in
which Hydra's submitit launcher (extra ``slurm``) makes one job of every run. ``--execute`` runs
what is printed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from experiments.launch.shell import (
    Command,
    add_switches,
    carry_out,
    command,
    evojax_words,
    resource_name,
)

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={cpus}
#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@{grace}
{partition}set -uo pipefail
# Slurm warns the script {grace} s before it takes the nodes; evojax then saves its state.
trap 'kill -TERM "$step" 2> /dev/null' TERM
srun --kill-on-bad-exit=1 {line} &
step=$!
wait "$step"; code=$?
# A wait that a signal ended returns before the step has: wait for its own exit code.
while kill -0 "$step" 2> /dev/null; do wait "$step"; code=$?; done
case "$code" in
  3|130|137|143) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$code"
"""


def job(options: argparse.Namespace) -> list[Command]:
    """One run, queued again after a preemption."""
    distributed = ["hardware.distributed=true"] if options.nodes > 1 else []
    words = evojax_words(
        [*options.overrides, *distributed], options.hardware, options.run_dir, retries=0
    )
    partition = f"#SBATCH --partition={options.partition}\n" if options.partition else ""
    script = _SCRIPT.format(
        name=options.name,
        nodes=options.nodes,
        gpus=options.gpus,
        cpus=options.cpus,
        time=options.time,
        grace=options.grace,
        partition=partition,
        line=shlex.join(words),
    )
    return [command("sbatch", text=script)]


def sweep(options: argparse.Namespace) -> list[Command]:
    """One job for every run of a multirun."""
    minutes = [int(part) for part in options.time.split(":")]
    launcher = [
        "hydra/launcher=submitit_slurm",
        f"hydra.launcher.name={options.name}",
        f"hydra.launcher.gpus_per_node={options.gpus}",
        f"hydra.launcher.cpus_per_task={options.cpus}",
        f"hydra.launcher.timeout_min={minutes[0] * 60 + minutes[1]}",
    ]
    if options.partition:
        launcher.append(f"hydra.launcher.partition={options.partition}")
    words = ["python", "-m", "evojax.main", "-m", *options.overrides]
    return [command(*words, f"hardware={options.hardware}", *launcher)]


ACTIONS = {"job": job, "sweep": sweep}


def _clock(text: str) -> str:
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 12:00:00")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.launch.slurm")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, act in ACTIONS.items():
        sub = actions.add_parser(name, help=act.__doc__)
        sub.add_argument("--name", type=resource_name, default="evojax")
        sub.add_argument("--hardware", required=True, help="option of conf/hardware")
        sub.add_argument("--gpus", type=int, required=True, help="of a node")
        sub.add_argument("--cpus", type=int, default=16, help="of a task")
        sub.add_argument("--time", type=_clock, default="12:00:00", help="hours:minutes:seconds")
        sub.add_argument("--partition")
        add_switches(sub)
        if name == "job":
            sub.add_argument("--nodes", type=int, default=1)
            sub.add_argument("--grace", type=int, default=300, help="seconds to save the state in")
            sub.add_argument("--run-dir", required=True, help="seen by every node")
        sub.add_argument("overrides", nargs="+", help="of evojax, e.g. +experiment=math")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's text."""
    options = _parser().parse_args(argv)
    return carry_out(ACTIONS[options.action](options), options.execute)


if __name__ == "__main__":
    sys.exit(main())
