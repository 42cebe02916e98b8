"""Git as the loop uses it: the command line, isolated from whatever the user's git is set to.

No shell, argument lists only, literal path specs, messages through stdin, no hooks, no signing, no
prompts, no global or system configuration, and none of the caller's ``GIT_*`` variables.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from evojax.errors import UnavailableError

NAME = "evojax"
EMAIL = "evolution@evojax.invalid"
STALE_LOCK_S = 600.0

_SETTINGS = {
    "commit.gpgsign": "false",
    "tag.gpgsign": "false",
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.autocrlf": "false",
    "core.excludesFile": "/dev/null",
    "core.quotePath": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "advice.detachedHead": "false",
    "merge.renames": "false",
}
_LOCK_PATTERN = re.compile(r"Unable to create '([^']+\.lock)': File exists")
_TRAILER = re.compile(r"^(Evojax-[A-Za-z]+): (.*)$")


class GitError(UnavailableError):
    """Git failed, or could not be run (exit 3)."""


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without its git settings, with the loop's own identity."""
    clean = {k: v for k, v in base.items() if not k.startswith("GIT_")}
    return clean | {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_EDITOR": "true",
        "GIT_PAGER": "cat",
        "GIT_AUTHOR_NAME": NAME,
        "GIT_AUTHOR_EMAIL": EMAIL,
        "GIT_COMMITTER_NAME": NAME,
        "GIT_COMMITTER_EMAIL": EMAIL,
        "LC_ALL": "C.UTF-8",
    }


@dataclass(frozen=True)
class Git:
    """Runs git in one directory.

    Args:
        cwd: absolute working directory of every call.
        lock_wait_s: how long a lock file held by someone else is waited for, seconds.
        safe: directory that the user already declared safe in their own configuration, or None.
    """

    cwd: Path
    lock_wait_s: float = 10.0
    safe: Path | None = None

    def run(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        """Standard output of ``git args``, without the final newline.

        A lock file in the way is waited for with growing pauses; one that stays gives an error
        that names the file and its age.

        Raises:
            GitError: git is missing, failed, or stayed locked.
        """
        deadline = time.monotonic() + self.lock_wait_s
        pause = 0.02
        while True:
            done = self._once(args, stdin)
            if done.returncode == 0 or not check:
                return done.stdout.decode("utf-8", "replace").removesuffix("\n")
            message = done.stderr.decode("utf-8", "replace").strip()
            locked = _LOCK_PATTERN.search(message)
            if locked is None:
                raise GitError(f"git {args[0]} failed in {self.cwd}: {message[:2000]}")
            age = _age(Path(locked.group(1)))
            if age is not None and (age > STALE_LOCK_S or time.monotonic() > deadline):
                raise GitError(_locked_message(Path(locked.group(1)), age))
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def ok(self, *args: str) -> bool:
        """Whether ``git args`` exits with 0."""
        return self._once(args, None).returncode == 0

    def _once(self, args: Sequence[str], stdin: str | None) -> subprocess.CompletedProcess[bytes]:
        settings = [f"{key}={value}" for key, value in _SETTINGS.items()]
        if self.safe is not None:
            settings.append(f"safe.directory={self.safe}")
        command = ["git", *(part for s in settings for part in ("-c", s)), *args]
        # A file, not a pipe: if this process is killed, git still gets the whole message or is not
        # started at all.
        try:
            with tempfile.TemporaryFile() as text:
                text.write((stdin or "").encode("utf-8", "backslashreplace"))
                text.seek(0)
                return self._call(command, text)
        except FileNotFoundError as error:
            raise GitError(
                f"cannot run git in {self.cwd}: {error}. Install git (apt install git)"
            ) from error

    def _call(self, command: list[str], stdin: IO[bytes]) -> subprocess.CompletedProcess[bytes]:
        # A session of its own: an interrupt of the run does not cut a commit in half.
        return subprocess.run(
            command,
            cwd=self.cwd,
            env=environment(os.environ),
            stdin=stdin,
            capture_output=True,
            start_new_session=True,
            check=False,
        )


def _age(lock: Path) -> float | None:
    try:
        return max(0.0, time.time() - lock.stat().st_mtime)
    except FileNotFoundError:
        return None


def _locked_message(lock: Path, age: float) -> str:
    return (
        f"{lock} has locked the repository for {age:.0f} s. Remedy: if no git process is at work "
        f"there, it is left over from one that was killed: remove it (rm '{lock}') and resume"
    )


def trailer_value(value: object, limit: int = 1000) -> str:
    """``value`` as one printable line, so that it cannot forge another trailer.

    >>> trailer_value("up\\nEvojax-Verdict: promoted")
    'up Evojax-Verdict: promoted'
    """
    flat = "".join(c if c.isprintable() else " " for c in str(value))
    return " ".join(flat.split())[:limit] or "none"


def compose_message(text: str, trailers: Mapping[str, object]) -> str:
    """Commit message: ``text`` literally, then one paragraph of ``Evojax-*`` trailers.

    NUL, which git cannot store, is written as the two characters ``\\0``. Trailers are read back
    from the last paragraph only, so a trailer-like line inside ``text`` has no effect.
    """
    body = text.replace("\0", "\\0").strip("\n") or "Change"
    lines = [f"Evojax-{name}: {trailer_value(value)}" for name, value in trailers.items()]
    return body + "\n\n" + "\n".join(lines) + "\n"


def parse_trailers(message: str) -> dict[str, str]:
    """Trailers of a message as ``{"Version": ...}``; empty when it has none.

    >>> parse_trailers(compose_message("Subject", {"Version": "v001", "Factor": "filter"}))
    {'Version': 'v001', 'Factor': 'filter'}
    """
    paragraph = message.rstrip("\n").rsplit("\n\n", 1)[-1]
    matches = [_TRAILER.match(line) for line in paragraph.split("\n")]
    if not all(matches):
        return {}
    return {m.group(1).removeprefix("Evojax-"): m.group(2) for m in matches if m}
