"""The health report of a stored version: evidence -> metrics -> alerts -> health.md."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from evojax.config import EvojaxConf
from evojax.diagnostics.health import HealthReport, diagnose
from evojax.diagnostics.metrics import load_metrics
from evojax.diagnostics.sql import SqlLimits
from evojax.evidence.reader import Evidence
from evojax.evidence.reader import load as load_evidence
from evojax.evolution.store import VersionStore
from evojax.evolution.yaml_files import replace_text


def examine(
    store: VersionStore, version: str, parent: str | None, cfg: EvojaxConf, conf_dir: Path
) -> HealthReport:
    """Diagnose ``version`` beside ``parent`` and write health.md and health.json.

    Args:
        conf_dir: the tree whose ``metrics`` are computed: the version's own.
    """
    metrics = load_metrics(conf_dir / "metrics", cfg.domain.name, cfg.diagnostics.metrics)
    limits = SqlLimits(cfg.diagnostics.timeout_s, cfg.diagnostics.memory_mb)
    before = None if parent is None else _seen(load_evidence(store.path(parent)))
    report = diagnose(_seen(load_evidence(store.path(version))), before, metrics, limits)
    directory = store.path(version)
    for name, text in (("health.md", report.to_markdown()), ("health.json", report.to_json())):
        replace_text(directory / name, text)
    return report


def _seen(evidence: Evidence) -> Evidence:
    """Without the audit split: a metric must say the same before that is opened and after."""
    unseen = pc.field("split") == "audit"
    return Evidence(
        {
            n: t.filter(~unseen) if "split" in t.column_names else t
            for n, t in evidence.tables.items()
        }
    )
