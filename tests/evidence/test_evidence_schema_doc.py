from __future__ import annotations

from pathlib import Path

from evojax.evidence.schema import describe

DOC = Path(__file__).resolve().parents[2] / "docs" / "evidence.md"


def test_the_documented_contract_is_the_one_in_force() -> None:
    """After a change of the schema: python -m evojax.evidence.schema > docs/evidence.md"""
    assert DOC.read_text(encoding="utf-8") == describe() + "\n"
