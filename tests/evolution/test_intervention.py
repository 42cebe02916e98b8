"""Strict reading of proposals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evojax.errors import InputError
from evojax.evolution.config_edit import compose_conf
from evojax.evolution.intervention import parse_intervention

GOOD: dict[str, Any] = {
    "rule": "refill-dead-groups",
    "factor": "filter",
    "hypothesis": "dead groups waste rollouts",
    "edits": {"filter.refill_rounds": 2},
    "predicts": {"metric": "wasted_rollout_share", "direction": "down", "at_least": 0.1},
    "success_criterion": "accuracy rises",
    "rollback": "filter.refill_rounds = 0",
    "evidence": {"dead_group_share": 0.5},
    "origin": "llm",
}


def test_a_good_proposal_is_read() -> None:
    text = json.dumps(GOOD, indent=1)
    for reply in (text, f"```json\n{text}\n```\n", f"```\n{text}\n```"):
        got = parse_intervention(reply)
        assert got.edits == {"filter.refill_rounds": 2} and got.slug == "refill-dead-groups"
    assert got.edit_hash == parse_intervention(text).edit_hash


TEXT = json.dumps(GOOD)


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        ("```json\n" + TEXT + "\n```\nI hope this helps", "around the fence"),
        (TEXT[: int(0.8 * len(TEXT))], "not one complete JSON"),
        (TEXT[:-1] + ', "surprise": 1}', "surprise"),
        (TEXT[:-1] + ', "factor": "data"}', "given twice: factor"),
        ("lr: 1\nlr: 2", "not one complete JSON"),
        (TEXT + "\n```", "not closed or not opened"),
        ("", "empty"),
        (" \n", "empty"),
        ("Sure! " + TEXT, "not one complete JSON"),
        ("[" + TEXT + "]", "not a JSON object"),
        (TEXT.replace("0.1", "NaN"), "NaN is not"),
        ("[" * 100_000, "more than"),
        ("[" * 50_000, "JSON"),
    ],
)
def test_case_E02_unusable_replies_are_refused(reply: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        parse_intervention(reply)


@pytest.mark.parametrize(
    "change",
    [
        {"edits": {}}, {"edits": {"a b": 1}}, {"edits": {"reward._target_": "os.system"}},
        {"edits": {"algorithm.lr": "${seed}"}}, {"edits": {"algorithm.lr": {"a": 1}}},
        {"edits": {"algorithm.lr": None}}, {"factor": "eval"}, {"rule": "../x"},
        {"predicts": {"metric": "a", "direction": "sideways", "at_least": 0}},
        {"hypothesis": ""}, {"origin": "me"}, {"evidence": {"a": "b"}},
    ],
)  # fmt: skip
def test_case_E02_wrong_fields_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        parse_intervention(json.dumps(GOOD | change))


def test_case_E02_an_unchanged_configuration_is_noticed(conf_dir: Path) -> None:
    cfg = compose_conf(conf_dir, ["+experiment=math"])
    same = GOOD | {"edits": {"filter.refill_rounds": 0}}
    assert not parse_intervention(json.dumps(GOOD)).unchanged(cfg)
    assert parse_intervention(json.dumps(same)).unchanged(cfg)
