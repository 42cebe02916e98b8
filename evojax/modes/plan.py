"""mode=plan: what a configuration needs of its hardware, and whether it fits, without a chip."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from evojax.errors import EXIT_OK
from evojax.modes.job import Job
from evojax.modes.lint import PLAIN_WIDTH
from evojax.plan.case import case_of, shape_of
from evojax.plan.compiler import compile_programs
from evojax.plan.report import plan_data, show
from evojax.training.interrupt import InterruptGuard
from evojax.training.version import write_json


def plan(job: Job, guard: InterruptGuard) -> int:
    """Count, compile, show the tables and write plan.json. A plan that does not fit ends with 0:
    the answer was asked for.

    Raises:
        InputError: the mesh does not divide the model, or the model cannot be.
    """
    conf = job.conf
    case = case_of(conf, shape_of(conf.policy))
    with tempfile.TemporaryDirectory(prefix="evojax-plan-") as name:
        compiled = compile_programs(job.cfg, Path(name))
    guard.check()
    label = conf.policy.repo or conf.policy.path or conf.policy.source
    data = plan_data(conf.hardware.name, label, case, compiled)
    write_json(job.run_dir / "plan.json", data)
    console = Console()
    show(data, console if console.is_terminal else Console(width=PLAIN_WIDTH))
    print(f"Plan: {job.run_dir / 'plan.json'}", flush=True)
    return EXIT_OK
