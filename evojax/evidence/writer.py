"""Writes a version's evidence as Parquet part files, each replaced whole or not at all."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evojax.errors import UnavailableError
from evojax.evidence.schema import TABLES, UPDATES, schema
from evojax.evidence.types import Split, Trajectory

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class EvidenceWriter:
    """Collects rows in memory and writes them as ``<table>-<part>.parquet``.

    A part that is written again (after a resume) replaces its files, so no row is ever there
    twice. Equal rows give equal bytes.

    Args:
        directory: evidence directory of one version; made when missing.
        run: name of the run. version: e.g. ``v002``. Both are stored with every row.
    """

    def __init__(self, directory: Path, run: str, version: str):
        self.directory = directory
        self.run = run
        self.version = version
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}

    def rollouts(
        self, trajectories: Sequence[Trajectory], split: Split, refill_round: int = 0
    ) -> None:
        """Add one ``rollouts`` row and one ``turns`` row per trajectory.

        Args:
            refill_round: which draw of the step they come from (0 = the first).

        Raises:
            ValueError: a completion whose ids, logprobs and entropies differ in length.
        """
        identity = {"run": self.run, "version": self.version, "split": split}
        for t in trajectories:
            place = identity | {
                "step": t.step,
                "item": t.item.id,
                "group": t.group,
                "sample": t.sample,
            }
            self._rows["rollouts"].append(place | _rollout(t, refill_round))
            self._rows["turns"].append(place | _single_turn(t))

    def update(self, row: Mapping[str, Any]) -> None:
        """Add one ``updates`` row; a quantity that was not measured may be left out (null).

        Raises:
            ValueError: a key that is no column, or a required column that is missing.
        """
        known = {c.name for c in UPDATES}
        unknown = sorted(set(row) - known)
        required = {c.name for c in UPDATES if not c.nullable} - {"run", "version"}
        missing = sorted(required - set(row))
        if unknown or missing:
            raise ValueError(f"updates row: unknown keys {unknown}, missing keys {missing}")
        values = {name: _null_if_nan(row.get(name)) for name in known}
        self._rows["updates"].append(values | {"run": self.run, "version": self.version})

    def flush(self, part: str) -> None:
        """Write everything added since the last flush as part ``part``.

        Each file appears whole or not at all; files of an earlier ``part`` of the same name are
        replaced, and removed where the table now has no rows.

        Raises:
            UnavailableError: the disk refused; nothing added so far is lost.
        """
        if not _PART.fullmatch(part):
            raise ValueError(f"not a part name: {part!r}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for table, rows in self._rows.items():
                path = self.directory / f"{table}-{part}.parquet"
                if rows:
                    _replace(path, pa.Table.from_pylist(rows, schema=schema(table)))
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise UnavailableError(
                f"evidence could not be written to {self.directory}: {error.strerror or error}. "
                "Free some space (or fix its permissions), then resume"
            ) from error
        for rows in self._rows.values():
            rows.clear()


def _replace(path: Path, table: pa.Table) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _rollout(t: Trajectory, refill_round: int) -> dict[str, Any]:
    c = t.completion
    n, p = len(c.token_ids), len(t.prompt_ids)
    if not n == len(c.logprobs) == len(c.entropies):
        raise ValueError(
            f"completion of {t.item.id}: {n} ids, {len(c.logprobs)} logprobs and "
            f"{len(c.entropies)} entropies; the three must be equally long"
        )
    return {
        "task": t.item.task,
        "seed": t.seed,
        "refill_round": refill_round,
        "policy_version": c.policy_version,
        "token_ids": np.concatenate([t.prompt_ids, c.token_ids]).astype(np.int32),
        "loss_mask": np.repeat(np.array([0, 1], np.int8), [p, n]),
        "rollout_logprobs": np.asarray(c.logprobs, np.float32),
        "entropies": np.asarray(c.entropies, np.float32),
        "prompt_tokens": p,
        "response_tokens": n,
        "stop_reason": c.finish_reason,
        "truncated": t.truncated,
        "grade_status": t.grade.status,
        "extracted": _valid_text(t.grade.extracted),
        "grader_detail": _valid_text(t.grade.detail),
        "reward": _null_if_nan(t.reward),
        "advantage": _null_if_nan(t.advantage),
        "kept": t.kept,
        "components": _numbers(t.components),
        "features": _numbers(t.features),
        "prompt": _valid_text(_prompt(t)),
        "text": _valid_text(t.text),
        "answer": _valid_text(t.item.answer),
    }


def _single_turn(t: Trajectory) -> dict[str, Any]:
    n = len(t.completion.token_ids)
    logprobs = np.asarray(t.completion.logprobs, np.float64)
    flags = dict.fromkeys(("is_edit", "is_test", "is_search", "is_git"), False)
    return flags | {
        "turn": 0,
        "role": "policy",
        "observation_bytes": 0,
        "response_tokens": n,
        "mean_logprob": float(logprobs.mean()) if n else None,
    }


def _prompt(t: Trajectory) -> str:
    if t.item.chat is None:
        return t.item.prompt
    return json.dumps(t.item.chat, ensure_ascii=False)


def _numbers(values: Mapping[str, float]) -> list[tuple[str, float | None]]:
    return [(name, _null_if_nan(values[name])) for name in sorted(values)]


def _valid_text(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate (half an emoji) becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _null_if_nan(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
