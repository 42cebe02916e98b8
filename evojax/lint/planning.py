"""A probe of the loop: the real rounds, plans and verdicts, with training left out."""

from __future__ import annotations

import shutil
import tempfile
import types
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig

from evojax import paths
from evojax.config import EvojaxConf
from evojax.diagnostics.health import HealthReport
from evojax.evolution.arms import ArmPlan, ArmRunner
from evojax.evolution.harness import HarnessRepo
from evojax.evolution.loop import Evolution
from evojax.evolution.memory.ledger import Ledger
from evojax.evolution.store import VersionResult, VersionStore
from evojax.evolution.workshop import Workshop
from evojax.lint.sections import arm
from evojax.lint.trail import Trail
from evojax.lint.training import quiet
from evojax.training.evaluate import Evaluation
from evojax.training.interrupt import InterruptGuard

# The health of a version that has every ailment that the skills know a remedy for.
_AILING = {
    "dead_group_share": 0.6, "dead_all_wrong_share": 0.2, "item_saturation": 0.3,
    "item_hopeless": 0.1, "entropy": 0.35, "entropy_trend": -0.2, "train_accuracy": 0.6,
    "reward_trend": 0.02, "grad_norm_spike": 3.0, "wasted_rollout_share": 0.6,
    "truncation_share": 0.4,
}  # fmt: skip


class _Stored(ArmRunner):
    """Answers every plan with stored evidence and fixed scores instead of training."""

    def __init__(self, store: VersionStore, evidence: Path, trail: Trail):
        self.store = store
        self._evidence = evidence
        self._trail = trail

    def run(self, plan: ArmPlan) -> VersionResult:
        self._trail.mark("plan", (plan.version, plan.parent, plan.role, plan.steps, plan.factor))
        self._trail.mark("hypothesis", plan.hypothesis)
        target = self.store.path(plan.version) / "evidence"
        shutil.copytree(self._evidence, target, dirs_exist_ok=True)
        result = arm(plan.version, 0.01 * plan.steps, plan.steps)
        result.parent, result.role, result.round = plan.parent, plan.role, plan.round
        result.start_step, result.factor = plan.start_step, plan.factor
        self.store.save(result)
        return result

    def audit(self, version: str) -> Evaluation:
        return Evaluation({"i0": 0.5}, 0.0, [])


class _Rehearsal(Evolution):
    """The loop with the health of every version given; arms are not composed, nor trained."""

    def _compose(self, conf_dir: Path) -> DictConfig:
        return self.cfg

    def health(self, result: VersionResult) -> HealthReport:
        report = types.SimpleNamespace(numbers=lambda: dict(_AILING), alerts=())
        return cast(HealthReport, report)


def loop(cfg: DictConfig, conf: EvojaxConf, trail: Trail, tree: Path, evidence: Path) -> None:
    """Go through all rounds and mark what would be trained, for how long, and the verdicts.

    Args:
        cfg: plain. conf: the same, recorded. tree: configuration that gives ``cfg``.
        evidence: of a trained version.
    """
    trailers: dict[str, Any] = {"Version": "v000", "Parent": "none"}
    with tempfile.TemporaryDirectory() as name, InterruptGuard() as guard:
        run_dir = Path(name)
        shop = cast(Workshop, types.SimpleNamespace(guard=guard, view=quiet()))
        repo = HarnessRepo.create(
            run_dir / "harness", tree, paths.skills_dir(), run_dir / "worktrees",
            conf.experiment, trailers,
        )  # fmt: skip
        with Ledger(run_dir / "ledger.sqlite") as ledger:
            given = cast(DictConfig, conf)  # the loop only reads attributes of it
            evolution = _Rehearsal(run_dir, given, conf, shop, repo, ledger)
            evolution.runner = _Stored(evolution.store, evidence, trail)
            outcome = evolution.run()
        trail.mark("outcome", (outcome.final, outcome.promoted, outcome.verdicts))
        for plan in outcome.plans:
            trail.mark("refused", [r["reasons"] for r in plan.refused])
