"""Evolving on branches of a checkout that belongs to the user (``evolution.repo=<path>``).

The user's branch, index and files are never touched: the loop's trunk is a branch of its own with
a worktree of its own, started from the commit that is checked out.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from evojax.errors import InputError, Problem
from evojax.evolution.git import Git, GitError
from evojax.evolution.harness import HarnessRepo, slug

KEY = "evolution.repo"


def checkout_problems(path: Path) -> list[Problem]:
    """Everything that keeps the loop from working on the checkout at ``path``."""
    shown = str(path)
    if not path.is_dir():
        return [Problem("no such directory", KEY, shown, "give the path of a git checkout")]
    foreign = _foreign_owned(path)
    if foreign is not None and _declared_safe(path) is None:
        what = f"{foreign} belongs to user id {foreign.stat().st_uid}, you are {os.geteuid()}"
        remedy = (
            f"run as its owner, or sudo chown -R {os.geteuid()} '{path}', or declare it safe: "
            f"git config --global --add safe.directory '{path.resolve()}'"
        )
        return [Problem(what, KEY, shown, remedy)]
    git = Git(path.resolve(), safe=_declared_safe(path))
    if not git.ok("rev-parse", "--git-dir"):
        return [Problem("not a git repository", KEY, shown, "git init it, or use private")]
    if git.run("rev-parse", "--is-bare-repository") == "true":
        return [Problem("a bare repository", KEY, shown, "give a clone with a working tree")]
    if not git.ok("rev-parse", "--verify", "--quiet", "HEAD"):
        return [Problem("the repository has no commit", KEY, shown, "commit conf/ first")]
    return _state_problems(git, path)


def _state_problems(git: Git, path: Path) -> list[Problem]:
    shown = str(path)
    problems = []
    top = Path(git.run("rev-parse", "--show-toplevel"))
    if top.resolve() != path.resolve():
        problems.append(Problem(f"not the top of the checkout at {top}", KEY, shown, f"use {top}"))
    if not git.ok("symbolic-ref", "--quiet", "HEAD"):
        remedy = "check a branch out, e.g. git switch main"
        problems.append(Problem("HEAD is detached", KEY, shown, remedy))
    dirty = [line for line in git.run("status", "--porcelain").split("\n") if _matters(line)]
    if dirty:
        what = f"{len(dirty)} changes are not committed, the first is {dirty[0].strip()}"
        problems.append(Problem(what, KEY, shown, "commit or stash them, or use private"))
    for name in ("conf/config.yaml", "skills_library"):
        if not git.ok("cat-file", "-e", f"HEAD:{name}"):
            what = f"the checked out commit has no {name}"
            problems.append(Problem(what, KEY, shown, "use a checkout of evojax's layout"))
    return problems


def _matters(line: str) -> bool:
    """Untracked files elsewhere do no harm: the loop works in worktrees of its own."""
    return bool(line) and (
        not line.startswith("??") or line[3:].startswith(("conf/", "skills_library/"))
    )


def open_checkout(
    path: Path,
    worktrees: Path,
    experiment: str,
    run: str,
    trailers: Mapping[str, object],
    prepare: Callable[[Path], Path] | None = None,
) -> HarnessRepo:
    """The loop's branches ``evo/<experiment>-<run>/*`` of the checkout at ``path``.

    Args:
        run: name of the run; keeps two runs on one checkout apart.
        trailers: of the commit that marks the start, e.g. ``{"Version": "v000"}``.
        prepare: changes one file of the conf/ directory it is given, and returns that file; the
            change is part of the first commit.
    Raises:
        InputError: the checkout is dirty, detached, foreign-owned, bare or not a repository.
    """
    prefix = f"evo/{slug(experiment)}-{slug(run)}"
    trunk = f"{prefix}/main"
    problems = checkout_problems(path)
    if problems:
        raise InputError(problems)
    target = worktrees / trunk.replace("/", "-")
    safe = _declared_safe(path)
    started_from = _start(Git(path.resolve(), safe=safe), f"refs/{prefix}/start")
    repo = HarnessRepo(path, worktrees, prefix, trunk, target, safe=safe, since=started_from)
    repo.worktree(trunk, started_from)
    if repo.find(str(trailers.get("Version", ""))) is None:
        note = repo.trunk_dir / "verdicts" / "start.md"
        note.parent.mkdir(exist_ok=True)
        note.write_text(f"Evolution run `{slug(run)}` starts from commit {started_from}.\n")
        changed = [] if prepare is None else [prepare(repo.trunk_dir / "conf")]
        repo.commit(repo.trunk_dir, [note, *changed], "Start an evolution run", trailers)
    return repo


def _start(git: Git, ref: str) -> str:
    """The commit that the run starts from, kept as ``ref``: the user's branch moves on."""
    if not git.ok("show-ref", "--verify", "--quiet", ref):
        git.run("update-ref", ref, "HEAD")
    return git.run("rev-parse", "--verify", ref)


def _foreign_owned(path: Path) -> Path | None:
    for place in (path, path / ".git"):
        if place.exists() and place.stat().st_uid != os.geteuid():
            return place
    return None


def _declared_safe(path: Path) -> Path | None:
    """``path`` when the user's own configuration already lists it as safe, else None."""
    full = path.resolve()
    try:
        listed = subprocess.run(
            ["git", "config", "--global", "--get-all", "safe.directory"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise GitError(f"cannot run git: {error}. Install git (apt install git)") from error
    return full if str(full) in listed.stdout.split("\n") else None
