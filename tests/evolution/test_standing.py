"""Which version a run ends with, given its verdicts."""

from __future__ import annotations

from typing import Any

from evojax.evolution.intervention import Intervention, Predicts
from evojax.evolution.rounds import Planned, RoundPlan
from evojax.evolution.standing import best_promoted, control_of, standing


def verdict(outcome: str, mean: float = 0.0, half: float = 0.1) -> dict[str, Any]:
    return {"outcome": outcome, "comparison": {"mean": mean, "ci95": [mean - half, mean + half]}}


def plan(number: int, *versions: str, parent: str = "v001") -> RoundPlan:
    proposal = Intervention(
        rule="r", factor="filter", hypothesis="h", edits={"filter.refill_rounds": 1},
        predicts=Predicts(metric="m", direction="up", at_least=0.0), success_criterion="s",
        rollback="b", origin="rule",
    )  # fmt: skip
    found = tuple(Planned(v, proposal, {}, "b", "c", "w") for v in versions)
    return RoundPlan(number, parent, found, (), ())


def test_untrained_run_stands_at_the_base() -> None:
    assert standing({}, []) == ("v000", None)
    assert standing({"v001": verdict("promoted")}, []) == ("v001", None)


def test_the_best_promoted_candidate_stands() -> None:
    verdicts = {
        "v001": verdict("promoted"),
        "r1-control": verdict("undecided"),
        "v002": verdict("promoted", 0.1),
        "v003": verdict("promoted", 0.2),
    }
    assert standing(verdicts, [plan(1, "v002", "v003")]) == ("v003", "v003")


def test_without_promotion_the_parent_stands() -> None:
    verdicts = {
        "v001": verdict("promoted"),
        "r1-control": verdict("undecided", 0.05),
        "v002": verdict("undecided", 0.09),
    }
    assert standing(verdicts, [plan(1, "v002")]) == ("v001", None)
    verdicts["r1-control"] = verdict("rejected", -0.2)
    assert standing(verdicts, [plan(1, "v002")]) == ("v001", None)


def test_a_control_that_is_clearly_better_replaces_the_parent() -> None:
    verdicts = {"v001": verdict("promoted"), "r1-control": verdict("promoted", 0.2)}
    assert standing(verdicts, [plan(1)]) == ("r1-control", None)


def test_rounds_with_the_same_parent_share_a_control() -> None:
    plans = [plan(1), plan(2), plan(3, parent="v004")]
    assert [control_of(p, plans) for p in plans] == ["r1-control", "r1-control", "r3-control"]


def test_an_unfinished_round_changes_nothing() -> None:
    verdicts = {"v001": verdict("promoted")}
    assert standing(verdicts, [plan(1, "v002")]) == ("v001", None)


def test_promotion_is_remembered_over_later_rounds() -> None:
    verdicts = {
        "v001": verdict("promoted"),
        "r1-control": verdict("undecided"),
        "v002": verdict("promoted", 0.1),
        "r2-control": verdict("undecided"),
        "v003": verdict("rejected", -0.1, 0.05),
    }
    assert standing(verdicts, [plan(1, "v002"), plan(2, "v003", parent="v002")]) == (
        "v002",
        "v002",
    )


def test_failed_and_invalid_candidates_are_never_best() -> None:
    raw = {"v002": {"outcome": "invalid", "comparison": None}, "v003": verdict("undecided", 0.9)}
    assert best_promoted(raw) is None
