"""The harness repository: every version a commit, every candidate a branch and a worktree.

History is never amended. A candidate's commit changes its recipe; its verdict is a later commit on
the same branch (``verdicts/<version>.md``) and, for a promoted one, the merge commit. Every
mutating call is made under one cross-process lock and can be made again after a crash: what is
already there is found by its ``Evojax-Version`` trailer and reused.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout

from evojax.errors import InputError, UnavailableError
from evojax.evolution.git import Git, GitError, compose_message, parse_trailers

LOCK_TIMEOUT_S = 120.0
_REF = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._/~^-]*$")
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "__init__.py", ".git")


@dataclass(frozen=True)
class Commit:
    """One commit: ``trailers`` has the names without their ``Evojax-`` prefix."""

    sha: str
    parents: tuple[str, ...]
    message: str
    trailers: dict[str, str]


def slug(text: str, limit: int = 40) -> str:
    """``text`` as a name that is safe in a branch, a path and a trailer.

    >>> slug("Refill: dead groups!! --force")
    'refill-dead-groups-force'
    """
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return words[:limit].strip("-") or "x"


class HarnessRepo:
    """A repository that holds conf/ and skills_library/, and the loop's branches.

    Args:
        path: top of the checkout.
        worktrees: directory under which worktrees are made.
        prefix: what branches begin with, ``evo/<experiment>``.
        trunk: branch that promoted candidates are merged into.
        trunk_dir: checkout of the trunk; ``path`` itself in a private repository.
        since: commit that the loop started from; it and its ancestors, which may hold versions of
            earlier runs, are never taken for this run's. None in a private repository.
    """

    def __init__(
        self,
        path: Path,
        worktrees: Path,
        prefix: str,
        trunk: str = "main",
        trunk_dir: Path | None = None,
        lock_wait_s: float = 10.0,
        safe: Path | None = None,
        since: str | None = None,
    ):
        self.path = path.resolve()
        self.worktrees = worktrees.resolve()
        self.prefix = prefix
        self.trunk = trunk
        self.trunk_dir = (trunk_dir or path).resolve()
        self._lock_wait_s = lock_wait_s
        self._safe = safe
        self._own = () if since is None else (f"^{_ref(since)}",)
        self.git = self.at(self.path)
        common = self.git.run("rev-parse", "--path-format=absolute", "--git-common-dir")
        self._common = Path(common)
        self._lock = FileLock(self._common / "evojax.lock", timeout=LOCK_TIMEOUT_S)

    @classmethod
    def create(
        cls,
        path: Path,
        conf_dir: Path,
        skills_dir: Path,
        worktrees: Path,
        experiment: str,
        trailers: Mapping[str, object],
    ) -> HarnessRepo:
        """A private repository at ``path`` whose first commit holds both directories.

        The repository appears under its name only when that commit is in it; one that is there
        already is opened as it is.

        Args:
            trailers: of the first commit, e.g. ``{"Version": "v000"}``.
        """
        if not (path / ".git").exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.parent / f".{path.name}.lock", timeout=LOCK_TIMEOUT_S):
                if not (path / ".git").exists():
                    _seed(path, conf_dir, skills_dir, trailers)
        return cls(path, worktrees, f"evo/{slug(experiment)}")

    def at(self, directory: Path) -> Git:
        """Git in ``directory`` under this repository's settings."""
        return Git(directory, self._lock_wait_s, self._safe)

    def branch_name(self, version: str, title: str) -> str:
        """``evo/<experiment>/<version>-<slug>``."""
        return f"{self.prefix}/{slug(version, 12)}-{slug(title)}"

    def worktree(self, branch: str, start: str) -> Path:
        """Check ``branch`` out in its own directory; made from ``start`` when it is new.

        A worktree that exists is put back to its last commit, leftovers removed; one that a crash
        left half made is made anew.
        """
        branch, start = _ref(branch), _ref(start)
        target = self.worktrees / branch.replace("/", "-")
        with self._locked():
            self.git.run("worktree", "prune")
            if self._usable(target, branch):
                tree = self.at(target)
                tree.run("reset", "--hard", "--quiet")
                tree.run("clean", "-ffdxq")
                return target
            self._discard(target)
            self.worktrees.mkdir(parents=True, exist_ok=True)
            if self.git.ok("show-ref", "--verify", "--quiet", f"refs/heads/{branch}"):
                self.git.run("worktree", "add", "--quiet", str(target), branch)
            else:
                self.git.run("worktree", "add", "--quiet", "-b", branch, str(target), start)
        return target

    def commit(
        self,
        worktree: Path,
        paths: Sequence[Path | str],
        message: str,
        trailers: Mapping[str, object],
    ) -> str | None:
        """Commit ``paths`` (and nothing else) of ``worktree``.

        Args:
            paths: files, relative to the worktree or absolute inside it; a deleted one counts.
            trailers: names without prefix; ``Version`` identifies the commit.
        Returns:
            The commit's id; None when the paths do not differ from HEAD (a duplicate: nothing is
            committed). The same version committed before is found and returned.
        Raises:
            InputError: a path outside the worktree, or the version exists with other content.
        """
        names = [_inside(worktree, p) for p in paths]
        git = self.at(worktree)
        with self._locked():
            dirty = bool(git.run("status", "--porcelain", "--", *names))
            done = self._find_on(git, trailers)
            if done is not None and dirty:
                raise InputError.one(
                    f"{done[:12]} holds this version with other content",
                    "evolution",
                    trailers.get("Version"),
                    "history is never amended: use a new version name",
                )
            if done is not None or not dirty:
                return done
            git.run("add", "--all", "--", *names)
            text = compose_message(message, trailers)
            git.run(
                "commit", "--quiet", "--only", "--no-verify", "--cleanup=verbatim",
                "--file=-", "--", *names, stdin=text,
            )  # fmt: skip
            return self.head(git)

    def record_verdict(
        self, worktree: Path, version: str, text: str, trailers: Mapping[str, object]
    ) -> str:
        """Commit ``verdicts/<version>.md`` on the candidate's branch; ``trailers`` has Verdict.

        One that is committed stands: said again, in other words perhaps, it changes nothing.
        """
        git = self.at(worktree)
        label = {"Version": version, **trailers}
        if (known := self._find_on(git, label)) is not None:
            return known
        path = worktree / "verdicts" / f"{slug(version, 12)}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        title = f"Verdict on {version}: {label.get('Verdict', 'none')}"
        made = self.commit(worktree, [path], title, label)
        return made or self.head(git)

    def merge(self, branch: str, message: str, trailers: Mapping[str, object]) -> str:
        """Merge ``branch`` into the trunk by a merge commit that carries the verdict.

        Returns:
            The merge commit's id; that of an earlier merge of the same branch tip if there is one.
        """
        branch = _ref(branch)
        git = self.at(self.trunk_dir)
        with self._locked():
            if git.ok("rev-parse", "--verify", "--quiet", "MERGE_HEAD"):
                git.run("merge", "--abort")  # a crash left it half made
            tip = git.run("rev-parse", "--verify", f"refs/heads/{branch}")
            for commit in self._commits(git, "HEAD", "--merges", "--first-parent"):
                if tip in commit.parents[1:]:
                    return commit.sha
            if git.run("status", "--porcelain", "--untracked-files=no"):
                raise GitError(
                    f"{self.trunk_dir} has changes that are not committed. Remedy: keep a copy of "
                    f"what you need, then: git -C {self.trunk_dir} checkout -f {self.trunk}"
                )
            try:
                git.run(
                    "merge", "--quiet", "--no-ff", "--no-verify", "--cleanup=verbatim",
                    "--file=/dev/stdin", branch, stdin=compose_message(message, trailers),
                )  # fmt: skip
            except GitError:
                if git.ok("rev-parse", "--verify", "--quiet", "MERGE_HEAD"):
                    git.run("merge", "--abort")
                raise
            return self.head(git)

    def tag(self, name: str, commit: str, message: str) -> None:
        """Annotated tag ``name`` on ``commit``; the same tag again is left alone."""
        name, commit = _ref(name), _ref(commit)
        with self._locked():
            if not self.git.ok("show-ref", "--verify", "--quiet", f"refs/tags/{name}"):
                text = compose_message(message, {"Version": name})
                self.git.run("tag", "--annotate", "--file=-", name, commit, stdin=text)

    def remove_worktree(self, branch: str) -> None:
        """Remove the branch's directory with everything in it; the branch stays."""
        with self._locked():
            self._discard(self.worktrees / _ref(branch).replace("/", "-"))

    def head(self, git: Git | None = None) -> str:
        """Commit checked out at ``git``, by default the trunk's."""
        where = git or self.at(self.trunk_dir)
        sha = where.run("rev-parse", "--verify", "HEAD")
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", sha):
            raise GitError(f"no commit is checked out in {where.cwd} (got {sha!r})")
        return sha

    def diff(self, parent: str, commit: str) -> str:
        """Unified diff of the recipe (conf/ and skills_library/) from ``parent`` to ``commit``."""
        return self.git.run(
            "diff", "--no-color", "--no-ext-diff", "--no-textconv",
            _ref(parent), _ref(commit), "--", "conf", "skills_library",
        )  # fmt: skip

    def changed_paths(self, parent: str, commit: str) -> list[str]:
        """Every path that differs between two commits."""
        out = self.git.run("diff", "--name-only", "--no-renames", "-z", _ref(parent), _ref(commit))
        return [p for p in out.split("\0") if p]

    def trailers(self, commit: str) -> dict[str, str]:
        """Trailers of ``commit``, names without their prefix."""
        return parse_trailers(self.git.run("show", "-s", "--format=%B", _ref(commit)))

    def find(self, version: str, verdict: bool = False) -> str | None:
        """The commit of ``version`` on any branch: its recipe, or with ``verdict`` the verdict."""
        for commit in self.log():
            found = commit.trailers
            if found.get("Version") == version and ("Verdict" in found) == verdict:
                return commit.sha
        return None

    def log(self) -> list[Commit]:
        """Commits of the loop's branches and of the trunk, oldest first."""
        globs = (f"--branches={self.prefix}/*", f"refs/heads/{self.trunk}")
        return self._commits(self.git, *globs, *self._own, "--topo-order", "--reverse")

    def _commits(self, git: Git, *args: str) -> list[Commit]:
        out = git.run("log", "-z", "--format=%H%n%P%n%B", *args)
        commits = []
        for record in filter(None, out.split("\0")):
            sha, parents, message = record.split("\n", 2)
            commits.append(Commit(sha, tuple(parents.split()), message, parse_trailers(message)))
        return commits

    def _find_on(self, git: Git, trailers: Mapping[str, object]) -> str | None:
        version = trailers.get("Version")
        for commit in self._commits(git, "HEAD", *self._own) if version else []:
            same_kind = ("Verdict" in commit.trailers) == ("Verdict" in trailers)
            if commit.trailers.get("Version") == version and same_kind:
                return commit.sha
        return None

    def _usable(self, target: Path, branch: str) -> bool:
        blocks = self.git.run("worktree", "list", "--porcelain").split("\n\n")
        for block in blocks:
            lines = block.split("\n")
            if lines[0] == f"worktree {target}":
                whole = not any(line.startswith("locked") for line in lines)
                return whole and f"branch refs/heads/{branch}" in lines and target.is_dir()
        return False

    def _discard(self, target: Path) -> None:
        if self.worktrees not in target.parents:
            raise ValueError(f"{target} is not below {self.worktrees}")
        self.git.run("worktree", "remove", "--force", "--force", str(target), check=False)
        shutil.rmtree(target, ignore_errors=True)
        self.git.run("worktree", "prune")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except Timeout as error:
            raise UnavailableError(
                f"another process has held {self._lock.lock_file} for {LOCK_TIMEOUT_S:.0f} s. "
                "Remedy: wait for the other run, or end it, then resume"
            ) from error


def _seed(path: Path, conf_dir: Path, skills_dir: Path, trailers: Mapping[str, object]) -> None:
    if path.exists() and any(path.iterdir()):
        raise InputError.one(
            "the directory is not empty and not a repository", "evolution.repo", str(path),
            "choose another run directory",
        )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as name:
        fresh = Path(name) / "repo"
        fresh.mkdir()
        shutil.copytree(conf_dir, fresh / "conf", ignore=_IGNORED)
        shutil.copytree(skills_dir, fresh / "skills_library", ignore=_IGNORED)
        git = Git(fresh)
        git.run("init", "--quiet", "--template=", "--initial-branch=main")
        git.run("add", "--all", "--force", "--", "conf", "skills_library")
        text = compose_message("Seed the harness: configuration and skills", trailers)
        git.run("commit", "--quiet", "--cleanup=verbatim", "--file=-", stdin=text)
        if path.exists():
            path.rmdir()
        os.replace(fresh, path)


def _ref(name: str) -> str:
    if not _REF.fullmatch(name) or ".." in name or name.endswith((".lock", "/", ".")):
        raise InputError.one(
            "not a valid branch or commit name", "evolution", name, "use letters, digits and - / _"
        )
    return name


def _inside(worktree: Path, path: Path | str) -> str:
    top = worktree.resolve()
    full = top / path
    plain = PurePosixPath(os.path.normpath(full))
    parts = plain.relative_to(top).parts if plain.is_relative_to(top) else ()
    if not parts or parts[0] == ".git" or not full.parent.resolve().is_relative_to(top):
        raise InputError.one(
            "path is outside the worktree", "evolution", str(path), "name files inside it"
        )
    return str(PurePosixPath(*parts))
