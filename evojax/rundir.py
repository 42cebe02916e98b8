"""The run directory: named uniquely, claimed exclusively, left behind only by a run that began."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from evojax.errors import InputError
from evojax.overrides import parse

LOCK = ".lock"
SNAPSHOT = ".hydra"
_BY_HYDRA = (LOCK, SNAPSHOT, "evojax.log", "conf", "multirun.yaml")


def unique() -> str:
    """Eight characters that no other run shares.

    >>> len({unique() for _ in range(100)})
    100
    """
    return uuid.uuid4().hex[:8]


@contextmanager
def claim(path: Path, resume: bool) -> Iterator[None]:
    """Hold ``path`` for one process; a new run needs a directory that is absent or empty.

    Raises:
        InputError: the directory holds something, cannot be made, or is in use.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError.one(
            f"the run directory cannot be made: {error.strerror}",
            "hydra.run.dir",
            str(path),
            "choose another place with output_root=<directory>",
        ) from error
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError.one(
            "another process is working in this run directory",
            "hydra.run.dir",
            str(path),
            "wait for it to end, or choose another directory",
        ) from error
    try:
        if not resume and any(entry.name != LOCK for entry in path.iterdir()):
            raise InputError.one(
                "the run directory exists and is not empty",
                "hydra.run.dir",
                str(path),
                f"go on with that run by resume={path}, or choose another directory",
            )
        yield
    finally:
        lock.release()


def discard_if_unused(path: Path) -> None:
    """Remove what Hydra wrote, and the directory, when the run was refused before it began."""
    if all(entry.name in _BY_HYDRA for entry in path.iterdir()):
        for entry in path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
        (path / LOCK).unlink(missing_ok=True)
        path.rmdir()


def saved_overrides(run_dir: Path) -> list[str]:
    """The command line with which the run in ``run_dir`` was started.

    Raises:
        InputError: ``run_dir`` is no run directory.
    """
    file = run_dir / SNAPSHOT / "overrides.yaml"
    if not file.is_file():
        inside = sorted(p.parent.parent for p in run_dir.glob(f"*/{SNAPSHOT}/overrides.yaml"))
        hint = f"e.g. {inside[-1]}" if inside else "give outputs/<experiment>/<run>"
        raise InputError.one("this is not a run directory", "resume", str(run_dir), hint)
    return [str(text) for text in OmegaConf.to_container(OmegaConf.load(file))]  # type: ignore


def saved_tree(run_dir: Path) -> Path | None:
    """The configuration tree from which the run was composed, if it still exists.

    A run that was composed from several trees keeps the merged one in its directory.
    """
    if (run_dir / "conf" / "config.yaml").is_file():
        return run_dir / "conf"
    file = run_dir / SNAPSHOT / "hydra.yaml"
    sources = OmegaConf.load(file).hydra.runtime.config_sources if file.is_file() else []
    for source in sources:
        if source.provider == "main" and os.path.isdir(source.path):
            return Path(source.path)
    return None


def resumed(user: list[str], run_dir: Path) -> list[str]:
    """The run's own overrides, then the user's; a key that the user sets is taken from the user."""
    saved = saved_overrides(run_dir)
    mine = {item.key_or_group for item in parse(user)}
    kept = [t for t, o in zip(saved, parse(saved), strict=True) if o.key_or_group not in mine]
    return kept + user
