"""From two results to a verdict, and the document that is committed beside the candidate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from evojax.config import GateConf
from evojax.diagnostics.health import HealthReport
from evojax.evolution.gate import Arm, GateRule, Verdict, judge_all
from evojax.evolution.intervention import Intervention
from evojax.evolution.store import VersionResult


def rule_of(conf: GateConf) -> GateRule:
    """The gate's rule from the configuration."""
    return GateRule(conf.alpha, conf.resamples, conf.min_delta, conf.seed)


def judge(
    control: VersionResult, candidates: Sequence[VersionResult], conf: GateConf
) -> dict[str, Verdict]:
    """Verdicts by version; a candidate without scores is ``invalid`` and never a number."""
    arms = [_arm(c) for c in candidates]
    return {v.version: v for v in judge_all(_arm(control), arms, rule_of(conf))}


def against_parent(parent: VersionResult, control: VersionResult, conf: GateConf) -> Verdict:
    """How the control compares with its parent: a fact about more training, not a verdict."""
    verdict = judge(parent, [control], conf)[control.version]
    words = verdict.words.replace(f"{control.version} is {verdict.outcome}: ", "", 1)
    return dataclasses.replace(verdict, words=f"{control.version}, recipe unchanged: {words}")


def _arm(result: VersionResult) -> Arm:
    return Arm(result.version, result.finite_scores(), result.protocol, result.unscorable)


def mechanism(
    proposal: Intervention, control: HealthReport, candidate: HealthReport
) -> dict[str, Any]:
    """Whether the metric that the hypothesis names moved as predicted, against the control."""
    name = proposal.predicts.metric
    before, after = control.numbers().get(name), candidate.numbers().get(name)
    if before is None or after is None:
        return {"metric": name, "control": before, "candidate": after, "moved": None}
    change = after - before if proposal.predicts.direction == "up" else before - after
    return {
        "metric": name,
        "control": before,
        "candidate": after,
        "moved": bool(change >= proposal.predicts.at_least and change > 0),
    }


def mechanism_words(found: dict[str, Any]) -> str:
    """One sentence on the predicted metric."""
    if found["moved"] is None:
        return f"The predicted metric {found['metric']} has no value in one of the two arms."
    state = "moved as predicted" if found["moved"] else "did not move as predicted"
    return (
        f"The predicted metric {found['metric']} {state}: control {found['control']:.4g}, "
        f"candidate {found['candidate']:.4g}."
    )


def verdict_document(
    result: VersionResult, verdict: Verdict, proposal: Intervention, moved: dict[str, Any]
) -> str:
    """The verdict in words and numbers, as committed to ``verdicts/<version>.md``."""
    lines = [
        f"# {result.version}: {verdict.outcome}",
        "",
        verdict.words,
        "",
        f"- Hypothesis: {proposal.hypothesis}",
        f"- Predicts: {proposal.predicts}",
        f"- {mechanism_words(moved)}",
        f"- Success criterion: {proposal.success_criterion}",
        f"- Rollback: {proposal.rollback}",
        f"- Rests on {verdict.label}.",
    ]
    if result.score is not None and result.ci95 is not None:
        low, high = result.ci95
        lines.append(f"- Score: {result.score:.4f}, 95 % interval {low:.4f} to {high:.4f}.")
    if result.error:
        lines.append(f"- Training failed: {result.error}")
    return "\n".join(lines) + "\n"


def verdict_json(verdict: Verdict, moved: dict[str, Any] | None) -> dict[str, Any]:
    """Plain data of a verdict for the run's files; NaN becomes null."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(v) for v in value]
        return value

    return clean({**dataclasses.asdict(verdict), "mechanism": moved})
