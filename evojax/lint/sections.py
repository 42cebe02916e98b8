"""Probes of what a training run cannot show: start-up, policy, problems, metrics, verdicts."""

from __future__ import annotations

import io
import re
import shutil
import tempfile
from pathlib import Path

import jax
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from evojax.config import EvojaxConf
from evojax.domains.base import load_domain
from evojax.evolution.examine import examine
from evojax.evolution.judging import judge
from evojax.evolution.store import VersionResult, VersionStore
from evojax.hardware import hardware_words
from evojax.lint.trail import Trail
from evojax.policy.hf import save_hf
from evojax.policy.load import load_policy
from evojax.preflight import preflight
from evojax.report.live import LiveView

_RESOLVERS = re.compile(r"\$\{(now|evojax\.unique):[^}]*\}")
_METRIC = """\
name: {name}
dimension: efficiency
unit: rows
description: A query of the linter.
sql: {sql}
"""
SLOW = "SELECT count(*)::DOUBLE AS value FROM range(40000000) AS t(i) WHERE hash(i) % 7 = 1"
HUNGRY = "SELECT len(list(i))::DOUBLE AS value FROM range(6000000) AS t(i)"
LINT_METRICS = ["lint_hungry", "lint_slow"]


def start(cfg: DictConfig, conf: EvojaxConf, trail: Trail, conf_dir: Path) -> None:
    """What a command does before it trains: checks, mode, run directory, view."""
    from evojax.run import RUNNERS

    trail.mark("preflight", [str(problem) for problem in preflight(cfg)])
    trail.mark("hardware", hardware_words(conf.hardware))
    trail.mark("what is run", RUNNERS.get(conf.mode, "mode").__name__)
    place = OmegaConf.load(conf_dir / "config.yaml")["hydra"]["run"]  # type: ignore[index]
    text = _RESOLVERS.sub("", str(OmegaConf.to_container(place)["dir"]))  # type: ignore[index]
    named = OmegaConf.create({"output_root": conf.output_root, "experiment": conf.experiment})
    named["place"] = text
    trail.mark("run directory", str(named.place))
    shown = io.StringIO()
    with LiveView(conf.live, 1, Console(file=shown, force_terminal=True, width=80)) as view:
        view.note("lint")
    trail.mark("live view", "\x1b[" in shown.getvalue())


def model(conf: EvojaxConf, trail: Trail) -> None:
    """The policy as it is loaded."""
    policy = load_policy(conf.policy, conf.seed)
    trail.mark("model", (policy.label, policy.source_dir, policy.cfg))
    trail.mark("weights", jax.tree.leaves(policy.params))


def save_tiny(conf: EvojaxConf, directory: Path, seed: int) -> None:
    """Write a random policy of the shape that ``conf`` has as a Hugging Face directory."""
    policy = load_policy(conf.policy, seed)
    save_hf(directory, policy.cfg, policy.params, policy.tokenizer)


def problems(conf: EvojaxConf, trail: Trail) -> None:
    """The items of every split, and the grades of one answer that takes the grader time."""
    domain = load_domain(conf.domain)
    try:
        found = domain.describe()
        trail.mark("items", {k: found[k] for k in ("source", "counts", "sha256")})
        item = domain.items("train")[0]
        text = f"\\boxed{{\\frac{{2 \\cdot ({item.answer})}}{{2}}}}"
        trail.mark("grade", [g.status for g in domain.grade([item], [text], ["stop"])])
    finally:
        domain.close()


def health(conf: EvojaxConf, trail: Trail, version_dir: Path, conf_dir: Path) -> None:
    """The health report of stored evidence, with a slow and a hungry metric beside the usual.

    Args:
        version_dir: of a trained version. conf_dir: tree whose metrics are computed.
    """
    with tempfile.TemporaryDirectory() as name:
        tree, run = Path(name) / "conf", Path(name) / "run"
        shutil.copytree(conf_dir / "metrics", tree / "metrics")
        for metric, sql in zip(LINT_METRICS, (HUNGRY, SLOW), strict=True):
            text = _METRIC.format(name=metric, sql=sql)
            (tree / "metrics" / f"{metric}.yaml").write_text(text, encoding="utf-8")
        store = VersionStore(run)
        shutil.copytree(version_dir / "evidence", store.path("v001") / "evidence")
        report = examine(store, "v001", None, conf, tree)
        trail.mark("metrics", sorted(report.values))
        trail.mark("health report", {n: v.error or v for n, v in report.values.items()})


def arm(version: str, gain: float, steps: int = 4) -> VersionResult:
    """A finished version whose 24 item scores lie ``gain`` above a fixed pattern, on average.

    No two gains are alike, so that the intervals of other bootstrap draws differ.
    """
    scores = {f"i{n}": (n % 5) / 10 + gain * (0.5 + n * 0.618034 % 1) for n in range(24)}
    result = VersionResult(version, "v001", "candidate", 1, "b", "c", "trained", "h", 0, steps)
    result.scores = dict(scores)
    result.score, result.ci95 = sum(scores.values()) / len(scores), (0.0, 1.0)
    return result


def verdicts(conf: EvojaxConf, trail: Trail) -> None:
    """The gate's verdict on fixed scores: one arm clearly better, one alike."""
    arms = [arm("v002", 0.2), arm("v003", 0.0)]
    found = judge(arm("r1-control", 0.0), arms, conf.evolution.gate)
    trail.mark("verdicts", {version: v.outcome for version, v in found.items()})
    trail.mark("intervals", [repr(v.comparison) for v in found.values()])
