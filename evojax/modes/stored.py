"""Modes that read an existing run: evaluate, diagnose, backtest, report."""

from __future__ import annotations

import json

from pydantic import ValidationError

from evojax.errors import EXIT_OK, InputError, Problem
from evojax.evidence.reader import load as load_evidence
from evojax.evolution.arms import ArmRunner
from evojax.evolution.backtest import backtest as replay
from evojax.evolution.boundary import edit_problems, factor_of
from evojax.evolution.examine import examine
from evojax.evolution.gate import bootstrap_mean
from evojax.evolution.intervention import Intervention, Predicts
from evojax.evolution.manifest import device_words, read_manifest
from evojax.evolution.memory.ledger import Ledger
from evojax.evolution.outputs import Gatherer
from evojax.evolution.rounds import stored_plans
from evojax.evolution.standing import BASE, stored_outcome
from evojax.evolution.workshop import Workshop
from evojax.modes.evolve import finish
from evojax.modes.job import Job
from evojax.report.live import LiveView
from evojax.training.interrupt import InterruptGuard


def evaluate(job: Job, guard: InterruptGuard) -> int:
    """Score a stored version (by default the final one) on the evaluation split once more."""
    store = job.stored()
    job.refuse_edits()
    version = job.conf.version or stored_outcome(job.run_dir).final
    stored = store.require(version)
    if stored.score is None:
        raise InputError.one(
            f"has no score to repeat: {stored.error}", "version", version, "name another version"
        )
    with (
        LiveView(job.conf.live, 0) as view,
        Workshop(job.conf, job.run_dir.name, view, guard) as shop,
    ):
        found = ArmRunner(shop, store).score_stored(version, "eval")
    gate = job.conf.evolution.gate
    mean, (low, high) = bootstrap_mean(found.scores, gate.resamples, gate.seed)
    again = {k: v if v == v else None for k, v in found.scores.items()}
    same = again == stored.scores
    print(f"{version}: Avg@{job.conf.eval.samples} {mean:.4f} [{low:.4f}, {high:.4f}]")
    print(f"Stored score {stored.score:.4f}; item scores {'identical' if same else 'differ'}")
    return EXIT_OK


def diagnose(job: Job, guard: InterruptGuard) -> int:
    """Compute the health report of one stored version, or of all, again."""
    store = job.stored()
    job.refuse_edits()
    names = [job.conf.version] if job.conf.version else store.names()
    for name in names:
        guard.check()
        result = store.require(name)
        if result.status != "trained":
            print(f"{name}: {result.status}, nothing to diagnose")
            continue
        parent = None if result.parent in (None, BASE) else result.parent
        conf_dir = job.repo().trunk_dir / "conf"
        report = examine(store, name, parent, job.conf, conf_dir)
        print(f"{name}: {len(report.alerts)} alerts, {store.path(name) / 'health.md'}")
        for alert in report.alerts:
            print(f"  {alert.in_words()}")
    return EXIT_OK


def backtest(job: Job, guard: InterruptGuard) -> int:
    """Replay stored rollouts under the overrides given, or under the run's own candidates."""
    store = job.stored()
    if job.edits:
        version = job.conf.version or stored_outcome(job.run_dir).final
        proposals = [(version, _from_command_line(job))]
    else:
        proposals = [
            (plan.parent, proposal)
            for plan in stored_plans(job.run_dir)
            for proposal in plan.proposals()
        ]
    if not proposals:
        raise InputError.one(
            "the run has no candidates to replay",
            "mode",
            "backtest",
            "name a change to replay, e.g. filter.refill_rounds=2",
        )
    for version, proposal in proposals:
        store.require(version)
        found = replay(proposal, load_evidence(store.path(version)).rollouts("train"), job.conf)
        edits = ", ".join(f"{k}={v}" for k, v in proposal.edits.items())
        print(f"{proposal.rule} ({edits}) on the rollouts of {version}: {found.words}")
        for reason in found.refusals:
            print(f"  refused: {reason}")
    return EXIT_OK


def _from_command_line(job: Job) -> Intervention:
    edits = {key: new for key, (_, new) in job.edits.items()}
    problems = edit_problems(edits, job.conf.evolution.boundary.mutable)
    if problems:
        raise InputError(problems)
    factors = sorted({factor_of(key) or "frozen" for key in edits})
    if len(factors) != 1:
        raise InputError.one(
            "a backtest replays one factor", "command line", factors, "change keys of one factor"
        )
    try:
        return Intervention.model_validate(
            {
                "rule": "command-line",
                "factor": factors[0],
                "hypothesis": "The change revives dead groups.",
                "edits": edits,
                "predicts": Predicts(metric="dead_group_share", direction="down", at_least=0.0),
                "success_criterion": "More live groups for the same rollouts.",
                "rollback": "Leave the recipe as it is.",
                "origin": "case",
            }
        )
    except ValidationError as error:
        raise InputError(
            [
                Problem(e["msg"], "command line", sorted(edits), "change fewer keys at once")
                for e in error.errors()
            ]
        ) from error


def report(job: Job, guard: InterruptGuard) -> int:
    """Write summary.json and report.html of a stored run again, finished or not."""
    job.stored()
    job.refuse_edits()
    with Ledger(job.run_dir / "ledger.sqlite") as ledger:
        wall = sum(e["seconds"] for e in ledger.events() if e["kind"] == "session")
    label = read_manifest(job.run_dir)["policy"]
    outcome = stored_outcome(job.run_dir)
    gathered = Gatherer(job.run_dir, job.conf, job.repo(), outcome, device_words(label), wall)
    finish(job, gathered)
    print(f"Report: {job.run_dir / 'report.html'}")
    print(json.dumps({"final": outcome.final, "promoted": outcome.promoted}))
    return EXIT_OK
