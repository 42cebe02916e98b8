"""Models from the Hugging Face hub, through its own client and cache (extra ``hub``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from evojax.errors import InputError, UnavailableError
from evojax.policy.hf import read_config
from evojax.policy.shape import ModelConfig

_FILES = ("*.json", "*.safetensors", "*.jinja")


def hub_directory(
    repo: str, revision: str | None, check: Callable[[ModelConfig], None]
) -> tuple[Path, str]:
    """Local directory of a model on the hub, and the commit that it holds.

    The configuration comes first, so that a model of another shape is refused before its weights
    are fetched. What the cache holds in full is not fetched again.

    Args:
        repo: ``owner/name``. revision: branch, tag or commit; None: the main branch.
        check: is given the shape; raises what is wrong with it.

    Raises:
        InputError: no such repository or revision, or it must be asked for, or it holds no
            supported model.
        UnavailableError: the client is not installed, or the hub cannot be reached.
    """
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError as fault:
        raise UnavailableError(
            "policy.source=hub needs the package huggingface_hub. "
            f"Remedy: pip install 'evojax-rl[hub]', or {_otherwise(repo)}"
        ) from fault
    config = Path(
        _asked(hf_hub_download, repo, revision, filename="config.json", revision=revision)
    )
    check(read_config(config.parent))
    commit = config.parent.name  # of the same commit, whatever is pushed meanwhile
    files = _asked(snapshot_download, repo, revision, revision=commit, allow_patterns=_FILES)
    return Path(files), commit


def _asked(download: Callable[..., str], repo: str, asked: str | None, **request: Any) -> str:
    """What ``download`` gives, its errors in our terms."""
    from huggingface_hub import errors

    try:
        return download(repo_id=repo, **request)
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as fault:
        raise InputError.one(
            f"the hub has no such repository for you ({_line(fault)})",
            "policy.repo",
            repo,
            "give owner/name; a gated model needs its licence accepted and `hf auth login`",
        ) from fault
    except errors.RevisionNotFoundError as fault:
        raise InputError.one(
            f"{repo} has no such revision ({_line(fault)})",
            "policy.revision",
            asked,
            "give a branch, a tag or a commit, or leave it out",
        ) from fault
    except Exception as fault:  # offline, timeout, disk: the client's errors share no base class
        raise UnavailableError(
            f"{repo} cannot be fetched from the hub ({type(fault).__name__}: {_line(fault)}). "
            f"Remedy: check the network, or {_otherwise(repo)}"
        ) from fault


def _otherwise(repo: str) -> str:
    fetch = f"fetch it where there is a network (hf download {repo} --local-dir DIR)"
    return f"{fetch}, then set policy.source=path and policy.path=DIR"


def _line(fault: Exception) -> str:
    """First line of an error's text."""
    return next(iter(str(fault).strip().splitlines()), "no details")
