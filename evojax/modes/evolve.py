"""mode=evolve: the loop. mode=train: its first training only, or a version trained once more."""

from __future__ import annotations

import time
from pathlib import Path

from evojax.errors import EXIT_OK, InputError
from evojax.evidence.reader import load as load_evidence
from evojax.evolution.arms import ArmPlan, ArmRunner
from evojax.evolution.loop import Evolution
from evojax.evolution.manifest import device_words, read_manifest
from evojax.evolution.memory.ledger import Ledger
from evojax.evolution.outputs import Gatherer
from evojax.evolution.reproduce import CheckedOut, checked_out, same_rollouts
from evojax.evolution.standing import BASE, FIRST
from evojax.evolution.store import VersionStore
from evojax.evolution.workshop import Workshop
from evojax.modes.job import Job
from evojax.preflight import notes
from evojax.report.html import write_report
from evojax.report.live import LiveView
from evojax.training.interrupt import InterruptGuard
from evojax.training.version import write_json


def evolve(job: Job, guard: InterruptGuard) -> int:
    """Run the loop, or go on with it, then write summary.json and report.html."""
    return _run_loop(job, guard, job.conf.evolution.rounds)


def train(job: Job, guard: InterruptGuard) -> int:
    """Train one version: the base recipe, or that of the harness checkout in ``--config-dir``."""
    found = checked_out(job.conf_dir)
    if found is None or found.version == BASE:
        if job.resumed and (job.run_dir / "rounds").exists():
            raise InputError.one(
                "this run is past its first training, and its summary would lose the rounds",
                "mode",
                "train",
                "go on with mode=evolve, or train one version again by --config-dir",
            )
        return _run_loop(job, guard, rounds=0)
    return _train_again(job, guard, found)


def _run_loop(job: Job, guard: InterruptGuard, rounds: int) -> int:
    job.refuse_edits()
    conf = job.conf
    conf.evolution.rounds = rounds
    arms = conf.evolution.candidates + 1
    total = conf.train.steps + rounds * arms * conf.train.candidate_steps
    began = time.perf_counter()
    with LiveView(conf.live, total) as view:
        for note in (*notes(job.cfg), *job.remarks):
            view.note(f"note: {note}")
        view.phase("set up", BASE)
        with Workshop(conf, job.run_dir.name, view, guard) as shop:
            repo = job.repo()  # may still refuse: nothing has been written before it
            job.begin(shop.label, shop.domain.describe())
            with Ledger(job.run_dir / "ledger.sqlite") as ledger:
                earlier = sum(e["seconds"] for e in ledger.events() if e["kind"] == "session")
                with job.session(ledger):
                    outcome = Evolution(job.run_dir, job.cfg, conf, shop, repo, ledger).run()
            wall = earlier + time.perf_counter() - began
            words = device_words(shop.label)
    gathered = Gatherer(job.run_dir, conf, repo, outcome, words, wall)
    finish(job, gathered)
    print_result(gathered)
    return EXIT_OK


def finish(job: Job, gathered: Gatherer) -> None:
    """Write summary.json and report.html."""
    write_json(job.run_dir / "summary.json", gathered.summary())
    remarks = ("Every verdict rests on one training seed per arm.", *notes(job.cfg))
    write_report(job.run_dir, gathered.report(remarks))


def print_result(gathered: Gatherer) -> None:
    """The verdict in words, and where to look next; always on plain standard output."""
    summary = gathered.summary()
    print(f"\nVerdict: {summary['headline']}")
    for version in summary["versions"]:
        score = "no score" if version["score"] is None else f"{version['score']:.3f}"
        print(f"  {version['version']:<12} {version['verdict']:<10} {score}  {version['words']}")
    audit = summary["final"]["audit"]
    if audit is not None:
        low, high = audit["ci95"]
        print(
            f"Audit split ({audit['opened']} versions scored on it, at the end): "
            f"base {audit['base']['score']:.3f}, final {audit['score']:.3f} [{low:.3f}, {high:.3f}]"
        )
    print(f"Report:  {summary['report']}")
    print(f"Harness: {summary['harness']}")
    print(f"Train the final version again: {summary['rerun']}", flush=True)


def _train_again(job: Job, guard: InterruptGuard, found: CheckedOut) -> int:
    """Train a checked-out version anew and compare its rollouts with those of its run."""
    job.refuse_edits()
    source = VersionStore(found.run_dir)
    parent = None if found.parent is None else source.result(found.parent)
    if parent is None:
        raise InputError.one(
            f"the parent of {found.version} is not finished in {found.run_dir}",
            "--config-dir",
            found.parent,
            f"finish that run first: python -m evojax.main resume={found.run_dir}",
        )
    conf = job.conf
    steps = conf.train.steps if found.version == FIRST else conf.train.candidate_steps
    plan = ArmPlan(
        found.version, parent.version, "recipe", 0, "", found.commit, job.cfg,
        parent.end_step, steps,
    )  # fmt: skip
    with LiveView(conf.live, steps) as view:
        view.note(f"training {found.version} of {found.run_dir} again, from {parent.version}")
        with Workshop(conf, job.run_dir.name, view, guard) as shop:
            job.begin(shop.label, shop.domain.describe())
            runner = ArmRunner(shop, VersionStore(job.run_dir), source)
            result = runner.run(plan)
    _report_again(job.run_dir, source, found, result.score)
    return EXIT_OK


def _report_again(
    run_dir: Path, source: VersionStore, found: CheckedOut, score: float | None
) -> None:
    again = load_evidence(VersionStore(run_dir).path(found.version))
    stored = source.result(found.version)
    same = None
    if stored is not None:
        same = same_rollouts(load_evidence(source.path(found.version)), again)
    known = {True: "identical, row for row", False: "different", None: "not there to compare"}
    write_json(
        run_dir / "reproduction.json",
        {
            "version": found.version,
            "commit": found.commit,
            "source": str(found.run_dir),
            "source_evojax": read_manifest(found.run_dir)["evojax"],
            "score": score,
            "source_score": None if stored is None else stored.score,
            "same_rollouts": same,
        },
    )
    before = "none" if stored is None or stored.score is None else f"{stored.score:.4f}"
    now = "none" if score is None else f"{score:.4f}"
    print(f"\n{found.version} trained again: score {now}, in its run {before}")
    print(f"Training rollouts: {known[same]}")
    print(f"Evidence: {VersionStore(run_dir).path(found.version)}", flush=True)
