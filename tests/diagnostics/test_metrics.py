from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worked_example import build_evidence

from evojax.diagnostics.health import diagnose
from evojax.diagnostics.metrics import AlertRule, load_metrics
from evojax.errors import InputError
from evojax.evidence.reader import empty

CONF = Path(__file__).resolve().parents[2] / "conf" / "metrics"
R = {"a1": 3 / 4, "a2": 1 / 2, "a3": 1.0, "b1": 2 / 11, "b2": 0.0}  # success rates by item

EXPECTED = {
    "accuracy": (1 / 2 + 0 + 1) / 3,
    "pass_at_k": 2 / 3,
    "majority_accuracy": (0 + 0 + 1) / 3,  # a tie goes to the larger text: "w" over "c"
    "unscorable_share": 4 / 37,
    "train_accuracy": 11 / 27,
    "reward_trend": 10 * (3 / 12 - 3 / 8) / 2,
    "dead_group_share": 3 / 7,
    "dead_all_correct_share": 1 / 7,
    "dead_all_wrong_share": 2 / 7,
    "dead_expected_share": (
        (0.75**4 + 0.25**4)
        + 2 * (R["b1"] ** 4 + (1 - R["b1"]) ** 4)
        + (R["b1"] ** 3 + (1 - R["b1"]) ** 3)
        + 1
        + 2 * 0.5**4
        + 1
    )
    / 7,
    "update_dead_share": 2 / 6,
    "reward_spread": (0.5 + 0 + 0 + math.sqrt(1 / 3) * 2 + 0 + 0.5) / 7,
    "wasted_rollout_share": 13 / 28,
    "length_reward_corr": -1.5 / math.sqrt(3 * (0.75 + 2 / 3 + 1 + 0.75)),
    "format_violation_share": 5 / 27,
    "truncation_share": 1 / 28,
    "distinct_answer_share": (2 / 4 + 1 / 4 + 1 / 4 + 2 / 3 + 2 / 4 + 1 / 4 + 2 / 4) / 7,
    "response_tokens_p50": 2,
    "response_tokens_p90": 2,
    "tokens_per_live_group": 100 / 4,
    "entropy": 0.1,
    "entropy_trend": 10 * -1.3 / 5,
    "mean_logprob": -28 / 58,
    "clip_high": 0.1,
    "clip_low": 0.0,
    "grad_norm": 2.0,
    "grad_norm_spike": 6.0,
    "ratio_max": 1.5,
    "clip_dual": 0.03,
    "mismatch_k1": 0.002,
    "mismatch_k3": 0.002,
    "mismatch_max": 0.3,
    "effective_sample_share": 0.9,
    "correction_truncated": 0.1,
    "correction_dropped": 0.05,
    "kl_to_start_k1": -0.02,
    "kl_to_start_k3": 0.04,
    "policy_age": 2,
    "useful_token_share": 35 / 100,
    "padding_share": 1 - 120 / 160,
    "filtered_group_share": 1 / 4,
    "group_shortfall": 1,
    "skipped_updates": 2,
    "item_saturation": 1 / 5,
    "item_hopeless": 1 / 5,
    "difficulty_spread": statistics.stdev(R.values()),
}
_CORRECT = 3 / 16 + 2 / 9 + 1 / 4 + 3 / 16
EXPECTED_PARTS = {
    "accuracy_by_task": {"a": 1 / 2, "b": 1 / 2},
    "constant_answer_excess": {"a": 1 / 2 - 0, "b": 2 / 4 - 0},  # favourite "w", never right
    "learning_by_task": {"a": 2 / 4 - 3 / 4, "b": 1 / 8 - 0},
    "component_variance_share": {
        "correct": _CORRECT / (_CORRECT + 3 / 16),
        "format": (3 / 16) / (_CORRECT + 3 / 16),
    },
}


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    return build_evidence(tmp_path_factory.mktemp("v001"))


@pytest.fixture(scope="module")
def report(evidence):
    return diagnose(evidence, None, load_metrics(CONF, "math"))


def test_every_shipped_metric_has_a_hand_computed_value(report):
    assert sorted(report.values) == sorted([*EXPECTED, *EXPECTED_PARTS])
    assert report.failed == {}


@pytest.mark.parametrize("name", EXPECTED)
def test_value_equals_the_hand_computed_one(report, name):
    assert report.values[name].value == pytest.approx(EXPECTED[name], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", EXPECTED_PARTS)
def test_breakdown_equals_the_hand_computed_one(report, name):
    assert report.values[name].parts == pytest.approx(EXPECTED_PARTS[name], rel=1e-6)


def test_without_rows_every_metric_has_no_data_rather_than_zero():
    report = diagnose(empty(), None, load_metrics(CONF, "math"))
    assert report.failed == {} and report.numbers() == {} and report.alerts == ()


def test_names_select_and_unknown_names_are_listed_with_the_faults_of_files(tmp_path):
    assert [m.name for m in load_metrics(CONF, "math", ["entropy", "accuracy"])] == [
        "accuracy",
        "entropy",
    ]
    (tmp_path / "good.yaml").write_text(
        "{name: good, dimension: result, unit: x, description: d, sql: SELECT 1 AS value}"
    )
    (tmp_path / "bad.yaml").write_text(
        "{name: bad, dimension: mood, unit: x, description: d, sql: s, extra: 1,"
        " alerts: [{level: warn, when: 'value is high', message: m}]}"
    )
    (tmp_path / "cut.yaml").write_text("name: [")
    (tmp_path / "list.yaml").write_text("[1]")
    (tmp_path / "other.yaml").write_text(
        "{name: misnamed, dimension: result, unit: x, description: d, sql: s}"
    )
    with pytest.raises(InputError) as caught:
        load_metrics(tmp_path, "math", ["good", "nope"])
    text = str(caught.value)
    for fault in ("dimension", "extra", "alerts.0.when", "not YAML", "file:", "differ", "nope"):
        assert fault in text
    assert len(caught.value.problems) == 7


def test_domains_select(tmp_path):
    body = "{name: %s, dimension: result, unit: x, description: d, sql: s, domains: [%s]}"
    for name, domain in (("swe_only", "swe"), ("every", "shared")):
        (tmp_path / f"{name}.yaml").write_text(body % (name, domain))
    assert [m.name for m in load_metrics(tmp_path, "math")] == ["every"]
    assert [m.name for m in load_metrics(tmp_path, "swe")] == ["every", "swe_only"]


def test_missing_directory_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="no metric files"):
        load_metrics(tmp_path / "none", "math")


@given(value=st.floats(-10, 10), parent=st.one_of(st.none(), st.floats(-10, 10)))
def test_rules_compare_value_and_change(value, parent):
    above = AlertRule(level="warn", when="value > 0.3", message="m")
    fell = AlertRule(level="warn", when="change <= -0.5", message="m")
    assert above.fires(value, parent) == (value > 0.3)
    assert fell.fires(value, parent) == (parent is not None and value - parent <= -0.5)
