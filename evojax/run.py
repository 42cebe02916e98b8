"""From a composed and checked configuration to the mode that it asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from evojax.modes import evolve, lint, plan, stored
from evojax.modes.job import Job
from evojax.registry import Registry
from evojax.training.interrupt import InterruptGuard

Mode = Callable[[Job, InterruptGuard], int]
RUNNERS: Registry[Mode] = Registry("mode")
for _name, _mode in (
    ("evolve", evolve.evolve),
    ("train", evolve.train),
    ("evaluate", stored.evaluate),
    ("diagnose", stored.diagnose),
    ("backtest", stored.backtest),
    ("report", stored.report),
    ("lint", lint.lint),
    ("plan", plan.plan),
):
    RUNNERS.register(_name)(_mode)


def dispatch(cfg: DictConfig, run_dir: Path, overrides: list[str], conf_dir: Path) -> int:
    """Run the mode; returns the exit code.

    Args:
        cfg: composed and checked. run_dir: claimed by this process.
        overrides: the command line's. conf_dir: tree that ``cfg`` was composed from.
    """
    for name in ("absl", "jax", "orbax"):
        logging.getLogger(name).setLevel(logging.WARNING)  # their progress is not the user's
    with InterruptGuard() as guard:
        return RUNNERS.get(cfg.mode, "mode")(Job(cfg, run_dir, overrides, conf_dir), guard)
