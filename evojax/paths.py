"""Where the configuration tree and the skills lie: in a checkout, or inside an installed wheel."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from evojax.errors import InputError

_PACKAGE = Path(__file__).resolve().parent


def _data(name: str) -> Path:
    """A data directory: inside the package once installed, beside it in a checkout."""
    for base in (_PACKAGE, _PACKAGE.parent):
        if (base / name).is_dir():
            return base / name
    raise InputError.one(
        "a part of the installation is missing", name, str(_PACKAGE), "reinstall evojax"
    )


def conf_dir() -> Path:
    """The Hydra tree that ships with evojax.

    >>> (conf_dir() / "config.yaml").is_file()
    True
    """
    return _data("conf")


def skills_dir() -> Path:
    """The skills that ship with evojax."""
    return _data("skills_library")


def anchored(path: str | Path, start: Path) -> str:
    """``path`` as an absolute path, read from the directory where the process was started.

    >>> anchored("data/x.jsonl", Path("/home/me"))
    '/home/me/data/x.jsonl'
    >>> anchored("/srv/x.jsonl", Path("/home/me"))
    '/srv/x.jsonl'
    """
    return str(Path(start, Path(path).expanduser()))


def nearest_existing(path: Path) -> Path:
    """``path`` itself or the closest ancestor that exists.

    >>> nearest_existing(Path("/no/such/place")).as_posix()
    '/'
    """
    return next(p for p in (path, *path.parents) if p.exists())


def merge_trees(trees: Sequence[Path], target: Path) -> Path:
    """One configuration tree from several; of equal files the one of the first tree is taken.

    Args:
        trees: highest precedence first. target: a directory that is made anew.

    Returns:
        ``target``.
    """
    fresh = target.with_name(f".{target.name}-new")  # the target itself may be one of the trees
    shutil.rmtree(fresh, ignore_errors=True)
    for tree in reversed(trees):
        shutil.copytree(tree, fresh, dirs_exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return target
