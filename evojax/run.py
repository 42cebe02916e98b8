"""What each mode does with a composed and checked configuration."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from evojax import paths
from evojax.config import EvojaxConf
from evojax.errors import EXIT_OK, InputError
from evojax.evolution.checkout import open_checkout
from evojax.evolution.config_edit import bake_overrides, compose_conf, experiment_override
from evojax.evolution.harness import HarnessRepo
from evojax.evolution.loop import BASE, Evolution
from evojax.evolution.manifest import (
    device,
    read_manifest,
    refuse_changed,
    stored_config,
    write_manifest,
)
from evojax.evolution.memory.ledger import Ledger
from evojax.evolution.outputs import Gatherer
from evojax.evolution.workshop import Workshop, typed
from evojax.preflight import notes
from evojax.report.html import write_report
from evojax.report.live import LiveView
from evojax.training.interrupt import InterruptGuard
from evojax.training.version import write_json


class Job:
    """One invocation on one run directory.

    Args:
        cfg: composed configuration. run_dir: absolute. overrides: as typed by the user.
        conf_dir: the tree that ``cfg`` was composed from.
    """

    def __init__(self, cfg: DictConfig, run_dir: Path, overrides: list[str], conf_dir: Path):
        self.run_dir = run_dir
        self.conf_dir = conf_dir
        self.overrides = overrides
        self.resumed = (run_dir / "run.json").is_file()
        if self.resumed:
            manifest = read_manifest(run_dir)
            if cfg.mode in ("evolve", "train"):
                refuse_changed(manifest, cfg)
            cfg = stored_config(manifest, cfg)
        self.cfg = cfg
        self.conf: EvojaxConf = typed(cfg)

    def begin(self) -> None:
        """Write run.json when the run is new; everything that can be refused comes before."""
        if not self.resumed:
            write_manifest(self.run_dir, self.cfg, self.overrides)

    def repo(self) -> HarnessRepo:
        """The harness repository, seeded with this run's recipe when it is new."""
        experiment = self.conf.experiment
        worktrees = self.run_dir / "worktrees"
        trailers = {
            "Version": BASE,
            "Parent": "none",
            "Factor": "none",
            "Hypothesis": "the base policy, before any training",
            "Predicts": "nothing",
            "Backtest": "none",
        }
        if self.conf.evolution.repo != "private":
            path = Path(self.conf.evolution.repo)
            return open_checkout(path, worktrees, experiment, self.run_dir.name, trailers)
        with tempfile.TemporaryDirectory(dir=self.run_dir, prefix=".seed-") as name:
            conf = Path(name) / "conf"
            shutil.copytree(self.conf_dir, conf)
            if not (self.run_dir / "harness").exists():
                bake_overrides(conf, experiment, self.overrides)
            return HarnessRepo.create(
                self.run_dir / "harness", conf, paths.skills_dir(), worktrees, experiment, trailers
            )

    @contextmanager
    def session(self, ledger: Ledger) -> Iterator[None]:
        """Count this process's seconds, however it ends."""
        began = time.perf_counter()
        key = f"session-{time.time_ns()}"
        try:
            yield
        finally:
            ledger.event(key, "session", seconds=time.perf_counter() - began)


def evolve(job: Job, guard: InterruptGuard) -> int:
    """Run (or go on with) the loop, then write summary.json and report.html."""
    conf = job.conf
    arms = conf.evolution.candidates + 1
    total = conf.train.steps + conf.evolution.rounds * arms * conf.train.candidate_steps
    began = time.perf_counter()
    with LiveView(conf.live, total) as view:
        for note in notes(job.cfg):
            view.note(f"note: {note}")
        view.phase("set up", BASE)
        with (
            Workshop(conf, job.run_dir.name, view, guard) as shop,
            Ledger(job.run_dir / "ledger.sqlite") as ledger,
        ):
            repo = job.repo()
            job.begin()
            earlier = sum(e["seconds"] for e in ledger.events() if e["kind"] == "session")
            with job.session(ledger):
                outcome = Evolution(job.run_dir, job.cfg, shop, repo, ledger).run()
            wall = earlier + time.perf_counter() - began
            gathered = Gatherer(
                job.run_dir, conf, repo, outcome, device_words(shop.label), wall
            )
            finish(job, gathered)
    print_result(gathered)
    return EXIT_OK


def finish(job: Job, gathered: Gatherer) -> None:
    """Write summary.json and report.html."""
    write_json(job.run_dir / "summary.json", gathered.summary())
    remarks = ("Every verdict rests on one training seed per arm.", *notes(job.cfg))
    write_report(job.run_dir, gathered.report(remarks))


def device_words(policy: str) -> str:
    """Policy and hardware in one line."""
    found = device()
    return f"{policy} on {found['platform']} ({found['machine']}, {found['cores']} cores)"


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
        print(f"Audit split, opened once: {audit['score']:.3f} [{low:.3f}, {high:.3f}]")
    print(f"Report:  {summary['report']}")
    print(f"Harness: {summary['harness']}")
    print(f"Re-run the final version: {summary['rerun']}", flush=True)


MODES: dict[str, Callable[[Job, InterruptGuard], int]] = {"evolve": evolve}


def dispatch(cfg: DictConfig, run_dir: Path, overrides: list[str], conf_dir: Path) -> int:
    """Run the mode that the configuration asks for; returns the exit code.

    Args:
        cfg: composed and checked. run_dir: claimed by this process.
        overrides: the command line's. conf_dir: tree that ``cfg`` was composed from.
    """
    job = Job(cfg, run_dir, overrides, conf_dir)
    with InterruptGuard() as guard:
        return MODES[job.conf.mode](job, guard)
