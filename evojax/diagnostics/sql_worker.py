"""The process that runs metric SQL: DuckDB, locked, under an address-space limit.

Started by ``evojax.diagnostics.sql`` as a plain file, so it imports nothing of evojax. Frames on
stdin and stdout are four bytes of length (big-endian) and a body. The first frame is JSON
``{"memory_mb", "tables", "views"}``, then one Arrow IPC stream per table; after that each frame
is ``{"sql", "timeout_s", "max_rows"}`` and is answered with ``{"columns", "rows"}`` or
``{"error"}``.
"""

from __future__ import annotations

import json
import math
import resource
import struct
import sys
import threading
from decimal import Decimal
from typing import Any, BinaryIO

import duckdb
import pyarrow as pa

# Room beside DuckDB's own limit for values under evaluation, which DuckDB does not count.
_SLACK_MB = 256


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(4)
    if len(head) < 4:
        return None
    return stream.read(struct.unpack(">I", head)[0])


def _write(stream: BinaryIO, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    stream.write(struct.pack(">I", len(data)) + data)
    stream.flush()


def _locked_connection(memory_mb: int) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:", config={"threads": "1"})
    for setting, value in (
        ("autoinstall_known_extensions", "false"),
        ("autoload_known_extensions", "false"),
        ("allow_community_extensions", "false"),
        ("allow_persistent_secrets", "false"),
        ("python_enable_replacements", "false"),
        ("memory_limit", f"'{memory_mb}MiB'"),
        ("temp_directory", "''"),
        ("enable_external_access", "false"),
    ):
        connection.execute(f"SET {setting} = {value}")
    return connection


def _limit_address_space(extra_mb: int) -> None:
    if sys.platform != "linux":
        return  # no other system enforces it; there the parent's time limit is the only wall
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + extra_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, Decimal)):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return str(value)


def _answer(connection: duckdb.DuckDBPyConnection, request: dict[str, Any]) -> dict[str, Any]:
    timer = threading.Timer(request["timeout_s"], connection.interrupt)
    timer.start()
    try:
        statements = connection.extract_statements(request["sql"])
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            kinds = ", ".join(s.type.name for s in statements) or "nothing"
            return {"error": f"exactly one SELECT statement is allowed, got: {kinds}"}
        result = connection.execute(statements[0])
        rows = result.fetchmany(request["max_rows"] + 1)
        columns = [d[0] for d in result.description or ()]
    except duckdb.InterruptException:
        return {"error": f"stopped after {request['timeout_s']:g} s"}
    except (duckdb.Error, MemoryError, UnicodeError) as error:
        return {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
    finally:
        timer.cancel()
    if len(rows) > request["max_rows"]:
        return {"error": f"more than {request['max_rows']} rows"}
    return {"columns": columns, "rows": [[_plain(v) for v in row] for row in rows]}


def main() -> None:
    """Serve queries until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    header = _read(source)
    if header is None:
        return
    config = json.loads(header)
    connection = _locked_connection(config["memory_mb"])
    for name in config["tables"]:
        stream = _read(source)
        if stream is None:
            return
        connection.register(name, pa.ipc.open_stream(stream).read_all())
    for view in config["views"]:
        connection.execute(view)
    connection.execute("SET lock_configuration = true")
    _limit_address_space(config["memory_mb"] + _SLACK_MB)
    _write(sink, {"ready": True})
    while (body := _read(source)) is not None:
        _write(sink, _answer(connection, json.loads(body)))


if __name__ == "__main__":
    main()
