from __future__ import annotations

import json

import pyarrow as pa
import pytest
from worked_example import build_evidence

from evojax.diagnostics.health import PROCEDURE, diagnose
from evojax.diagnostics.metrics import Metric
from evojax.diagnostics.sql import SqlLimits
from evojax.evidence.reader import Evidence, empty


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    return build_evidence(tmp_path_factory.mktemp("v001"))


def _metric(name: str, sql: str, *alerts: tuple[str, str], dimension: str = "result") -> Metric:
    return Metric.model_validate(
        {
            "name": name,
            "dimension": dimension,
            "unit": "x",
            "description": "d",
            "sql": sql,
            "alerts": [{"level": lv, "when": w, "message": f"{name} is off"} for lv, w in alerts],
        }
    )


def test_a_failing_metric_is_shown_as_failed_never_as_zero(evidence):
    cases = {
        "no_column": "SELECT nope AS value FROM rollouts",
        "leaks": "SELECT content AS value FROM read_text('/etc/passwd')",
        "not_finite": "SELECT 'inf'::DOUBLE AS value",
        "a_word": "SELECT 'high' AS value",
        "two_rows": "SELECT step AS value FROM updates",
        "shape": "SELECT 1 AS a, 2 AS b, 3 AS c",
        "twice": "SELECT 'k' AS key, 1 AS value UNION ALL SELECT 'k', 2",
        "slow": "SELECT count(*) AS value FROM range(1000000) a, range(1000000) b, range(99) c",
    }
    alert = ("critical", "value < 1")
    metrics = [_metric(n, sql, alert) for n, sql in cases.items()]
    report = diagnose(evidence, None, metrics, SqlLimits(timeout_s=0.5, memory_mb=128))
    assert sorted(report.failed) == sorted(cases)
    assert report.numbers() == {} and report.alerts == ()
    text = report.to_markdown()
    assert "8 metrics could not be computed" in text and "FAILED slow" in text
    assert "| no_column | FAILED |" in text


def test_alerts_name_the_worst_level_critical_first(evidence):
    metrics = [
        _metric("a", "SELECT 0.4 AS value", ("warn", "value > 0.3"), ("critical", "value > 0.5")),
        _metric("b", "SELECT 0.6 AS value", ("warn", "value > 0.3"), ("critical", "value > 0.5")),
        _metric("c", "SELECT 'k' AS key, 9 AS value", ("warn", "value > 1")),
        _metric("d", "SELECT 0.1 AS value", ("warn", "value > 0.3")),
    ]
    alerts = diagnose(evidence, None, metrics).alerts
    assert [(a.level, a.metric, a.key) for a in alerts] == [
        ("critical", "b", ""),
        ("warn", "a", ""),
        ("warn", "c", "k"),
    ]


def test_change_is_against_the_parent_and_needs_one(evidence):
    sql = "SELECT count(*) AS value FROM updates"
    metrics = [_metric("updates_made", sql, ("warn", "change > 3"))]
    assert diagnose(evidence, None, metrics).alerts == ()
    (alert,) = diagnose(evidence, empty(), metrics).alerts
    assert (alert.value, alert.parent) == (4.0, 0.0)
    assert "updates_made = 4 (parent 0; alert when change > 3)" in alert.in_words()


def test_sql_may_name_the_parent_tables(evidence):
    sql = "SELECT (SELECT count(*) FROM rollouts) - (SELECT count(*) FROM parent_rollouts) AS value"
    groups = "SELECT count(*) AS value FROM parent_groups"
    report = diagnose(evidence, evidence, [_metric("more", sql), _metric("their_groups", groups)])
    assert report.numbers() == {"more": 0.0, "their_groups": 7.0}


def test_clipping_note_only_where_nothing_was_clipped(evidence):
    metrics = [_metric("one", "SELECT 1 AS value")]
    clipped = diagnose(evidence, None, metrics)
    assert not any("clipping is off" in n for n in clipped.notes)
    assert any("4 rollouts were unscorable" in n for n in clipped.notes)
    updates = evidence.updates()
    for name in ("clip_high", "clip_low"):
        place = updates.column_names.index(name)
        zeros = pa.array([0.0] * updates.num_rows)
        updates = updates.set_column(place, updates.schema.field(name), zeros)
    once = Evidence(evidence.tables | {"updates": updates})
    assert any("clipping is off by construction" in n for n in diagnose(once, None, metrics).notes)


def test_procedure_orders_the_report_and_must_be_complete(evidence):
    metrics = [
        _metric("first", "SELECT 1 AS value", dimension="result"),
        _metric("second", "SELECT 2 AS value", dimension="signal"),
    ]
    text = diagnose(evidence, None, metrics).to_markdown()
    assert text.index("## Result") < text.index("## Learning signal")
    signal_first = sorted(PROCEDURE, key=lambda d: d != "signal")
    text = diagnose(evidence, None, metrics, procedure=signal_first).to_markdown()
    assert text.index("## Learning signal") < text.index("## Result")
    with pytest.raises(ValueError, match="order of"):
        diagnose(evidence, None, metrics, procedure=("result",))


def test_json_is_strict_and_equal_on_every_call(evidence):
    metrics = [_metric("a", "SELECT 0.5 AS value", ("warn", "value > 0.3"))]
    first = diagnose(evidence, evidence, metrics).to_json()
    assert first == diagnose(evidence, evidence, metrics).to_json()
    body = json.loads(first)
    assert body["version"] == "v001" and body["metrics"]["a"]["value"] == 0.5
    assert body["alerts"][0]["level"] == "warn"


def test_text_from_data_cannot_break_the_markdown(evidence):
    sql = "SELECT 'x | y <script>\n# head' AS key, 1 AS value"
    text = diagnose(evidence, None, [_metric("keys", sql)]).to_markdown()
    assert "x \\| y &lt;script> # head" in text
