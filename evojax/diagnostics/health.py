"""Evidence -> metric values -> alerts -> health report of one version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from evojax.diagnostics.metrics import Dimension, Metric
from evojax.diagnostics.sql import (
    EVIDENCE_VIEWS,
    QueryError,
    QueryResult,
    SqlLimits,
    SqlRunner,
    evidence_tables,
)
from evojax.evidence.reader import Evidence

# Score first, then whether there is anything to learn from, then why: how it behaves and costs,
# what the optimizer sees, and where it succeeds.
PROCEDURE: tuple[Dimension, ...] = get_args(Dimension)

_TITLES: dict[Dimension, str] = {
    "result": "Result",
    "signal": "Learning signal",
    "behaviour": "Behaviour",
    "efficiency": "Efficiency",
    "model_state": "Model state",
    "task_structure": "Task structure",
}


@dataclass(frozen=True)
class Alert:
    """A threshold that was crossed.

    Args:
        key: row of a breakdown, "" for a plain metric. value: what crossed it.
        parent: the parent's value, None without one.
    """

    level: Literal["warn", "critical"]
    metric: str
    key: str
    value: float
    parent: float | None
    when: str
    message: str

    def in_words(self) -> str:
        """One line for people.

        >>> Alert("warn", "entropy", "", 0.25, 0.9, "value < 0.3", "little is left").in_words()
        'WARN entropy = 0.25 (parent 0.9; alert when value < 0.3): little is left'
        """
        name = f"{self.metric}[{self.key}]" if self.key else self.metric
        before = "" if self.parent is None else f"parent {self.parent:.4g}; "
        return (
            f"{self.level.upper()} {name} = {self.value:.4g} "
            f"({before}alert when {self.when}): {self.message}"
        )


@dataclass(frozen=True)
class MetricValue:
    """A metric over one version's evidence: a value, a breakdown, no data, or a failure.

    Args:
        value: None when there is no data, it failed, or it is a breakdown.
        parts: breakdown by key, empty for a plain metric.
        error: why it could not be computed; a failed metric has no value, never 0.
    """

    name: str
    value: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class HealthReport:
    """All metrics of one version beside its parent's, with the alerts they raise."""

    version: str
    metrics: tuple[Metric, ...]
    values: dict[str, MetricValue]
    parent_values: dict[str, MetricValue]
    alerts: tuple[Alert, ...]
    notes: tuple[str, ...]
    procedure: tuple[Dimension, ...]

    def numbers(self) -> dict[str, float]:
        """Plain metrics that have a value, by name; what rules and triggers read."""
        return {n: v.value for n, v in self.values.items() if v.value is not None}

    @property
    def failed(self) -> dict[str, str]:
        """Metrics that could not be computed, with the reason."""
        return {n: v.error for n, v in self.values.items() if v.error}

    def to_json(self) -> str:
        """The report as JSON (without the SQL)."""
        body: dict[str, Any] = {
            "version": self.version,
            "procedure": list(self.procedure),
            "alerts": [asdict(a) for a in self.alerts],
            "metrics": {n: asdict(v) for n, v in self.values.items()},
            "parent_metrics": {n: asdict(v) for n, v in self.parent_values.items()},
            "notes": list(self.notes),
        }
        return json.dumps(body, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """The report for people: alerts first, then one table per dimension."""
        lines = [f"# Health of {self.version}", "", *self._summary(), ""]
        for dimension in self.procedure:
            chosen = [m for m in self.metrics if m.dimension == dimension]
            if chosen:
                lines += [f"## {_TITLES[dimension]}", "", *self._table(chosen), ""]
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        count, failed = len(self.alerts), len(self.failed)
        head = f"{count} alert{'s' * (count != 1)}." if count else "No alerts."
        if failed:
            head += f" {failed} metric{'s' * (failed != 1)} could not be computed."
        lines = ["## Alerts", "", head, ""]
        lines += [f"- {_cell(a.in_words())}" for a in self.alerts]
        lines += [f"- FAILED {n}: {_cell(e)}" for n, e in self.failed.items()]
        if self.notes:
            lines += ["", "## Notes", "", *(f"- {_cell(n)}" for n in self.notes)]
        return lines

    def _table(self, metrics: Sequence[Metric]) -> list[str]:
        rows = [
            "| metric | value | parent | unit | alert when | what it means |",
            "|---|---:|---:|---|---|---|",
        ]
        for m in metrics:
            rules = "; ".join(f"{a.level}: {a.when}" for a in m.alerts) or "-"
            value, parent = self.values[m.name], self.parent_values.get(m.name)
            tail = f"{_cell(m.unit)} | {rules} | {_cell(m.description)} |"
            rows.append(f"| {m.name} | {_show(value)} | {_show(parent)} | {tail}")
            for key in value.parts:
                before = None if parent is None else parent.parts.get(key)
                rows.append(
                    f"| - {_cell(key)} | {_number(value.parts[key])} | {_number(before)} | | | |"
                )
        return rows


def diagnose(
    evidence: Evidence,
    parent: Evidence | None,
    metrics: Sequence[Metric],
    limits: SqlLimits | None = None,
    procedure: Sequence[Dimension] = PROCEDURE,
) -> HealthReport:
    """Compute ``metrics`` over a version's evidence and compare with its parent's.

    Args:
        parent: evidence of the version it was trained from, None for the first.
        limits: time and memory of each metric's SQL.
        procedure: order in which the dimensions are read.

    Raises:
        ValueError: the procedure leaves a dimension out or names one twice.
    """
    if sorted(procedure) != sorted(PROCEDURE):
        raise ValueError(f"a procedure is an order of {PROCEDURE}, got {tuple(procedure)}")
    ordered = sorted(metrics, key=lambda m: (procedure.index(m.dimension), m.name))
    values = _measure(evidence, parent, ordered, limits)
    parent_values = {} if parent is None else _measure(parent, None, ordered, limits)
    alerts = [a for m in ordered for a in _alerts(m, values[m.name], parent_values.get(m.name))]
    alerts.sort(key=lambda a: a.level != "critical")
    return HealthReport(
        version=_version(evidence),
        metrics=tuple(ordered),
        values=values,
        parent_values=parent_values,
        alerts=tuple(alerts),
        notes=tuple(_notes(evidence)),
        procedure=tuple(procedure),
    )


def _measure(
    evidence: Evidence,
    parent: Evidence | None,
    metrics: Sequence[Metric],
    limits: SqlLimits | None,
) -> dict[str, MetricValue]:
    values = {}
    with SqlRunner(evidence_tables(evidence, parent), EVIDENCE_VIEWS, limits) as runner:
        for metric in metrics:
            try:
                values[metric.name] = _value_of(metric.name, runner.query(metric.sql))
            except QueryError as error:
                values[metric.name] = MetricValue(metric.name, error=str(error))
    return values


def _value_of(name: str, result: QueryResult) -> MetricValue:
    if result.columns == ("value",):
        if len(result.rows) > 1:
            return MetricValue(name, error=f"{len(result.rows)} rows of value; expected one")
        value = result.rows[0][0] if result.rows else None
        if value is None:
            return MetricValue(name)
        if not _is_number(value):
            return MetricValue(name, error=f"value is {value!r}, not a finite number")
        return MetricValue(name, value=float(value))
    if result.columns == ("key", "value"):
        bad = [(k, v) for k, v in result.rows if v is not None and not _is_number(v)]
        if bad:
            return MetricValue(name, error=f"value of {bad[0][0]!r} is {bad[0][1]!r}, not a number")
        parts = {str(k): float(v) for k, v in result.rows if v is not None}
        if len({str(k) for k, _ in result.rows}) < len(result.rows):
            return MetricValue(name, error="a key comes twice")
        return MetricValue(name, parts=parts)
    return MetricValue(name, error=f"columns are {result.columns}; expected value, or key, value")


def _is_number(value: object) -> bool:
    """Whole and decimal numbers; a non-finite one arrives from the SQL process as text."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _alerts(metric: Metric, value: MetricValue, parent: MetricValue | None) -> list[Alert]:
    plain = {} if value.value is None else {"": value.value}
    before = {}
    if parent is not None:
        before = parent.parts if parent.value is None else {"": parent.value}
    out = []
    for key, number in (plain | value.parts).items():
        fired = [r for r in metric.alerts if r.fires(number, before.get(key))]
        if any(r.level == "critical" for r in fired):
            fired = [r for r in fired if r.level == "critical"]
        out += [
            Alert(r.level, metric.name, key, number, before.get(key), r.when, r.message)
            for r in fired
        ]
    return out


def _version(evidence: Evidence) -> str:
    for table in (evidence.rollouts(), evidence.updates()):
        if table.num_rows:
            return str(table["version"][0].as_py())
    return "a version without rows"


def _notes(evidence: Evidence) -> list[str]:
    notes = []
    updates = evidence.updates()
    clipped = [v for c in ("clip_high", "clip_low") for v in updates[c].to_pylist() if v]
    if updates.num_rows and not clipped:
        notes.append(
            "No token was ever clipped. With one update per rollout batch (algorithm.epochs=1) "
            "clipping is off by construction: the policy that is updated is the one that sampled."
        )
    train = evidence.rollouts("train")
    if not train.num_rows:
        notes.append("No training rollouts: only the scores of the eval split are known.")
    lost = evidence.rollouts()["grade_status"].to_pylist().count("unscorable")
    if lost:
        notes.append(f"{lost} rollouts were unscorable; they count as neither right nor wrong.")
    return notes


def _show(value: MetricValue | None) -> str:
    if value is None:
        return "-"
    if value.error:
        return "FAILED"
    if value.value is None:
        return "by key:" if value.parts else "no data"
    return _number(value.value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _cell(text: str) -> str:
    """Text that cannot leave its markdown cell or turn into markup."""
    flat = " ".join(text.split())
    for mark in "\\`*[]|":
        flat = flat.replace(mark, "\\" + mark)
    return flat.replace("<", "&lt;")
