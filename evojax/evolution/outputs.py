"""summary.json and the report of a run, gathered from what its versions left on disk."""

from __future__ import annotations

import json
import math
import shlex
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from evojax.config import EvojaxConf
from evojax.evidence.reader import Evidence
from evojax.evidence.reader import load as load_evidence
from evojax.evolution.gate import bootstrap_mean, paired_bootstrap
from evojax.evolution.harness import HarnessRepo
from evojax.evolution.standing import BASE, Outcome
from evojax.evolution.store import VersionResult, VersionStore
from evojax.report.data import (
    CurvePoint,
    Delta,
    HealthAlert,
    ReportData,
    SampleCard,
    Score,
    VersionCard,
)

SAMPLES_PER_VERSION = 12


class Gatherer:
    """Reads a run's versions once and gives its summary and report.

    Args:
        outcome: of the loop. device: in words. wall_s: seconds of all sessions of the run.
    """

    def __init__(
        self,
        run_dir: Path,
        conf: EvojaxConf,
        repo: HarnessRepo,
        outcome: Outcome,
        device: str,
        wall_s: float,
    ):
        self.run_dir = run_dir
        self.conf = conf
        self.repo = repo
        self.outcome = outcome
        self.device = device
        self.wall_s = wall_s
        self.store = VersionStore(run_dir)
        self.results = [self.store.require(name) for name in self._order()]
        self.base = self.store.require(BASE)
        self.final = self.store.require(outcome.final)
        self.gate = conf.evolution.gate
        self._loaded: dict[str, Evidence] = {}

    def _order(self) -> list[str]:
        names = self.store.names()
        return sorted(names, key=lambda n: (self.store.require(n).round, n != BASE, n))

    def summary(self) -> dict[str, Any]:
        """The content of summary.json (schema 1)."""
        gain = self.gain
        return {
            "schema": 1,
            "experiment": self.conf.experiment,
            "seed": self.conf.seed,
            "device": self.device,
            "wall_s": round(self.wall_s, 1),
            "base": {"score": self.base.score, "ci95": self.base.ci95},
            "versions": [self._version(r) for r in self.results],
            "promoted": self.outcome.promoted,
            "final": {
                "version": self.final.version,
                "score": self.final.score,
                "ci95": self.final.ci95,
                "delta": _delta_json(gain),
                "audit": self.audit,
            },
            "training_seeds": 1,
            "headline": self.headline(),
            "rollouts": sum(r.totals.get("rollouts", 0) for r in self.results),
            "updates": sum(r.totals.get("updates", 0) for r in self.results),
            "unscorable": sum(r.totals.get("unscorable", 0) for r in self.results),
            "refused": sum(len(p.refused) for p in self.outcome.plans),
            "harness": str(self.repo.path),
            "report": str(self.run_dir / "report.html"),
            "rerun": self.rerun(),
        }

    def _version(self, result: VersionResult) -> dict[str, Any]:
        verdict = self.outcome.verdicts.get(result.version)
        return {
            "version": result.version,
            "parent": result.parent,
            "role": result.role,
            "status": result.status,
            "branch": result.branch,
            "commit": result.commit,
            "factor": result.factor,
            "hypothesis": result.hypothesis,
            "verdict": self._verdict(result),
            "words": "" if verdict is None else verdict["words"],
            "score": result.score,
            "ci95": result.ci95,
            "delta": _delta_json(self._delta(result)),
            "seconds": round(result.seconds, 1),
        }

    def _verdict(self, result: VersionResult) -> str:
        if result.status == "failed":
            return "failed"
        if result.role in ("base", "control"):
            return result.role
        verdict = self.outcome.verdicts.get(result.version)
        return "unjudged" if verdict is None else verdict["outcome"]

    def _delta(self, result: VersionResult) -> Delta | None:
        verdict = self.outcome.verdicts.get(result.version)
        if verdict is None or verdict["comparison"] is None:
            return None
        found = verdict["comparison"]
        low, high = found["ci95"]
        return Delta(verdict["vs"], found["mean"], (low, high), found["p"], verdict["p_holm"])

    @cached_property
    def gain(self) -> Delta:
        """Final against base over the evaluation items, paired."""
        found = paired_bootstrap(
            self.base.finite_scores(),
            self.final.finite_scores(),
            self.gate.resamples,
            self.gate.seed,
        )
        return Delta(BASE, found.mean, found.ci95, found.p)

    @cached_property
    def audit(self) -> dict[str, Any] | None:
        final = _finite(self.outcome.audit.get(self.final.version))
        base = _finite(self.outcome.audit.get(BASE))
        if not final or not base:
            return None
        score, interval = bootstrap_mean(final, self.gate.resamples, self.gate.seed)
        start, start_interval = bootstrap_mean(base, self.gate.resamples, self.gate.seed)
        found = paired_bootstrap(base, final, self.gate.resamples, self.gate.seed)
        return {
            "score": score,
            "ci95": interval,
            "base": {"score": start, "ci95": start_interval},
            "delta": _delta_json(Delta(BASE, found.mean, found.ci95, found.p)),
            "items": found.items,
            "opened": json.loads((self.run_dir / "audit.json").read_text())["opened"],
        }

    def headline(self) -> str:
        """The run's verdict in words."""
        gain = self.gain
        interval = "" if gain.ci95 is None else f" [{gain.ci95[0]:+.3f}, {gain.ci95[1]:+.3f}]"
        if self.outcome.promoted:
            what = f"{self.outcome.promoted} is promoted"
        elif self.outcome.plans:
            what = f"no candidate is promoted; {self.final.version} stands"
        else:
            what = f"{self.final.version} is trained by the base recipe"
        return (
            f"{what}. Avg@{self.conf.eval.samples} on held-out items: base "
            f"{self.base.score:.3f}, final {self.final.score:.3f}, paired gain "
            f"{gain.mean:+.3f}{interval} (one training seed)"
        )

    def rerun(self) -> str:
        """The command that trains the final version again from its commit."""
        worktree = self.repo.worktrees / self.final.branch.replace("/", "-")
        conf = (worktree if worktree.is_dir() else self.repo.trunk_dir) / "conf"
        return (
            f"python -m evojax.main --config-dir {shlex.quote(str(conf))} "
            f"+experiment={self.conf.experiment} mode=train"
        )

    def report(self, notes: tuple[str, ...]) -> ReportData:
        """What report.html shows."""
        audit = self.audit
        return ReportData(
            experiment=self.conf.experiment,
            run=self.run_dir.name,
            seed=self.conf.seed,
            device=self.device,
            wall_s=self.wall_s,
            headline=self.headline(),
            base=_score(self.base),
            final=_score(self.final),
            audit=None if audit is None else Score(audit["score"], audit["ci95"]),
            gain=self.gain,
            promoted=self.outcome.promoted,
            versions=tuple(self._card(r) for r in self.results),
            series={
                r.version: self._curve(r)
                for r in self.results
                if r.role != "base" and r.status == "trained"
            },
            samples=tuple(
                card for r in self.results if r.status == "trained" for card in self._samples(r)
            ),
            rerun=self.rerun(),
            notes=notes,
        )

    def _card(self, result: VersionResult) -> VersionCard:
        verdict = self.outcome.verdicts.get(result.version)
        planned = {c.version: c for plan in self.outcome.plans for c in plan.candidates}
        mine = planned.get(result.version)
        health = self.store.path(result.version) / "health.json"
        alerts = json.loads(health.read_text())["alerts"] if health.exists() else []
        return VersionCard(
            id=result.version,
            parent=result.parent,
            verdict=self._verdict(result),
            branch=result.branch,
            commit=result.commit,
            factor=result.factor,
            hypothesis=result.hypothesis,
            predicted="" if mine is None else str(mine.proposal.predicts),
            reason=result.error or ("" if verdict is None else verdict["words"]),
            score=_score(result),
            delta=self._delta(result),
            diff="" if mine is None else self.repo.diff(f"{mine.commit}^", mine.commit),
            backtest={} if mine is None else _backtest_shown(mine.backtest),
            alerts=tuple(
                HealthAlert(a["level"], f"{a['metric']} = {a['value']:.4g}: {a['message']}")
                for a in alerts
            ),
        )

    def _evidence(self, version: str) -> Evidence:
        if version not in self._loaded:
            self._loaded[version] = load_evidence(self.store.path(version))
        return self._loaded[version]

    def _curve(self, result: VersionResult) -> tuple[CurvePoint, ...]:
        rows = self._evidence(result.version).updates().to_pylist()
        return tuple(
            CurvePoint(
                row["step"],
                row["reward_mean"],
                row["dead_groups"] / row["drawn_groups"] if row["drawn_groups"] else None,
                row["entropy"],
            )
            for row in sorted(rows, key=lambda r: r["step"])
        )

    def _samples(self, result: VersionResult) -> list[SampleCard]:
        """Evenly spaced rollouts with a non-zero advantage; eval rollouts for the base."""
        split = "eval" if result.role == "base" else "train"
        table = self._evidence(result.version).rollouts(split)
        rows = _readable(table, only_signal=split == "train")
        stride = max(1, len(rows) // SAMPLES_PER_VERSION)
        return [
            SampleCard(
                version=result.version,
                step=row["step"],
                item=row["item"],
                task=row["task"],
                prompt=row["prompt"],
                text=row["text"],
                expected=row["answer"],
                status=row["grade_status"],
                reward=row["reward"],
                advantage=row["advantage"] or 0.0,
            )
            for row in rows[::stride][:SAMPLES_PER_VERSION]
        ]


def _readable(table: pa.Table, only_signal: bool) -> list[dict[str, Any]]:
    wanted = ("step", "item", "task", "prompt", "text", "answer", "grade_status", "reward",
              "advantage", "group", "sample")  # fmt: skip
    rows = table.select(wanted).to_pylist()
    if only_signal:
        rows = [r for r in rows if r["advantage"]]
    return sorted(rows, key=lambda r: (r["step"], r["group"], r["sample"]))


def _score(result: VersionResult) -> Score | None:
    return None if result.score is None else Score(result.score, result.ci95)


def _delta_json(delta: Delta | None) -> dict[str, Any] | None:
    if delta is None or not math.isfinite(delta.mean):
        return None
    return {
        "vs": delta.vs,
        "mean": delta.mean,
        "ci95": delta.ci95,
        "p": delta.p if delta.p_holm is None else delta.p_holm,
    }


def _finite(scores: dict[str, float | None] | None) -> dict[str, float]:
    return {k: v for k, v in (scores or {}).items() if v is not None}


def _backtest_shown(raw: dict[str, Any]) -> dict[str, Any]:
    """What the replay found, in words and in the numbers that say something."""
    if not raw["replayable"]:
        return {"words": raw["words"]}
    shares = ", ".join(f"{k} {v:.0%}" for k, v in sorted(raw["variance_share"].items()))
    shown = {**raw, "variance_share": shares}
    hidden = ("refusals", "replayable")
    return {k: v for k, v in shown.items() if k not in hidden and v not in (None, "", 0)}
