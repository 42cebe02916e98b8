from __future__ import annotations

from evojax.evidence.schema import SCHEMA_VERSION, TABLE_KEY, TABLES, VERSION_KEY, describe, schema


def test_every_column_is_named_once_and_documented():
    for columns in TABLES.values():
        names = [c.name for c in columns]
        assert len(names) == len(set(names))
        assert all(c.doc for c in columns)


def test_metadata_names_table_and_version():
    for table in TABLES:
        metadata = schema(table).metadata
        assert metadata[TABLE_KEY] == table.encode()
        assert metadata[VERSION_KEY] == str(SCHEMA_VERSION).encode()


def test_describe_lists_every_column():
    text = describe()
    assert "## rollouts" in text and "## turns" in text and "## updates" in text
    for columns in TABLES.values():
        for c in columns:
            assert f"| `{c.name}` |" in text
