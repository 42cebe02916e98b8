"""The math domain as a whole: order of grades, features, description."""

from __future__ import annotations

import json
import math

import pytest

from evojax.config import DomainConf
from evojax.domains.base import load_domain
from evojax.evidence.types import FinishReason, Item

STOP: list[FinishReason] = ["stop"]

CONF = DomainConf(tasks=["parity", "times"], train_items=20, eval_items=5, audit_items=5)


def test_case_M14_grades_of_mixed_graders_stay_in_order() -> None:
    domain = load_domain(CONF)
    line = Item("a", "t", "?", "7", "train", "line")
    boxed = Item("b", "t", "?", "7", "train", "boxed", stop=())
    items = [boxed, line, boxed, line, boxed]
    texts = [r"\boxed{7}", "I don't know\n", r"\boxed{8}", "", r"\boxed{\frac{14}{2}}"]
    grades = domain.grade(items, texts, STOP * 5)
    assert [g.status for g in grades] == ["correct", "wrong", "wrong", "wrong", "correct"]
    assert [g.extracted for g in grades] == ["7", "I don't know", "8", "", r"\frac{14}{2}"]
    assert domain.describe()["graders"]["boxed"]["asked"] == 3
    assert domain.grade([], [], []) == []
    with pytest.raises(ValueError, match="5 items, 4 texts"):
        domain.grade(items, texts[:4], STOP * 5)
    domain.close()
    domain.close()


def test_generated_items_need_no_worker_process() -> None:
    domain = load_domain(CONF)
    items = domain.items("eval")
    grades = domain.grade(items, [f" {i.answer}\n" for i in items], STOP * len(items))
    assert {g.status for g in grades} == {"correct"}
    assert list(domain.describe()["graders"]) == ["line"]


def test_features_are_finite_numbers() -> None:
    domain = load_domain(CONF)
    item = domain.items("train")[0]
    assert domain.features(item, " 12a", 3) == {
        "tokens": 3.0,
        "chars": 4.0,
        "answer_chars": 3.0,
        "digits_share": 2 / 3,
        "boxes": 0.0,
        "thinks": 0.0,
    }
    for text in ("", "\n", r"<think>\boxed{3}"):
        assert all(math.isfinite(v) for v in domain.features(item, text, 0).values())


def test_description_is_json_and_complete() -> None:
    report = load_domain(CONF).describe()
    assert json.loads(json.dumps(report)) == report
    assert report["counts"] == {"train": 40, "eval": 10, "audit": 10}
    assert report["counts_by_task"]["eval"] == {"parity": 5, "times": 5}
    assert len(set(report["sha256"].values())) == 3


def test_items_are_a_copy() -> None:
    domain = load_domain(CONF)
    domain.items("eval").clear()
    assert len(domain.items("eval")) == 10
