from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from evojax.errors import InputError
from evojax.evolution.store import EvalProtocol, VersionResult, VersionStore, items_hash

RESULT = VersionResult(
    version="v002", parent="v001", role="candidate", round=1, branch="evo/x/v002", commit="abc",
    status="trained", config_hash="f" * 64, start_step=24, steps=12,
    scores={"a": 0.5, "b": float("nan")}, score=0.5, ci95=(0.25, 0.75),
    protocol=EvalProtocol("eval", 8, 1.0, 6, 42, "00"),
)  # fmt: skip


def test_results_survive_the_round_trip(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    store.path("v002").mkdir(parents=True)
    assert store.result("v002") is None
    store.save(RESULT)
    found = store.require("v002")
    assert found.scores == {"a": 0.5, "b": None}
    assert dataclasses.replace(found, scores={}) == dataclasses.replace(RESULT, scores={})
    assert found.end_step == 36
    assert store.names() == ["v002"]


def test_unscorable_items_are_null_in_the_file_never_zero(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    store.path("v002").mkdir(parents=True)
    store.save(RESULT)
    raw = json.loads((store.path("v002") / "result.json").read_text())
    assert raw["scores"]["b"] is None


@pytest.mark.parametrize("name", ["../x", "a/b", "", "-rf", "v 1"])
def test_names_that_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="not a version name"):
        VersionStore(tmp_path).path(name)


def test_an_unknown_version_lists_those_there_are(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    store.path("v002").mkdir(parents=True)
    store.save(RESULT)
    with pytest.raises(InputError, match="choose one of: v002"):
        store.require("v009")


def test_item_hash_ignores_order() -> None:
    assert items_hash(["b", "a"]) == items_hash(["a", "b"]) != items_hash(["a"])
