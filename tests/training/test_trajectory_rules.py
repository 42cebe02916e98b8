"""Rules for single rollouts at their limits, and what they ask of a domain."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from evojax.config import DomainConf
from evojax.domains.base import load_domain, recorded_features
from evojax.errors import InputError
from evojax.evidence.types import Completion, Grade, GradeStatus, Item, Trajectory
from evojax.training.trajectory_rules import (
    TRAJECTORY_RULES,
    Facts,
    first_match,
    missing_features,
)


def facts(turns: float, edits: float, wrong: bool = True) -> Facts:
    return Facts(truncated=False, wrong=wrong, features={"turns": turns, "edits": edits})


@pytest.mark.parametrize(
    ("name", "seen", "applies"),
    [
        ("truncated", Facts(True, False, {}), True),
        ("truncated", Facts(False, True, {}), False),
        ("abandonment", facts(3, 0), True),
        ("abandonment", facts(3, 0, wrong=False), True),
        ("abandonment", facts(4, 0), False),
        ("abandonment", facts(3, 1), False),
        ("idle", facts(20, 0), True),
        ("idle", facts(20, 0, wrong=False), False),
        ("idle", facts(20, 1), False),
        ("echo_trap", facts(61, 5), True),
        ("echo_trap", facts(60, 5), False),
        ("echo_trap", facts(61, 5, wrong=False), False),
    ],
)
def test_rules_at_their_limits(name: str, seen: Facts, applies: bool):
    assert TRAJECTORY_RULES.get(name, "t").applies(seen) is applies
    assert first_match([name], seen) == (name if applies else None)


def test_a_rollout_counts_for_the_first_rule_in_the_list():
    assert first_match(["idle", "abandonment"], facts(2, 0)) == "idle"
    assert first_match(["abandonment", "idle"], facts(2, 0)) == "abandonment"
    assert first_match([], facts(2, 0)) is None
    with pytest.raises(InputError, match="trajectory rule"):
        first_match(["tired"], facts(2, 0))


@pytest.mark.parametrize(
    ("status", "wrong"), [("wrong", True), ("correct", False), ("unscorable", False)]
)
def test_facts_of_a_rollout_never_call_the_unscorable_wrong(status: GradeStatus, wrong: bool):
    item = Item("i", "t", "?", "1", "train", "line", stop=("\n",))
    done = Completion(np.zeros(1, np.int32), np.zeros(1), np.zeros(1), "length", "v@0")
    t = Trajectory(item, np.zeros(1, np.int32), done, "", Grade(status), 0.0, 0, 0, 0, 0,
                   features={"turns": 1.0})  # fmt: skip
    assert Facts.of(t) == Facts(True, wrong, {"turns": 1.0})
    endless = dataclasses.replace(t, item=dataclasses.replace(item, stop=()))
    assert not Facts.of(endless).truncated  # without a stop rule every length is complete


def test_rules_that_a_domain_records_nothing_for_are_named():
    found = missing_features(["truncated", "abandonment", "idle", "echo_trap"], "math")
    assert [p.value for p in found] == ["abandonment", "idle", "echo_trap"]
    assert {p.where for p in found} == {"filter.trajectory"}
    assert "turns and edits" in found[0].what and "domain.name=math" in found[0].what
    assert missing_features(["truncated"], "math") == []
    assert missing_features(["tired"], "math") == [] == missing_features(["idle"], "no such")


def test_math_records_the_features_that_it_declares():
    conf = DomainConf(tasks=["add_sub"], train_items=4, eval_items=2, audit_items=2)
    domain = load_domain(conf)
    seen = domain.features(domain.items("train")[0], " 12", 3)
    domain.close()
    assert set(seen) == recorded_features("math")
    assert recorded_features("no such") is None
