"""One invocation on one run directory: which configuration holds, and which repository."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from evojax import paths
from evojax.config import EvojaxConf
from evojax.errors import InputError, Problem
from evojax.evolution.checkout import open_checkout
from evojax.evolution.config_edit import bake_overrides
from evojax.evolution.harness import HarnessRepo
from evojax.evolution.loop import BASE
from evojax.evolution.manifest import changed, read_manifest, stored_config, write_manifest
from evojax.evolution.memory.ledger import Ledger
from evojax.evolution.store import VersionStore
from evojax.evolution.workshop import typed


class Job:
    """What every mode starts from.

    Args:
        cfg: composed configuration. run_dir: absolute, claimed by this process.
        overrides: as typed by the user. conf_dir: the tree that ``cfg`` was composed from.
    """

    def __init__(self, cfg: DictConfig, run_dir: Path, overrides: list[str], conf_dir: Path):
        self.run_dir = run_dir
        self.conf_dir = conf_dir
        self.overrides = overrides
        self.asked = cfg
        self.resumed = (run_dir / "run.json").is_file()
        if cfg.resume is not None and not self.resumed:
            read_manifest(run_dir)  # says what is missing
        if self.resumed:
            manifest = read_manifest(run_dir)
            self.edits = changed(manifest, cfg)
            cfg = stored_config(manifest, cfg)
        else:
            self.edits = {}
        self.cfg = cfg
        self.conf: EvojaxConf = typed(cfg)

    def refuse_edits(self) -> None:
        """A run keeps its configuration.

        Raises:
            InputError: one problem for each key that the command line would change.
        """
        if self.edits:
            raise InputError(
                [
                    Problem(
                        f"the run keeps its configuration, which has {old!r} here",
                        key,
                        new,
                        "leave the override out, or start a new run",
                    )
                    for key, (old, new) in self.edits.items()
                ]
            )

    def begin(self, policy: str, data: dict[str, Any]) -> None:
        """Write run.json when the run is new; everything that can be refused comes before."""
        if not self.resumed:
            write_manifest(self.run_dir, self.cfg, self.overrides, policy, data)

    def stored(self) -> VersionStore:
        """The versions of an existing run.

        Raises:
            InputError: no run was named.
        """
        if not self.resumed:
            raise InputError.one(
                f"mode={self.conf.mode} reads an existing run",
                "resume",
                self.asked.resume,
                "add resume=outputs/<experiment>/<run>",
            )
        return VersionStore(self.run_dir)

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
        harness = self.run_dir / "harness"
        if harness.exists():
            return HarnessRepo.create(
                harness, self.conf_dir, self.conf_dir, worktrees, experiment, trailers
            )
        with tempfile.TemporaryDirectory(dir=self.run_dir, prefix=".seed-") as name:
            conf = Path(name) / "conf"
            shutil.copytree(self.conf_dir, conf)
            bake_overrides(conf, experiment, self.overrides)
            return HarnessRepo.create(
                harness, conf, paths.skills_dir(), worktrees, experiment, trailers
            )

    @contextmanager
    def session(self, ledger: Ledger) -> Iterator[None]:
        """Count this process's seconds in the ledger, however it ends."""
        began = time.perf_counter()
        key = f"session-{time.time_ns()}"
        try:
            yield
        finally:
            ledger.event(key, "session", seconds=time.perf_counter() - began)
