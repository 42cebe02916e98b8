"""mode=lint: every setting of the composed configuration acts, or is hidden and left alone."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evojax.errors import EXIT_OK, InputError
from evojax.lint.linter import Lint, Linter
from evojax.modes.job import Job
from evojax.training.interrupt import InterruptGuard
from evojax.training.version import write_json

PLAIN_WIDTH = 150  # columns where there is no terminal


def lint(job: Job, guard: InterruptGuard) -> int:
    """Lint the configuration, show a table and write lint.json.

    Raises:
        InputError: one problem for each setting without effect.
    """
    with tempfile.TemporaryDirectory(prefix="evojax-lint-") as name:
        found = Linter(job.cfg, job.conf_dir, job.overrides, Path(name)).run()
    rows = [dataclasses.asdict(row) for row in found.rows]
    report = {"rows": rows, "replaced": list(found.replaced), "seconds": found.seconds}
    write_json(job.run_dir / "lint.json", report)
    console = Console()
    show(found, console if console.is_terminal else Console(width=PLAIN_WIDTH))
    if problems := found.problems():
        raise InputError(problems)
    print(f"Every setting acts or is hidden: {job.run_dir / 'lint.json'}", flush=True)
    return EXIT_OK


def show(found: Lint, console: Console) -> None:
    """The table, and below it what the tiny run replaced."""
    table = Table("setting", "value", "state", "evidence, or what hides it")
    for row in found.rows:
        style = {"inert": "bold red", "hidden": "dim"}.get(row.state, "")
        table.add_row(row.leaf, str(row.value), row.state, row.why, style=style)
    console.print(table)
    for words in found.replaced:
        console.print(f"In the tiny run {words}.")
    counts = {state: sum(r.state == state for r in found.rows) for state in ("live", "hidden")}
    console.print(
        f"{len(found.rows)} settings: {counts['live']} live, {counts['hidden']} hidden, "
        f"{len(found.problems())} inert; {found.seconds:.0f} s"
    )
