"""Reads a version's evidence, refusing files that do not keep to the contract."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evojax.errors import InputError, Problem
from evojax.evidence.schema import (
    EVIDENCE_DIR,
    SCHEMA_VERSION,
    TABLE_KEY,
    TABLES,
    VERSION_KEY,
    schema,
)
from evojax.evidence.types import Split

_ROW_KEY = ["split", "step", "refill_round", "group", "sample", "item"]


@dataclass(frozen=True)
class Evidence:
    """The three tables of one version, rows in the order of their part files.

    Args:
        tables: ``rollouts``, ``turns`` and ``updates`` as Arrow tables.
    """

    tables: dict[str, pa.Table]

    def rollouts(self, split: Split | None = None) -> pa.Table:
        """One row per trajectory, of one split or of all."""
        return self._select("rollouts", split)

    def turns(self, split: Split | None = None) -> pa.Table:
        """One row per turn, of one split or of all."""
        return self._select("turns", split)

    def updates(self) -> pa.Table:
        """One row per optimizer step."""
        return self.tables["updates"]

    def _select(self, name: str, split: Split | None) -> pa.Table:
        table = self.tables[name]
        return table if split is None else table.filter(pc.field("split") == split)


def load(version_dir: Path) -> Evidence:
    """Evidence of the version whose directory is ``version_dir``.

    Raises:
        InputError: there is none, or a file is unreadable, of another schema version, lacks a
            column, or repeats a row; all faulty files are listed.
    """
    directory = version_dir / EVIDENCE_DIR
    paths = sorted(directory.glob("[!.]*.parquet"))
    if not paths:
        raise InputError.one(
            "no evidence found",
            "evidence",
            str(directory),
            "train or evaluate the version first, or name another one",
        )
    parts: dict[str, list[pa.Table]] = {table: [] for table in TABLES}
    problems: list[Problem] = []
    for path in paths:
        found = _read(path)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            parts[found[0]].append(found[1])
    if problems:
        raise InputError(problems)
    tables = {name: _concat(name, pieces) for name, pieces in parts.items()}
    _refuse_repeated_rows(tables["rollouts"], directory)
    return Evidence(tables)


def empty() -> Evidence:
    """Evidence without rows: what a version without a parent is compared with."""
    return Evidence({name: schema(name).empty_table() for name in TABLES})


def _concat(name: str, pieces: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(pieces) if pieces else schema(name).empty_table()


def _read(path: Path) -> tuple[str, pa.Table] | Problem:
    remedy = "remove the file, or write the evidence again"
    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        return Problem(f"not a readable Parquet file ({error})", str(path), path.name, remedy)
    metadata = table.schema.metadata or {}
    version = metadata.get(VERSION_KEY, b"none").decode("utf-8", "replace")
    if version != str(SCHEMA_VERSION):
        return Problem(
            f"evidence schema version {version}; this evojax reads version {SCHEMA_VERSION}",
            str(path),
            version,
            "read it with the evojax that wrote it",
        )
    name = metadata.get(TABLE_KEY, b"").decode("utf-8", "replace")
    if name not in TABLES:
        return Problem("not an evidence table", str(path), name, f"valid: {', '.join(TABLES)}")
    want = schema(name)
    missing = [c for c in want.names if c not in table.column_names]
    if missing:
        return Problem(f"columns are missing: {', '.join(missing)}", str(path), name, remedy)
    try:
        return name, table.select(want.names).cast(want)
    except (pa.ArrowException, ValueError) as error:
        return Problem(f"a column has the wrong type ({error})", str(path), name, remedy)


def _refuse_repeated_rows(rollouts: pa.Table, directory: Path) -> None:
    distinct = rollouts.group_by(_ROW_KEY).aggregate([])
    extra = rollouts.num_rows - distinct.num_rows
    if extra:
        raise InputError.one(
            f"{extra} rollouts are stored twice, every mean over them would be wrong",
            str(directory),
            extra,
            "remove the part files that overlap",
        )
