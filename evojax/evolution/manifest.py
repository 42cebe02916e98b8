"""run.json: what a run is made of, written once when it starts and read by every later mode."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import evojax
from evojax.config import EvojaxConf
from evojax.errors import InputError
from evojax.evolution.workshop import NOT_NUMBERS, config_hash
from evojax.training.version import read_json, write_json

SCHEMA = 1
_NEEDED = {"config", "evojax", "python", "packages", "policy"}
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "duckdb", "hydra-core")


def device() -> dict[str, Any]:
    """The hardware that JAX sees, in words and numbers."""
    import jax

    found = jax.devices()
    return {
        "platform": found[0].platform,
        "kind": found[0].device_kind,
        "devices": len(found),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "machine": platform.machine(),
    }


def device_words(policy: str) -> str:
    """Policy and hardware in one line."""
    found = device()
    return f"{policy} on {found['platform']} ({found['machine']}, {found['cores']} cores)"


def write_manifest(
    run_dir: Path, cfg: DictConfig, overrides: list[str], policy: str, data: dict[str, Any]
) -> None:
    """Write run.json.

    Args:
        policy: label of the model. data: what the domain says of its items.
    """
    write_json(
        run_dir / "run.json",
        {
            "schema": SCHEMA,
            "experiment": cfg.experiment,
            "mode": cfg.mode,
            "seed": cfg.seed,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "config": OmegaConf.to_container(cfg, resolve=True),
            "config_hash": config_hash(cfg),
            "overrides": overrides,
            "policy": policy,
            "data": data,
            "evojax": evojax.__version__,
            "python": platform.python_version(),
            "packages": _packages(),
            "device": device(),
        },
    )


def read_manifest(run_dir: Path) -> dict[str, Any]:
    """run.json of an existing run.

    Raises:
        InputError: the directory is no run, or the file is damaged or of another schema.
    """
    path = run_dir / "run.json"
    if not path.is_file():
        raise InputError.one(
            "no run.json there: not a run directory, or the run was refused before it began",
            "resume",
            str(run_dir),
            "give a directory such as outputs/<experiment>/<run>",
        )
    found = read_json(path)
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not found.keys() >= _NEEDED:
        raise InputError.one(
            f"not a run.json of schema {SCHEMA}", "resume", str(path), "start a new run"
        )
    return found


def other_versions(manifest: dict[str, Any]) -> list[str]:
    """What differs between this installation and the one that began the run, in sentences."""
    then = {"evojax": manifest["evojax"], "python": manifest["python"], **manifest["packages"]}
    now = {"evojax": evojax.__version__, "python": platform.python_version(), **_packages()}
    return [
        f"The run was begun with {name} {old}; here it is {now[name]}: numbers may differ."
        for name, old in then.items()
        if name in now and now[name] != old
    ]


def _packages() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def stored_config(manifest: dict[str, Any], asked: DictConfig) -> DictConfig:
    """The run's own configuration; only mode, version and display come from the command line.

    Raises:
        InputError: this evojax has other keys than the one that began the run.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(EvojaxConf), manifest["config"])
    except OmegaConfBaseException as error:
        raise InputError.one(
            f"run.json holds a configuration that this evojax does not know ({error.msg})",
            "resume",
            manifest.get("evojax"),
            "go on with the evojax that began the run",
        ) from error
    for key in NOT_NUMBERS:
        OmegaConf.update(merged, key, asked[key])
    return cast(DictConfig, merged)


def changed(manifest: dict[str, Any], asked: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Keys that the command line would give another value: key -> (stored, asked)."""
    old = _flat(manifest["config"])
    new = _flat(cast(dict[str, Any], OmegaConf.to_container(asked, resolve=True)))
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if key.split(".")[0] not in NOT_NUMBERS and old.get(key) != new.get(key)
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out
