from __future__ import annotations

import os

import pyarrow as pa
import pytest

from evojax.diagnostics.sql import QueryError, SqlLimits, SqlRunner

hostile_table = pa.table({"a": [1, 2]})  # reachable only by a Python replacement scan


@pytest.fixture(scope="module")
def runner():
    table = pa.table({"x": [1, 2, None], "group": [0, 0, 1]})
    with SqlRunner({"rollouts": table}, limits=SqlLimits(timeout_s=1.0, memory_mb=128)) as r:
        yield r


@pytest.mark.parametrize(
    ("sql", "row"),
    [
        ("SELECT avg(x) AS value FROM rollouts", (1.5,)),
        ('WITH g AS (SELECT count(x) n FROM rollouts GROUP BY "group") SELECT max(n) FROM g', (2,)),
        ("SELECT 'nan'::DOUBLE, NULL, true, 'x', 1.5::DECIMAL(4,1)", ("nan", None, True, "x", 1.5)),
    ],
)
def test_select_and_with_run(runner, sql, row):
    assert runner.query(sql).rows == (row,)


ATTACKS = {
    "read_csv": "SELECT * FROM read_csv('/etc/passwd')",
    "file as a table": "SELECT * FROM '/etc/passwd'",
    "read_text": "SELECT content FROM read_text('/etc/passwd')",
    "read_blob": "SELECT content FROM read_blob('/etc/passwd')",
    "glob": "SELECT * FROM glob('/etc/*')",
    "parquet": "SELECT * FROM parquet_scan('/tmp/x.parquet')",
    "http": "SELECT * FROM read_csv('http://127.0.0.1:9/x.csv')",
    "copy to": "COPY (SELECT 1) TO '/tmp/evojax-copy.csv'",
    "attach": "ATTACH '/tmp/evojax-attach.db' AS d",
    "install": "INSTALL httpfs",
    "load": "LOAD json",
    "pragma": "PRAGMA database_list",
    "set": "SET threads = 4",
    "unlock": "SET enable_external_access = true",
    "create": "CREATE TABLE t (x INT)",
    "drop": "DROP VIEW rollouts",
    "call": "CALL pragma_version()",
    "explain": "EXPLAIN ANALYZE SELECT 1",
    "export": "EXPORT DATABASE '/tmp/evojax-export'",
    "writing CTE": "WITH a AS (INSERT INTO rollouts VALUES (1, 1) RETURNING *) SELECT * FROM a",
    "replacement scan": "SELECT * FROM hostile_table",
    "environment": "SELECT getenv('HOME')",
    "two statements": "SELECT 1; SELECT 2",
    "hidden statement": "SELECT 1; -- ok\nCOPY (SELECT 1) TO '/tmp/evojax-copy.csv'",
    "empty": "",
    "comment only": "-- nothing",
    "not SQL": "ignore your instructions",
    "unknown column": "SELECT nope FROM rollouts",
    "too many rows": "SELECT * FROM range(20000)",
}


@pytest.mark.parametrize("sql", ATTACKS.values(), ids=ATTACKS.keys())
def test_attacks_are_refused_with_a_message(runner, sql):
    with pytest.raises(QueryError) as caught:
        runner.query(sql)
    assert str(caught.value) and "Traceback" not in str(caught.value)
    assert "root:" not in str(caught.value)
    assert not any(os.path.exists(f"/tmp/evojax-{n}") for n in ("copy.csv", "attach.db", "export"))


BOMBS = {
    "cross join": "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000) c",
    "recursion": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) "
    "SELECT max(n) FROM r",
    "aggregate": "SELECT list(range) FROM range(1000000000)",
    "one huge value": "SELECT length(repeat('x', 2000000000))",
    "huge list": "SELECT list_sum(list_transform(range(100000000), lambda x: x * 2))",
}


@pytest.mark.parametrize("sql", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_end_within_the_limits_and_the_runner_goes_on(runner, sql):
    with pytest.raises(QueryError, match="stopped|killed|[Oo]ut of [Mm]emory|MemoryError|allocate"):
        runner.query(sql)
    assert runner.query("SELECT count(*) FROM rollouts").rows == ((3,),)


def test_the_process_has_none_of_our_environment(runner, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    with SqlRunner({"t": pa.table({"x": [1]})}) as fresh:
        fresh.query("SELECT 1")
        assert fresh._process is not None
        with open(f"/proc/{fresh._process.pid}/environ", "rb") as file:
            assert b"s3cret" not in file.read()


def test_a_killed_process_is_replaced(runner):
    runner.query("SELECT 1")
    runner._process.kill()
    runner._process.wait()
    with pytest.raises(QueryError):
        runner.query("SELECT 1")
    assert runner.query("SELECT 1").rows == ((1,),)
