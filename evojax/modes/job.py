"""One invocation on one run directory: which configuration holds, and which repository."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from evojax import paths
from evojax.config import EvojaxConf
from evojax.errors import InputError, Problem, UnavailableError
from evojax.evolution.boundary import changed_keys
from evojax.evolution.checkout import checkout_problems, open_checkout
from evojax.evolution.config_edit import (
    bake_overrides,
    compose_conf,
    experiment_override,
    is_run_only,
)
from evojax.evolution.harness import HarnessRepo
from evojax.evolution.manifest import (
    changed,
    other_versions,
    read_manifest,
    stored_config,
    write_manifest,
)
from evojax.evolution.memory.ledger import Ledger
from evojax.evolution.standing import BASE
from evojax.evolution.store import VersionStore
from evojax.evolution.workshop import typed
from evojax.overrides import parse
from evojax.rundir import saved_overrides
from evojax.schema import PATH_KEYS

HEARTBEAT_S = 5.0  # how often a session's seconds are put down


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
        self.edits: dict[str, tuple[Any, Any]] = {}
        self.remarks: list[str] = []
        # A run that was stopped before it had anything to keep is begun anew in its directory.
        begun = self.resumed or (run_dir / "versions").exists()
        if begun or (cfg.resume is not None and cfg.mode not in ("evolve", "train")):
            manifest = read_manifest(run_dir)
            self.edits = self._asked_for(changed(manifest, cfg))
            self.remarks = other_versions(manifest)
            cfg = stored_config(manifest, cfg)
        self.cfg = cfg
        self.conf: EvojaxConf = typed(cfg)

    def _asked_for(self, edits: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
        """Those that an override names which the run was not begun with.

        A configuration file that changed since then is no wish of the user's.
        """
        new = sorted(set(self.overrides) - set(saved_overrides(self.run_dir)))
        named = [f"{item.key_or_group.replace('/', '.')}." for item in parse(new)]
        return {k: v for k, v in edits.items() if f"{k}.".startswith(tuple(named))}

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
            return self._checkout(Path(self.conf.evolution.repo), worktrees, trailers)
        harness = self.run_dir / "harness"
        if not self.resumed:
            shutil.rmtree(harness, ignore_errors=True)  # of an attempt that never began
        if harness.exists():
            return HarnessRepo.create(
                harness, self.conf_dir, self.conf_dir, worktrees, experiment, trailers
            )
        with self._baked(self.conf_dir) as conf:
            return HarnessRepo.create(
                harness, conf, paths.skills_dir(), worktrees, experiment, trailers
            )

    def _checkout(self, path: Path, worktrees: Path, trailers: dict[str, Any]) -> HarnessRepo:
        """The user's checkout; its conf/ must give the configuration that this run was checked for.

        Raises:
            InputError: it gives another one, or the checkout cannot be used.
        """
        experiment = self.conf.experiment
        if problems := checkout_problems(path):
            raise InputError(problems)
        if not self.resumed:
            with self._baked(path / "conf") as conf:
                self._refuse_other_recipe(path, conf)
        repo = open_checkout(
            path, worktrees, experiment, self.run_dir.name, trailers,
            lambda conf: bake_overrides(conf, experiment, self.overrides),
        )  # fmt: skip
        if not self.resumed:
            self._refuse_other_recipe(path, repo.trunk_dir / "conf")
        return repo

    @contextmanager
    def _baked(self, tree: Path) -> Iterator[Path]:
        """A copy of ``tree`` with the command line written into it."""
        with tempfile.TemporaryDirectory(dir=self.run_dir, prefix=".seed-") as name:
            conf = Path(name) / "conf"
            shutil.copytree(tree, conf)
            bake_overrides(conf, self.conf.experiment, self.overrides)
            yield conf

    def _refuse_other_recipe(self, path: Path, conf: Path) -> None:
        found = compose_conf(conf, [experiment_override(self.conf.experiment)])
        other = {
            key: values
            for key, values in changed_keys(found, self.cfg).items()
            if not is_run_only(key) and key not in PATH_KEYS
        }
        if other:
            remedy = f"add --config-dir {path / 'conf'}, or use a new run directory"
            raise InputError(
                [
                    Problem(f"the checkout at {path} has {old!r} here", key, new, remedy)
                    for key, (old, new) in other.items()
                ]
            )

    @contextmanager
    def session(self, ledger: Ledger) -> Iterator[None]:
        """Count this process's seconds, also those of one that is killed (but its last few)."""
        began = time.perf_counter()
        key = f"session-{time.time_ns()}"
        over = threading.Event()

        def keep_time() -> None:
            # A connection belongs to one thread. A ledger that fails stops the run, not its clock.
            with suppress(UnavailableError), Ledger(ledger.path) as own:
                while not over.wait(HEARTBEAT_S):
                    own.session(key, time.perf_counter() - began)

        keeper = threading.Thread(target=keep_time, name="session-clock", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()
            ledger.session(key, time.perf_counter() - began)
