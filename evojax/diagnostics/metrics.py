"""Metrics as data: one YAML file each, SQL over the evidence tables plus alert thresholds.

A file holds ``name, dimension, unit, description, sql``, and optionally ``alerts``, ``domains``
and ``higher_is``. The SQL gives one row with a column ``value``, or rows with the columns
``key, value`` for a breakdown. It may name the tables ``rollouts``, ``turns``, ``updates`` and
the view ``groups`` of this version, and the same with the prefix ``parent_``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from evojax.errors import InputError, Problem

Dimension = Literal["result", "signal", "behaviour", "efficiency", "model_state", "task_structure"]

_WHEN = re.compile(r"(value|change)\s*(<=|>=|<|>)\s*(-?\d+(?:\.\d+)?)")
_COMPARE = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}


class AlertRule(BaseModel):
    """When a metric is worth a warning.

    ``when`` is ``value OP number`` or ``change OP number``; change is this version's value minus
    the parent's.

    >>> rule = AlertRule(level="warn", when="value > 0.3", message="too many")
    >>> rule.fires(0.31, None), rule.fires(0.3, None)
    (True, False)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    level: Literal["warn", "critical"]
    when: str
    message: str = Field(min_length=1)

    @field_validator("when")
    @classmethod
    def _parses(cls, text: str) -> str:
        if not _WHEN.fullmatch(text.strip()):
            raise ValueError("must read 'value > 0.3' or 'change < -0.1' (any of < <= > >=)")
        return text.strip()

    def fires(self, value: float, parent: float | None) -> bool:
        """Whether the threshold is crossed; a change rule never fires without a parent."""
        match = _WHEN.fullmatch(self.when)
        assert match is not None
        subject, symbol, number = match.groups()
        if subject == "change":
            return parent is not None and _COMPARE[symbol](value - parent, float(number))
        return _COMPARE[symbol](value, float(number))


class Metric(BaseModel):
    """One number (or one breakdown) that is computed from a version's evidence."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    dimension: Dimension
    unit: str = Field(min_length=1)
    description: str = Field(min_length=1)
    sql: str = Field(min_length=1)
    alerts: tuple[AlertRule, ...] = ()
    domains: tuple[str, ...] = ("shared",)
    higher_is: Literal["better", "worse", "neutral"] = "neutral"

    def applies_to(self, domain: str) -> bool:
        """Whether the metric means something for ``domain``."""
        return "shared" in self.domains or domain in self.domains


def load_metrics(directory: Path, domain: str, names: Sequence[str] = ()) -> list[Metric]:
    """Metrics of ``directory`` in name order: those in ``names``, or all that suit ``domain``.

    Raises:
        InputError: a file is no valid metric, or a name is unknown; every problem is listed.
    """
    paths = sorted(directory.glob("*.yaml"))
    if not paths:
        raise InputError.one(
            "no metric files found", "metrics", str(directory), "add conf/metrics/<name>.yaml"
        )
    problems: list[Problem] = []
    metrics: dict[str, Metric] = {}
    for path in paths:
        found = _read(path)
        if isinstance(found, Metric):
            metrics[found.name] = found
        else:
            problems.extend(found)
    for name in names:
        if name not in metrics and not any(Path(p.where).stem == name for p in problems):
            valid = ", ".join(sorted(metrics))
            problems.append(
                Problem("unknown metric", "diagnostics.metrics", name, f"valid: {valid}")
            )
    if problems:
        raise InputError(problems)
    if names:
        return [metrics[name] for name in sorted(set(names))]
    return [m for m in metrics.values() if m.applies_to(domain)]


def _read(path: Path) -> Metric | list[Problem]:
    where = str(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = " ".join(str(error).split())
        return [Problem(f"not YAML ({message})", where, path.name, "fix the file")]
    try:
        metric = Metric.model_validate(raw)
    except ValidationError as error:
        return [
            Problem(
                f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}",
                where,
                e["input"],
                "see the fields of evojax.diagnostics.metrics.Metric",
            )
            for e in error.errors()
        ]
    if metric.name != path.stem:
        return [Problem("name and file name differ", where, metric.name, f"use {path.stem}")]
    return metric
