"""The version ledger: one SQLite file a run, with versions, events and cases.

Every write is one transaction and can be made again: a version is one row under its name, an event
one row under its key, a case one row under its version.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from evojax.errors import InputError, UnavailableError

SCHEMA = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS versions (
    version TEXT PRIMARY KEY, parent TEXT, branch TEXT, commit_sha TEXT, factor TEXT,
    hypothesis TEXT, status TEXT NOT NULL, score REAL, data TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS events (
    key TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, at TEXT NOT NULL, kind TEXT NOT NULL,
    version TEXT, data TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS cases (
    version TEXT PRIMARY KEY, rule TEXT NOT NULL, factor TEXT NOT NULL, outcome TEXT NOT NULL,
    data TEXT NOT NULL
) STRICT;
"""
_VERSION_COLUMNS = ("parent", "branch", "commit_sha", "factor", "hypothesis", "status", "score")


class Ledger:
    """Opens (and makes, if need be) the ledger at ``path``.

    Raises:
        InputError: the file is no ledger, or one of a later schema.
        UnavailableError: it cannot be read or written.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._guard():
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, SCHEMA):
                raise InputError.one(
                    f"a ledger of schema {found}, this program knows {SCHEMA}", "resume",
                    str(path), "use the program that wrote it",
                )  # fmt: skip
            self._db.executescript(f"BEGIN;{_TABLES}PRAGMA user_version={SCHEMA};COMMIT;")

    def upsert_version(self, version: str, status: str, **fields: Any) -> None:
        """File what is known of a version; fields not given keep their value.

        Args:
            status: base, trained, failed, or the verdict.
            fields: parent, branch, commit_sha, factor, hypothesis, score; anything else (delta,
                interval, ...) goes into the row's data. Numbers that are not finite become null.
        """
        clean = _finite_only(fields)
        columns = {k: clean[k] for k in _VERSION_COLUMNS if k in clean} | {"status": status}
        extra = {k: v for k, v in clean.items() if k not in _VERSION_COLUMNS}
        with self._transaction():
            row = self._db.execute(
                "SELECT data FROM versions WHERE version = ?", (version,)
            ).fetchone()
            data = json.dumps((json.loads(row[0]) if row else {}) | extra, sort_keys=True)
            self._db.execute(
                "INSERT INTO versions (version, status, data) VALUES (?, ?, ?) "
                "ON CONFLICT (version) DO UPDATE SET data = excluded.data",
                (version, status, data),
            )
            for name, value in columns.items():  # names are those of _VERSION_COLUMNS
                self._db.execute(
                    f"UPDATE versions SET {name} = ? WHERE version = ?", (value, version)
                )

    def versions(self) -> list[dict[str, Any]]:
        """Every version as one flat mapping, by name."""
        names = ("version", *_VERSION_COLUMNS, "data")
        rows = self._read(f"SELECT {', '.join(names)} FROM versions ORDER BY version")
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return [json.loads(row.pop("data")) | row for row in found]

    def event(self, key: str, kind: str, version: str | None = None, **data: Any) -> None:
        """Append an event; one whose ``key`` is there already is left as it is."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO events (key, number, at, kind, version, data) VALUES "
                "(?, (SELECT coalesce(max(number), 0) + 1 FROM events), ?, ?, ?, ?)",
                (key, now, kind, version, json.dumps(_finite_only(data), sort_keys=True)),
            )

    def session(self, key: str, seconds: float) -> None:
        """Put down how long a session has lasted so far, in place of what was said before."""
        self.event(key, "session", seconds=seconds)
        with self._transaction():
            self._db.execute(
                "UPDATE events SET data = ? WHERE key = ?",
                (json.dumps({"seconds": seconds}), key),
            )

    def events(self) -> list[dict[str, Any]]:
        """Every event, in the order of their first arrival."""
        rows = self._read("SELECT key, at, kind, version, data FROM events ORDER BY number")
        return [
            {"key": k, "at": at, "kind": kind, "version": v, **json.loads(data)}
            for k, at, kind, v, data in rows
        ]

    def put_case(
        self, version: str, rule: str, factor: str, outcome: str, data: Mapping[str, Any]
    ) -> None:
        """File the case of ``version``, in place of an earlier one."""
        text = json.dumps(_finite_only(data), sort_keys=True)
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO cases VALUES (?, ?, ?, ?, ?)",
                (version, rule, factor, outcome, text),
            )

    def cases(self) -> list[dict[str, Any]]:
        """Every case's data, by version."""
        return [json.loads(d) for (d,) in self._read("SELECT data FROM cases ORDER BY version")]

    def close(self) -> None:
        """Fold the write-ahead log into the file and close it."""
        self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, sql: str) -> list[tuple[Any, ...]]:
        with self._guard():
            return self._db.execute(sql).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._guard():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise UnavailableError(
                f"the ledger {self.path} cannot be used: {error}. Remedy: free the disk, or end "
                "the process that has it open, then resume"
            ) from error
        except sqlite3.DatabaseError as error:
            raise InputError.one(
                f"not a ledger: {error}", "resume", str(self.path), "move the file away"
            ) from error


def _finite_only(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _finite_only(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_only(v) for v in value]
    return value
