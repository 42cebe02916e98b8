"""Running one version from its plan to its result: train, export, evaluate, diagnose."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
from omegaconf import DictConfig

from evojax.errors import TrainingFailed
from evojax.evidence.reader import load as load_evidence
from evojax.evidence.types import Split
from evojax.evidence.writer import EvidenceWriter
from evojax.evolution.gate import bootstrap_mean
from evojax.evolution.store import EvalProtocol, VersionResult, VersionStore, items_hash
from evojax.evolution.workshop import Workshop, config_hash, typed
from evojax.policy.decoder import Params
from evojax.training.evaluate import Evaluation, evaluate
from evojax.training.selection import ItemStats
from evojax.training.version import Arm, TrainingTotals, VersionTrainer


@dataclass(frozen=True)
class ArmPlan:
    """Everything that decides what a version is.

    Args:
        role: base (not trained), recipe (first training), control or candidate.
        cfg: configuration composed from the version's own commit.
        start_step: updates behind its starting weights; steps: updates to make.
    """

    version: str
    parent: str | None
    role: str
    round: int
    branch: str
    commit: str
    cfg: DictConfig
    start_step: int
    steps: int
    factor: str = "none"
    hypothesis: str = ""


def item_stats(rollouts: pa.Table) -> ItemStats:
    """Success rates per item from stored training rollouts, in stored order."""
    stats = ItemStats()
    columns = (rollouts[name].to_pylist() for name in ("item", "grade_status"))
    for item, status in zip(*columns, strict=True):
        if status != "unscorable":
            stats.add(item, float(status == "correct"), 1.0)
    return stats


class ArmRunner:
    """Runs plans in one workshop; a finished version is never run again.

    Args:
        store: where results go. parents: where parents are read, by default the same store.
    """

    def __init__(self, shop: Workshop, store: VersionStore, parents: VersionStore | None = None):
        self.shop = shop
        self.store = store
        self.parents = parents or store

    def run(self, plan: ArmPlan) -> VersionResult:
        """Finish ``plan`` (or find it finished) and return its result.

        A candidate whose training fails is a result with status ``failed`` and no score.

        Raises:
            TrainingFailed: an arm that the loop cannot do without failed.
            Interrupted: a stop was asked for; resuming goes on from the last checkpoint.
        """
        known = self.store.result(plan.version)
        if known is not None:
            return known
        started = time.perf_counter()
        directory = self.store.path(plan.version)
        directory.mkdir(parents=True, exist_ok=True)
        result = VersionResult(
            version=plan.version,
            parent=plan.parent,
            role=plan.role,
            round=plan.round,
            branch=plan.branch,
            commit=plan.commit,
            status="trained",
            config_hash=config_hash(plan.cfg),
            start_step=plan.start_step,
            steps=plan.steps,
            factor=plan.factor,
            hypothesis=plan.hypothesis,
        )
        try:
            params, totals = self._weights(plan)
            result.totals = vars(totals)
            self._score(plan, params, result)
        except TrainingFailed as error:
            if plan.role != "candidate":
                raise
            self.shop.view.note(f"{plan.version} failed: {error}")
            result.status, result.error = "failed", str(error)
        result.seconds = time.perf_counter() - started
        self.store.save(result)
        shutil.rmtree(directory / "checkpoint", ignore_errors=True)
        return result

    def audit(self, version: str) -> Evaluation:
        """Score a finished version on the audit split and add it to the version's evidence."""
        found = self.score_stored(version, "audit")
        writer = EvidenceWriter(self.store.path(version) / "evidence", self.shop.run, version)
        writer.rollouts(found.trajectories, "audit")
        writer.flush("audit")
        return found

    def score_stored(self, version: str, split: Split) -> Evaluation:
        """Evaluate the stored weights of a finished version on ``split``."""
        result = self.store.require(version)
        self.shop.view.phase(split, version)
        base = result.role == "base"
        params = self.shop.base_params() if base else self.shop.load(self.store.path(version))
        self.shop.sampler.engine.load_weights(params, f"{version}@{result.end_step}")
        return evaluate(self.shop.sampler, self.shop.cfg, self.shop.pools[split], result.end_step)

    def _weights(self, plan: ArmPlan) -> tuple[Params, TrainingTotals]:
        if plan.role == "base":
            return self.shop.base_params(), TrainingTotals()
        cfg = typed(plan.cfg)
        cfg.hardware = self.shop.cfg.hardware  # where this process runs, not the version
        room = self.shop.model.max_position - self.shop.longest_prompt
        if cfg.sampling.max_new_tokens > room:  # a candidate may raise it
            raise TrainingFailed(
                f"{plan.version} samples up to {cfg.sampling.max_new_tokens} tokens, but the "
                f"longest prompt leaves {room} of the context"
            )
        self.shop.view.phase("train", plan.version)
        directory = self.store.path(plan.version)
        trainer = VersionTrainer(
            self.shop.model,
            self.shop.sampler,
            cfg,
            directory,
            self.shop.run,
            self.shop.view,
            self.shop.guard,
        )
        stats = ItemStats()
        parent = self._parent_dir(plan.parent)
        if parent is not None:
            stats = item_stats(load_evidence(parent).rollouts("train"))
        arm = Arm(plan.version, plan.start_step, plan.steps, config_hash(plan.cfg))
        start = partial(self.shop.start, parent)
        pool = self.shop.pools["train"]
        trained, totals = trainer.train(arm, start, pool, stats, self.shop.frozen)
        return self.shop.export(directory, trained), totals

    def _parent_dir(self, parent: str | None) -> Path | None:
        if parent is None or self.parents.require(parent).role == "base":
            return None
        return self.parents.path(parent)

    def _score(self, plan: ArmPlan, params: Params, result: VersionResult) -> None:
        cfg = self.shop.cfg  # the run's: how versions are scored is frozen for the loop
        self.shop.view.phase("evaluate", plan.version)
        tag = f"{plan.version}@{result.end_step}"
        self.shop.sampler.engine.load_weights(params, tag)
        items = self.shop.pools["eval"]
        found = evaluate(self.shop.sampler, cfg, items, result.end_step)
        writer = EvidenceWriter(
            self.store.path(plan.version) / "evidence", self.shop.run, plan.version
        )
        writer.rollouts(found.trajectories, "eval")
        writer.flush("eval")
        result.scores = dict(found.scores)
        result.unscorable = found.unscorable
        finite = [s for s in found.scores.values() if math.isfinite(s)]
        if not finite:
            raise TrainingFailed(f"no sample of {plan.version} could be graded")
        result.score, result.ci95 = bootstrap_mean(
            found.scores, cfg.evolution.gate.resamples, cfg.evolution.gate.seed
        )
        result.protocol = EvalProtocol(
            "eval",
            cfg.eval.samples,
            cfg.eval.temperature,
            cfg.eval.max_new_tokens,
            cfg.eval.seed,
            items_hash([item.id for item in items]),
        )
        self.shop.view.note(
            f"{plan.version}: Avg@{cfg.eval.samples} {result.score:.3f} "
            f"[{result.ci95[0]:.3f}, {result.ci95[1]:.3f}] on {len(finite)} items"
        )
