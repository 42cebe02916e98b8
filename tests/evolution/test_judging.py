from __future__ import annotations

import dataclasses

from test_store import RESULT

from evojax.config import GateConf
from evojax.diagnostics.health import HealthReport, MetricValue
from evojax.evolution.intervention import Intervention, Predicts
from evojax.evolution.judging import (
    against_parent,
    judge,
    mechanism,
    mechanism_words,
    verdict_document,
    verdict_json,
)

CONF = GateConf(alpha=0.05, resamples=500, min_delta=0.0, seed=1)


def result(version: str, score: float, **changes):
    scores = {f"i{n}": min(1.0, score + 0.01 * (n % 3)) for n in range(20)}
    return dataclasses.replace(RESULT, version=version, scores=scores, **changes)


def proposal(direction: str = "down", at_least: float = 0.05) -> Intervention:
    return Intervention.model_validate(
        {
            "rule": "refill", "factor": "filter", "hypothesis": "h", "origin": "rule",
            "edits": {"filter.refill_rounds": 2}, "success_criterion": "s", "rollback": "b",
            "predicts": Predicts(metric="m", direction=direction, at_least=at_least),  # type: ignore
        }
    )  # fmt: skip


def health(value: float | None) -> HealthReport:
    return HealthReport("v", (), {"m": MetricValue("m", value)}, {}, (), (), ())


def test_clear_winner_clear_loser_and_equal() -> None:
    control = result("r1-control", 0.3)
    arms = [result("v002", 0.5), result("v003", 0.1), result("v004", 0.3)]
    found = judge(control, arms, CONF)
    assert [found[a.version].outcome for a in arms] == ["promoted", "rejected", "rejected"]
    assert found["v004"].comparison is not None and found["v004"].comparison.mean == 0.0


def test_failed_candidate_is_invalid_and_never_a_number() -> None:
    failed = dataclasses.replace(RESULT, version="v002", scores={}, status="failed", score=None)
    verdict = judge(result("r1-control", 0.3), [failed], CONF)["v002"]
    assert verdict.outcome == "invalid" and verdict.comparison is None


def test_other_protocol_is_invalid() -> None:
    assert RESULT.protocol is not None
    other = dataclasses.replace(RESULT.protocol, samples=1)
    verdict = judge(result("c", 0.1), [result("v002", 0.9, protocol=other)], CONF)["v002"]
    assert verdict.outcome == "invalid"


def test_control_is_described_not_judged() -> None:
    words = against_parent(result("v001", 0.5), result("r1-control", 0.3), CONF).words
    assert words.startswith("r1-control, recipe unchanged: -0.200 against v001")


def test_mechanism_by_hand() -> None:
    assert mechanism(proposal(), health(0.5), health(0.4))["moved"] is True
    assert mechanism(proposal(), health(0.5), health(0.47))["moved"] is False
    assert mechanism(proposal("up", 0.0), health(0.5), health(0.5))["moved"] is False
    missing = mechanism(proposal(), health(0.5), health(None))
    assert missing["moved"] is None
    assert "has no value" in mechanism_words(missing)


def test_document_and_json_hold_the_numbers() -> None:
    candidate = result("v002", 0.5)
    verdict = judge(result("r1-control", 0.3), [candidate], CONF)["v002"]
    moved = mechanism(proposal(), health(0.5), health(0.4))
    text = verdict_document(candidate, verdict, proposal(), moved)
    assert text.startswith("# v002: promoted\n") and "moved as predicted" in text
    raw = verdict_json(verdict, moved)
    assert raw["comparison"]["mean"] == 0.2 or abs(raw["comparison"]["mean"] - 0.2) < 1e-9
    assert raw["mechanism"]["moved"] is True
