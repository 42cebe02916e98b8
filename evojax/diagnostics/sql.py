"""Runs SQL that may have been written by a model, over evidence, without trusting it.

The query sees tables in memory and nothing else. DuckDB's own locks (no external access, no
extensions, no replacement scans, locked configuration) are one wall; the other is a process of
its own with an address-space limit that is killed when it overruns its time, because DuckDB
checks neither time nor memory inside one vector of values (``repeat('x', 2000000000)``).
"""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from evojax.errors import EvojaxError
from evojax.evidence.reader import Evidence, empty

_WORKER = Path(__file__).with_name("sql_worker.py")
_START_S = 60.0  # importing DuckDB on a busy machine
_GRACE_S = 2.0  # between DuckDB's own interrupt and the kill

# One row per drawn training group. A group is dead when its scored rewards span no more than
# 1e-6: it has no advantage to learn from. NULL where no sample could be scored.
_GROUPS = """
CREATE VIEW {prefix}groups AS
SELECT step, "group", any_value(refill_round) AS refill_round, any_value(item) AS item,
       any_value(task) AS task, count(*) AS samples, count(reward) AS scored,
       bool_or(kept) AS kept, avg(reward) AS reward_mean, stddev_samp(reward) AS reward_std,
       max(reward) - min(reward) <= 1e-6 AS dead,
       sum((grade_status = 'correct')::INT) AS correct, sum((grade_status = 'wrong')::INT) AS wrong
FROM {prefix}rollouts WHERE split = 'train' GROUP BY step, "group"
"""


class QueryError(EvojaxError):
    """A query was refused, failed, or ran past its limits; the message says which."""


@dataclass(frozen=True)
class SqlLimits:
    """What one query may use.

    Args:
        timeout_s: wall clock, seconds. memory_mb: DuckDB's memory, MiB. max_rows: result rows.
    """

    timeout_s: float = 20.0
    memory_mb: int = 512
    max_rows: int = 10_000


@dataclass(frozen=True)
class QueryResult:
    """Rows of a query; values are None, bool, int, float or str."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def evidence_tables(evidence: Evidence, parent: Evidence | None) -> dict[str, pa.Table]:
    """Tables a metric may name: this version's, and the parent's as ``parent_*``."""
    other = empty() if parent is None else parent
    return evidence.tables | {f"parent_{name}": t for name, t in other.tables.items()}


EVIDENCE_VIEWS = (_GROUPS.format(prefix=""), _GROUPS.format(prefix="parent_"))


class SqlRunner:
    """A locked DuckDB over given tables, as a context manager.

    Args:
        tables: Arrow tables by the name that queries use. views: CREATE VIEW statements of ours.

    >>> with SqlRunner({"t": pa.table({"x": [1, 2, None]})}) as runner:
    ...     runner.query("SELECT avg(x) AS value FROM t").rows
    ((1.5,),)
    """

    def __init__(
        self,
        tables: Mapping[str, pa.Table],
        views: tuple[str, ...] = (),
        limits: SqlLimits | None = None,
    ):
        self.limits = limits or SqlLimits()
        header = {"memory_mb": self.limits.memory_mb, "tables": list(tables), "views": views}
        self._setup = [json.dumps(header).encode(), *map(_ipc, tables.values())]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SqlRunner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def query(self, sql: str) -> QueryResult:
        """Rows of one SELECT (or WITH ... SELECT) statement.

        Raises:
            QueryError: it is anything else, it failed, or it ran past a limit.
        """
        process = self._process or self._start()
        limits = self.limits
        request = {"sql": sql, "timeout_s": limits.timeout_s, "max_rows": limits.max_rows}
        try:
            _send(process, json.dumps(request).encode())
            answer = _receive(process, limits.timeout_s + _GRACE_S)
        except TimeoutError:
            self.close()
            raise QueryError(f"killed after {limits.timeout_s:g} s") from None
        except (EOFError, BrokenPipeError):
            self.close()
            raise QueryError(
                f"the SQL process died, out of memory? ({limits.memory_mb} MiB allowed)"
            ) from None
        if "error" in answer:
            raise QueryError(answer["error"])
        return QueryResult(tuple(answer["columns"]), tuple(map(tuple, answer["rows"])))

    def close(self) -> None:
        """End the process; a later query starts a fresh one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        keep = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR")
        process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run to handle, not for its SQL process
            env={k: os.environ[k] for k in keep if k in os.environ},
        )
        self._process = process
        try:
            for body in self._setup:
                _send(process, body)
            _receive(process, _START_S)
        except (TimeoutError, EOFError, BrokenPipeError):
            self.close()
            raise QueryError("the SQL process did not start; is duckdb installed?") from None
        return process


def _ipc(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _send(process: subprocess.Popen[bytes], body: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(struct.pack(">I", len(body)) + body)
    process.stdin.flush()


def _receive(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    fd = process.stdout.fileno()
    size = struct.unpack(">I", _read_exactly(fd, 4, deadline))[0]
    return json.loads(_read_exactly(fd, size, deadline))


def _read_exactly(fd: int, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise TimeoutError
        piece = os.read(fd, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
