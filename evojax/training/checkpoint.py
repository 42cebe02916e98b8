"""Checkpoints that are either whole or not there.

Layout: ``<directory>/step_00000008/{arrays/, meta.json, COMPLETE.json}``. A checkpoint is written
under a temporary name; the marker, with size and checksum of every other file, is written last;
then the directory is renamed. Saving is synchronous: when ``save`` returns, the bytes are on their
way to the disk and the state may be donated. Of several processes each writes and reads its part
of the arrays, in a directory that all see; everything else is process 0's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from evojax import distributed
from evojax.errors import UnavailableError

_MARKER = "COMPLETE.json"
_META = "meta.json"
_ARRAYS = "arrays"
_TEMPORARY = ".tmp-"
_NAME = re.compile(r"step_(\d{8,})")
_BLOCK = 1 << 22
# What orbax, tensorstore and the file system raise when bytes cannot be written or read.
_IO_FAULTS = (OSError, ValueError, RuntimeError, KeyError, TypeError)


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read back.

    Args:
        step, state, meta: as given to ``save``.
        warnings: one sentence for each newer checkpoint that was damaged and passed over.
    """

    step: int
    state: Any
    meta: dict[str, Any]
    warnings: tuple[str, ...] = ()


def save(
    directory: Path | str, step: int, state: Any, meta: dict[str, Any], *, keep: int = 2
) -> Path:
    """Write one checkpoint and wait for it; older ones go only once it is complete.

    Args:
        directory: of this series of checkpoints; made when missing; one writer at a time.
        step: >= 0; an existing checkpoint of that step is replaced (moved aside when damaged).
        state: pytree of arrays.
        meta: what else a resumed run needs (cursors, seeds, config hash); JSON values only.
        keep: complete checkpoints to keep, >= 1; damaged ones are never removed.

    Raises:
        UnavailableError: the disk is full or failed, in any process; earlier checkpoints are
            untouched.
    """
    directory = Path(directory).absolute()
    final = directory / f"step_{step:08d}"
    temporary = directory / f"{_TEMPORARY}{final.name}-{distributed.agreed(os.getpid())}"
    text = json.dumps(meta, sort_keys=True)

    def begin() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir()

    def finish() -> None:
        (temporary / _META).write_text(text, encoding="utf-8")
        _write_marker(temporary, step)
        _put_in_place(temporary, final)
        _forget_old(directory, max(keep, 1))

    def write() -> None:
        _write_arrays(temporary / _ARRAYS, state)

    first = distributed.is_first()
    try:
        for stage in (begin, write, finish) if first else (None, write, None):
            _together(stage, f"checkpoint of step {step} could not be written to {directory}")
    finally:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def _together(work: Callable[[], None] | None, fault: str) -> None:
    """One stage of a save: what each process does, and whether all of them could.

    Raises:
        UnavailableError: in every process, when one of them failed.
    """
    caught: Exception | None = None
    try:
        if work is not None:
            work()
    except _IO_FAULTS as error:
        caught = error
    failures = [
        words for words in distributed.exchange(caught and (str(caught) or "failed")) if words
    ]
    if caught is not None or failures:
        raise UnavailableError(
            f"{fault}: {caught or failures[0]}. Earlier checkpoints are untouched. Remedy: free "
            "disk space there, then resume the run"
        ) from caught


def latest(directory: Path | str) -> int | None:
    """Step of the newest complete checkpoint, or None (file sizes are checked, not contents)."""
    for step, path in reversed(_listed(Path(directory))):
        if _fault(path, contents=False) is None:
            return step
    return None


def restore(directory: Path | str, abstract_state: Any, step: int | None = None) -> Restored | None:
    """Read the newest complete checkpoint, or that of ``step``.

    Args:
        abstract_state: pytree of ``jax.ShapeDtypeStruct``; each leaf is placed by its sharding,
            by the first device when it has none. So the device count may differ from the one
            that saved.
        step: exactly this one, without falling back to others.

    Returns:
        None when the directory holds no checkpoint (temporary ones do not count). Damaged
        checkpoints are passed over, named in ``warnings`` and left where they are.

    Raises:
        UnavailableError: there are checkpoints, but none (or not the one asked for) is whole.
    """
    directory = Path(directory).absolute()
    candidates = [c for c in reversed(_listed(directory)) if step is None or c[0] == step]
    if not candidates and step is None:
        return None
    warnings: list[str] = []
    for number, path in candidates:
        fault = _fault(path, contents=True)
        if fault is None:
            try:
                state = _read_arrays(path / _ARRAYS, abstract_state)
                meta = json.loads((path / _META).read_text(encoding="utf-8"))
                return Restored(number, state, meta, tuple(warnings))
            except _IO_FAULTS as error:
                fault = f"cannot be read: {error}"
        warnings.append(f"{path} is damaged and was passed over: {fault}")
    wanted = "no usable checkpoint" if step is None else f"no usable checkpoint of step {step}"
    raise UnavailableError(
        f"{wanted} in {directory}: {'; '.join(warnings) or 'it does not exist'}. Remedy: restore "
        "the files from a copy, or move the directory away to start anew"
    )


def _handler() -> ocp.Checkpointer:
    # Float weights barely compress; doing without saves a third of the time.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _write_arrays(path: Path, state: Any) -> None:
    with _handler() as writer:
        writer.save(path, args=ocp.args.PyTreeSave(state))


def _read_arrays(path: Path, abstract_state: Any) -> Any:
    """Always with a target: without one, orbax insists on the topology that saved."""
    default = SingleDeviceSharding(jax.local_devices()[0])

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or default
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    target = jax.tree.map(placed, abstract_state)
    with _handler() as reader:
        return reader.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            ),
        )


def _checksum(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def _write_marker(path: Path, step: int) -> None:
    files = sorted(p for p in path.rglob("*") if p.is_file())
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(_checksum, files))
    listing = {
        str(file.relative_to(path)): {"bytes": size, "crc32": crc}
        for file, (size, crc) in zip(files, sums, strict=True)
    }
    text = json.dumps({"schema": 1, "step": step, "files": listing}, indent=1)
    (path / _MARKER).write_text(text, encoding="utf-8")


def _fault(path: Path, contents: bool) -> str | None:
    """What is wrong with a checkpoint, or None; ``contents`` also compares the checksums."""
    try:
        marker = json.loads((path / _MARKER).read_text(encoding="utf-8"))
        files = {path / name: (v["bytes"], v["crc32"]) for name, v in marker["files"].items()}
    except _IO_FAULTS as error:
        return f"no valid {_MARKER} ({error})"
    for file, (size, _) in files.items():
        if not file.is_file():
            return f"{file.name} is missing"
        if file.stat().st_size != size:
            return f"{file.name} has {file.stat().st_size} bytes instead of {size}"
    if contents:
        with ThreadPoolExecutor(4) as pool:
            for file, found in zip(files, pool.map(_checksum, files), strict=True):
                if found != files[file]:
                    return f"{file.name} does not match its checksum"
    return None


def _listed(directory: Path) -> list[tuple[int, Path]]:
    """Finished checkpoints by rising step; temporary names never match."""
    if not directory.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename; an older checkpoint of that step goes afterwards, a damaged one is kept aside."""
    if not final.exists():
        temporary.rename(final)
        return
    damaged = _fault(final, contents=False) is not None
    prefix = "damaged-" if damaged else _TEMPORARY
    aside = final.with_name(f"{prefix}{final.name}-{os.getpid()}-{final.stat().st_ino}")
    final.rename(aside)
    temporary.rename(final)
    if not damaged:
        shutil.rmtree(aside, ignore_errors=True)


def _forget_old(directory: Path, keep: int) -> None:
    whole = [path for _, path in _listed(directory) if _fault(path, contents=False) is None]
    for path in whole[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
