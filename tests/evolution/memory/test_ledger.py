"""Ledger and case memory."""

from __future__ import annotations

import dataclasses
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from evojax.errors import InputError, UnavailableError
from evojax.evolution.memory.cases import Case, CaseMemory
from evojax.evolution.memory.ledger import Ledger


def case(version: str, rule: str, outcome: str, factor: str = "filter", edit: str = "") -> Case:
    return Case(
        version, "v001", rule, factor, {"filter.refill_rounds": 2}, edit or version, "h", outcome,
        evidence={"dead_group_share": 0.5}, symptoms=("weak signal",), delta=0.1,
        ci95=(0.0, 0.2), p=0.04,
    )  # fmt: skip


def test_writes_can_be_made_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for _ in range(2):
        with Ledger(path) as ledger:
            ledger.upsert_version("v001", "trained", parent="v000", score=0.5, ci95=[0.4, 0.6])
            ledger.upsert_version("v001", "promoted", note="x", delta=float("nan"))
            ledger.event("start", "run", seed=1)
            ledger.event("v001/verdict", "verdict", "v001", words="promoted")
            CaseMemory().add(ledger, case("v002", "refill", "promoted"))
    with Ledger(path) as ledger:
        (row,) = ledger.versions()
        assert row == {
            "version": "v001", "parent": "v000", "branch": None, "commit_sha": None,
            "factor": None, "hypothesis": None, "status": "promoted", "score": 0.5,
            "ci95": [0.4, 0.6], "note": "x", "delta": None,
        }  # fmt: skip
        assert [(e["key"], e["kind"]) for e in ledger.events()] == [
            ("start", "run"), ("v001/verdict", "verdict"),
        ]  # fmt: skip
        assert CaseMemory.load(ledger).cases == [case("v002", "refill", "promoted")]


def test_a_killed_writer_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    code = (
        "import os, sys; from pathlib import Path\n"
        "from evojax.evolution.memory.ledger import Ledger\n"
        "l = Ledger(Path(sys.argv[1])); l.upsert_version('v001', 'trained', parent='v000')\n"
        "l._db.execute('BEGIN IMMEDIATE'); l._db.execute('DELETE FROM versions')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == -9
    with Ledger(path) as ledger:
        assert [v["version"] for v in ledger.versions()] == ["v001"]


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be looked at" * 40)
    with pytest.raises(InputError, match="not a ledger"):
        Ledger(tmp_path / "text")
    db = sqlite3.connect(tmp_path / "later")
    db.execute("PRAGMA user_version = 99")
    db.commit()
    db.close()
    with pytest.raises(InputError, match="schema 99"):
        Ledger(tmp_path / "later")
    with pytest.raises(UnavailableError):
        Ledger(tmp_path)


def test_success_is_shrunk_to_the_factor() -> None:
    memory = CaseMemory()
    assert memory.success("refill", "filter") == 0.5
    memory.cases = [case("v1", "refill", "promoted"), case("v2", "refill", "rejected"),
                    case("v3", "drop", "invalid"), case("v4", "drop", "undecided")]  # fmt: skip
    prior = (1 + 1) / (3 + 2)
    assert memory.success("refill", "filter") == pytest.approx((1 + 2 * prior) / (2 + 2))
    assert memory.success("drop", "filter", wins=2) == pytest.approx((2 + 2 * prior) / (3 + 2))
    assert memory.success("new", "data") == 0.5
    record = memory.record("symptom", "weak signal")
    assert (record.won, record.lost, record.undecided) == (1, 2, 1)
    assert memory.failed_edits() == {"v2", "v3"}


def test_cases_of_earlier_runs(tmp_path: Path) -> None:
    old = CaseMemory([case("v1", "refill", "rejected")])
    old.export(tmp_path / "cases.jsonl")
    with Ledger(tmp_path / "l.sqlite") as ledger:
        memory = CaseMemory.load(ledger, tmp_path / "cases.jsonl")
        memory.add(ledger, case("v2", "refill", "promoted"))
        memory.add(ledger, dataclasses.replace(case("v2", "refill", "promoted"), delta=0.3))
        assert len(memory.cases) == 2
        assert len(CaseMemory.load(ledger, tmp_path / "cases.jsonl").cases) == 2
        (tmp_path / "cases.jsonl").write_text("{}\n")
        with pytest.raises(InputError, match=r"cases.jsonl:1"):
            CaseMemory.load(ledger, tmp_path / "cases.jsonl")
