from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evidence_fixtures import make_trajectory

from evojax.errors import InputError
from evojax.evidence.reader import empty, load
from evojax.evidence.schema import VERSION_KEY, schema
from evojax.evidence.writer import EvidenceWriter


@pytest.fixture
def version_dir(tmp_path):
    writer = EvidenceWriter(tmp_path / "evidence", "r", "v001")
    for step in range(2):
        writer.rollouts([make_trajectory(step=step, sample=s) for s in range(2)], "train")
        writer.update({"step": step, "skipped": False, "loss": 0.5})
        writer.flush(f"{step:06d}")
    writer.rollouts([make_trajectory(step=2)], "eval")
    writer.flush("eval")
    return tmp_path


def test_load_joins_parts_and_selects_splits(version_dir):
    evidence = load(version_dir)
    assert evidence.rollouts().num_rows == 5
    assert evidence.rollouts("train")["step"].to_pylist() == [0, 0, 1, 1]
    assert evidence.rollouts("audit").num_rows == 0
    assert evidence.turns("eval").num_rows == 1
    assert evidence.updates()["step"].to_pylist() == [0, 1]


def test_missing_evidence_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="no evidence found"):
        load(tmp_path)


def test_all_faulty_files_are_listed(version_dir):
    directory = version_dir / "evidence"
    older = schema("updates").with_metadata({**schema("updates").metadata, VERSION_KEY: b"1"})
    pq.write_table(older.empty_table(), directory / "updates-old.parquet")
    pq.write_table(pa.table({"a": [1]}), directory / "other.parquet")
    (directory / "rollouts-cut.parquet").write_bytes(b"PAR1 cut off")
    short = schema("updates").remove(schema("updates").get_field_index("loss"))
    pq.write_table(short.empty_table(), directory / "updates-short.parquet")
    with pytest.raises(InputError) as caught:
        load(version_dir)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert "schema version 1; this evojax reads version 2" in text
    assert "schema version none" in text
    assert "not a readable Parquet file" in text
    assert "columns are missing: loss" in text


def test_rows_stored_twice_are_refused(version_dir):
    directory = version_dir / "evidence"
    copy = (directory / "rollouts-000000.parquet").read_bytes()
    (directory / "rollouts-again.parquet").write_bytes(copy)
    with pytest.raises(InputError, match="2 rollouts are stored twice"):
        load(version_dir)


def test_a_temporary_file_left_by_a_crash_is_ignored(version_dir):
    (version_dir / "evidence" / ".rollouts-9.parquet.tmp").write_bytes(b"half")
    assert load(version_dir).rollouts().num_rows == 5


def test_empty_has_every_column():
    assert empty().rollouts().column_names == schema("rollouts").names
