"""The compiler's process: started, watched, and its answer or the reason why there is none."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from evojax.plan.programs import MARK

_SHOWN = 400  # characters of a compiler's last words


@dataclass(frozen=True)
class Compiled:
    """What became of the compiler.

    Args:
        report: the parts that ``evojax.plan.programs.run`` gave; empty when there are none.
        why: what was not compiled, and the reason; empty when everything was.
        seconds: of the process.
    """

    report: dict[str, Any]
    why: str
    seconds: float

    @property
    def whole(self) -> bool:
        """Whether both programs were compiled."""
        return "update" in self.report and "rollout" in self.report


def environment(platform: str, chips: int) -> dict[str, str]:
    """Variables of the compiler's process: no accelerator is opened, all devices are pretended."""
    flags = os.environ.get("XLA_FLAGS", "")
    forced = f"--xla_force_host_platform_device_count={chips if platform != 'tpu' else 1}"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # libtpu would ask the network what machine it is on
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling holds no chip
        "XLA_FLAGS": f"{flags} {forced}".strip(),
    }


def missing(cfg: DictConfig) -> str:
    """Why nothing can be compiled here; empty when it can."""
    if not cfg.plan.programs:
        return "plan.programs is empty"
    if cfg.hardware.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        return "the package libtpu is not installed; add it: pip install 'evojax-rl[tpu]'"
    return ""


def compile_programs(cfg: DictConfig, work: Path) -> Compiled:
    """Compile the programs of ``cfg`` in a process of its own.

    Args:
        work: directory for what that process is given and says.
    """
    if why := missing(cfg):
        return Compiled({}, _what(cfg, {}, why), 0.0)
    given, said, errors = (work / f"compile.{end}" for end in ("yaml", "out", "err"))
    given.write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")
    words = [sys.executable, "-m", "evojax.plan.programs", str(given)]
    variables = environment(cfg.hardware.platform, cfg.hardware.chips)
    began, limit = time.perf_counter(), cfg.plan.timeout_s
    with said.open("w") as out, errors.open("w") as err:
        try:
            code = subprocess.run(
                words, env=variables, stdout=out, stderr=err, timeout=limit, check=False
            ).returncode
            why = _reason(code, errors.read_text(errors="replace")) if code else ""
        except subprocess.TimeoutExpired:
            why = f"the compiler did not end within plan.timeout_s={limit:g}"
    report: dict[str, Any] = {}
    for line in said.read_text(errors="replace").splitlines():
        if line.startswith(MARK):
            report |= json.loads(line.removeprefix(MARK))
    return Compiled(report, _what(cfg, report, why), time.perf_counter() - began)


def _what(cfg: DictConfig, report: dict[str, Any], why: str) -> str:
    """The programs that there is nothing of, and the reason."""
    rest = [name for name in ("update", "rollout") if name not in report]
    why = why or "the compiler refused it"
    reasons = {name: report[f"{name}_too_large"] for name in rest if f"{name}_too_large" in report}
    reasons |= {name: "not in plan.programs" for name in rest if name not in cfg.plan.programs}
    return "; ".join(f"{name}: {reasons.get(name, why)}" for name in rest)


def _reason(code: int, errors: str) -> str:
    """The end of the compiler's own words, in one line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    faults = [line for line in lines if "Error" in line or "RESOURCE_EXHAUSTED" in line]
    words = " ".join((faults or lines)[-1:])[:_SHOWN]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    return f"the compiler {how}: {words or 'without a word'}"
