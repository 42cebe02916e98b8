"""Cloud TPU VMs: ``python -m experiments.launch.tpu_vm create|queue|setup|run|log|delete ...``.

Prints the ``gcloud`` commands; ``--execute`` runs them. Every host of a slice runs the same
command, and JAX finds the others by itself (``hardware.distributed=true``). The run directory must
be one that all hosts see (a mounted bucket or NFS).
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

# Generation in conf/hardware/tpu_<generation>_<size>.yaml: accelerator prefix, runtime version.
GENERATIONS = {
    "v5e": ("v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": ("v5p", "v2-alpha-tpuv5"),
    "v6e": ("v6e", "v2-alpha-tpuv6e"),
}
_GCLOUD = ("gcloud", "compute", "tpus")


def accelerator(hardware: str) -> tuple[str, str]:
    """Accelerator type and runtime version of a hardware preset.

    Raises:
        argparse.ArgumentTypeError: it is no TPU preset.

    >>> accelerator("tpu_v5e_16")
    ('v5litepod-16', 'v2-alpha-tpuv5-lite')
    """
    kind, _, rest = hardware.partition("_")
    generation, _, size = rest.partition("_")
    if kind != "tpu" or generation not in GENERATIONS or not size.isdigit():
        raise argparse.ArgumentTypeError(f"{hardware!r} is no preset like tpu_v5e_16")
    prefix, version = GENERATIONS[generation]
    return f"{prefix}-{size}", version


def _place(options: argparse.Namespace) -> tuple[str, ...]:
    return ("--zone", options.zone, "--project", options.project)


def _machine(options: argparse.Namespace) -> tuple[str, ...]:
    kind, version = accelerator(options.hardware)
    return ("--accelerator-type", kind, f"--{options.version_flag}", version)


def create(options: argparse.Namespace) -> list[Command]:
    """A slice, at once."""
    options.version_flag = "version"
    spot = ("--spot",) if options.spot else ()
    words = (*_GCLOUD, "tpu-vm", "create", options.name, *_place(options), *_machine(options))
    return [command(*words, *spot)]


def queue(options: argparse.Namespace) -> list[Command]:
    """A slice, as soon as there is one; and how to look at the request."""
    options.version_flag = "runtime-version"
    spot = ("--spot",) if options.spot else ()
    base = (*_GCLOUD, "queued-resources")
    words = (*base, "create", options.name, "--node-id", options.name, *_place(options))
    asked = command(*words, *_machine(options), "--valid-until-duration", options.valid_for, *spot)
    return [asked, command(*base, "describe", options.name, *_place(options))]


def _everywhere(options: argparse.Namespace, script: str, worker: str = "all") -> Command:
    return command(
        *_GCLOUD, "tpu-vm", "ssh", options.name, *_place(options),
        f"--worker={worker}", f"--command={script}",
    )  # fmt: skip


def setup(options: argparse.Namespace) -> list[Command]:
    """The code at one commit, in a virtual environment, on every host."""
    steps = [
        f"rm -rf evojax && git clone --quiet {shlex.quote(options.repo)} evojax",
        f"cd evojax && git checkout --quiet {shlex.quote(options.commit)}",
        "python3 -m venv .venv",
        ".venv/bin/pip install --quiet --require-hashes -r requirements.lock",
        ".venv/bin/pip install --quiet --no-build-isolation --editable '.[tpu]'",
        ".venv/bin/python -c 'import jax; print(jax.local_device_count())'",
    ]
    return [_everywhere(options, " && ".join(steps))]


def run(options: argparse.Namespace) -> list[Command]:
    """The run, on every host, detached from the connection."""
    overrides = [*options.overrides, "hardware.distributed=true"]
    words = evojax_words(overrides, options.hardware, options.run_dir, options.retries)
    line = shlex.join([".venv/bin/python", *words[1:]]).replace(
        " -- python -m", " -- .venv/bin/python -m"
    )
    script = f"cd evojax && nohup setsid {line} > evojax.log 2>&1 < /dev/null & sleep 1"
    return [_everywhere(options, script)]


def log(options: argparse.Namespace) -> list[Command]:
    """The last lines of the first host, which writes the report."""
    return [_everywhere(options, "tail -n 50 evojax/evojax.log", worker="0")]


def delete(options: argparse.Namespace) -> list[Command]:
    """Give the slice back; with ``--queued`` the request too."""
    if options.queued:
        words = (*_GCLOUD, "queued-resources", "delete", options.name, *_place(options))
        return [command(*words, "--force", "--quiet")]
    return [command(*_GCLOUD, "tpu-vm", "delete", options.name, *_place(options), "--quiet")]


ACTIONS = {
    "create": create, "queue": queue, "setup": setup, "run": run, "log": log, "delete": delete,
}  # fmt: skip


def hardware_option(text: str) -> str:
    """The name of a slice that ``accelerator`` knows, as argparse's type."""
    accelerator(text)
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.launch.tpu_vm")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, act in ACTIONS.items():
        sub = actions.add_parser(name, help=act.__doc__)
        sub.add_argument("--name", type=resource_name, required=True)
        sub.add_argument("--zone", required=True)
        sub.add_argument("--project", required=True)
        add_switches(sub)
        if name in ("create", "queue", "run"):
            sub.add_argument("--hardware", type=hardware_option, required=True)
        if name in ("create", "queue"):
            sub.add_argument("--spot", action="store_true", help="cheaper, may be preempted")
        if name == "queue":
            sub.add_argument("--valid-for", default="6h", help="how long the request stands")
        if name == "setup":
            sub.add_argument("--repo", required=True, help="address that every host can clone")
            sub.add_argument("--commit", required=True)
        if name == "run":
            sub.add_argument("--run-dir", required=True, help="seen by every host")
            sub.add_argument("--retries", type=int, default=10)
            sub.add_argument("overrides", nargs="+", help="of evojax, e.g. +experiment=math")
        if name == "delete":
            sub.add_argument("--queued", action="store_true", help="made by queue")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's text."""
    options = _parser().parse_args(argv)
    return carry_out(ACTIONS[options.action](options), options.execute)


if __name__ == "__main__":
    sys.exit(main())
