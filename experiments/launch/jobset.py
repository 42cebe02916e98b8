"""Kubernetes: ``python -m experiments.launch.jobset apply|delete|xpk ...``.

``apply`` prints a JobSet for a TPU node pool of GKE and hands it to ``kubectl``; ``xpk`` prints the
same as a workload of that tool. A preempted job is started again by JobSet and resumes; a wrong
configuration (exit code 1 or 2) ends it. ``--execute`` runs what is printed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from evojax.paths import conf_dir
from experiments.launch.shell import (
    Command,
    add_switches,
    carry_out,
    command,
    evojax_words,
    resource_name,
)
from experiments.launch.tpu_vm import accelerator, hardware_option

# What GKE calls the accelerator of a generation.
NODE_POOLS = {
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}
_VOLUME = "runs"


def _preset(hardware: str) -> dict[str, Any]:
    """The hardware preset that a job asks for."""
    return yaml.safe_load((conf_dir() / "hardware" / f"{hardware}.yaml").read_text())


def manifest(options: argparse.Namespace) -> dict[str, Any]:
    """The JobSet: one pod for every host of the slice."""
    preset = _preset(options.hardware)
    generation, _, layout = preset["topology"].partition(":")
    hosts = preset["chips"] // preset["host_chips"]
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": NODE_POOLS[generation],
            "cloud.google.com/gke-tpu-topology": layout,
        },
        "containers": [_container(options, preset)],
        "volumes": [
            {"name": _VOLUME, "persistentVolumeClaim": {"claimName": options.volume_claim}}
        ],
    }
    refused = {"onExitCodes": {"operator": "In", "values": [1, 2]}, "action": "FailJob"}
    job = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [refused]},
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": options.name},
        "spec": {
            "failurePolicy": {
                "maxRestarts": options.retries,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _words(options: argparse.Namespace) -> list[str]:
    overrides = [*options.overrides, "hardware.distributed=true"]
    return evojax_words(overrides, options.hardware, options.run_dir, retries=0)


def _container(options: argparse.Namespace, preset: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "evojax",
        "image": options.image,
        "command": _words(options),
        "ports": [{"containerPort": 8471}, {"containerPort": 8080}],
        "resources": {"limits": {"google.com/tpu": preset["host_chips"]}},
        "volumeMounts": [{"name": _VOLUME, "mountPath": options.mount}],
    }


def apply(options: argparse.Namespace) -> list[Command]:
    """Start the job."""
    text = yaml.safe_dump(manifest(options), sort_keys=False)
    return [command("kubectl", "apply", "--namespace", options.namespace, "-f", "-", text=text)]


def delete(options: argparse.Namespace) -> list[Command]:
    """Stop the job."""
    words = ("kubectl", "delete", "jobset", options.name, "--namespace", options.namespace)
    return [command(*words)]


def xpk(options: argparse.Namespace) -> list[Command]:
    """Start the job with xpk."""
    kind, _ = accelerator(options.hardware)
    return [
        command(
            "xpk", "workload", "create", "--cluster", options.cluster, "--workload", options.name,
            "--tpu-type", kind, "--num-slices", 1, "--max-restarts", options.retries,
            "--docker-image", options.image, "--command", shlex.join(_words(options)),
        )
    ]  # fmt: skip


ACTIONS = {"apply": apply, "delete": delete, "xpk": xpk}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.launch.jobset")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, act in ACTIONS.items():
        sub = actions.add_parser(name, help=act.__doc__)
        sub.add_argument("--name", type=resource_name, required=True)
        add_switches(sub)
        if name in ("apply", "delete"):
            sub.add_argument("--namespace", default="default")
        if name in ("apply", "xpk"):
            sub.add_argument("--hardware", type=hardware_option, required=True)
            sub.add_argument("--image", required=True, help="with evojax and its extra tpu")
            sub.add_argument("--run-dir", required=True, help="on a volume that every host sees")
            sub.add_argument("--retries", type=int, default=10)
            sub.add_argument("overrides", nargs="+", help="of evojax, e.g. +experiment=math")
        if name == "apply":
            sub.add_argument("--volume-claim", required=True, help="ReadWriteMany, for the run")
            sub.add_argument("--mount", default="/runs", help="where the volume is mounted")
        if name == "xpk":
            sub.add_argument("--cluster", required=True)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's text."""
    options = _parser().parse_args(argv)
    return carry_out(ACTIONS[options.action](options), options.execute)


if __name__ == "__main__":
    sys.exit(main())
