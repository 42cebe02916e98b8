"""Training one version: collect -> update -> checkpoint, step by step, with exact resume.

Everything a later step depends on is either a pure function of (seed, step), or the starting
weights, or inside the checkpoint: weights, optimizer, update counters, the items' success rates
and what the group filter remembers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evojax.config import EvojaxConf
from evojax.errors import InputError, TrainingFailed
from evojax.evidence.types import Item
from evojax.evidence.writer import EvidenceWriter
from evojax.grpo.filters import FilterState
from evojax.grpo.update import Updater
from evojax.policy.decoder import ModelConfig, Params
from evojax.report.live import LiveView
from evojax.training import crew
from evojax.training.board import Board
from evojax.training.collect import Sampler, StepRollouts, collect
from evojax.training.interrupt import InterruptGuard
from evojax.training.row import update_row, weights_tag
from evojax.training.selection import ItemStats
from evojax.training.steps import BatchUpdate, measures_kl


@dataclass(frozen=True)
class Arm:
    """What is trained, and from where.

    Args:
        version: identifier, e.g. ``v002``. start_step: updates behind the starting weights.
        steps: updates to make. config_hash: of the composed configuration, kept with the result.
    """

    version: str
    start_step: int
    steps: int
    config_hash: str


@dataclass
class TrainingTotals:
    """Counters of one version's training; ``updates`` are steps that changed the weights."""

    updates: int = 0
    optimizer_steps: int = 0
    rollouts: int = 0
    tokens: int = 0
    skipped: int = 0
    no_live_group: int = 0
    unscorable: int = 0


@dataclass
class _Progress:
    """How far a version has come: all that a checkpoint holds."""

    state: dict[str, Any]
    stats: ItemStats
    done: int = 0
    filter_state: FilterState = field(default_factory=FilterState)
    totals: TrainingTotals = field(default_factory=TrainingTotals)


class VersionTrainer:
    """Trains one arm in its version directory.

    Args:
        model: shape of the policy. sampler: engine, domain and tokenizer.
        cfg: the arm's own composed configuration. directory: ``versions/<id>`` of the run.
        run: name of the run, stored with every row.
    """

    def __init__(
        self,
        model: ModelConfig,
        sampler: Sampler,
        cfg: EvojaxConf,
        directory: Path,
        run: str,
        view: LiveView,
        guard: InterruptGuard,
    ):
        self.model = model
        self.sampler = sampler
        self.cfg = cfg
        self.directory = directory
        self.view = view
        self.guard = guard
        self.run = run
        self.checkpoints = directory / "checkpoint"
        self.boards = directory.parent.parent / "tensorboard"

    def train(
        self,
        arm: Arm,
        start: Callable[[], Params],
        pool: Sequence[Item],
        stats: ItemStats,
        frozen: Params | None = None,
    ) -> tuple[Params, TrainingTotals]:
        """Run (or finish) the arm and return what was trained: its weights, or its adapters.

        Args:
            start: loads what training starts from; the KL is measured to that, too, so a resumed
                run loads it again.
            pool: training items. stats: success rates known from the parent.
            frozen: the weights that adapters change (``policy.lora``); None without.

        Raises:
            Interrupted: a stop was asked for; the state is saved first.
            TrainingFailed: updates kept being non-finite.
            UnavailableError: the disk failed.
        """
        updater = crew.make_updater(
            self.model,
            self.cfg.algorithm,
            self.cfg.sampling.temperature,
            self.cfg.hardware.mesh,
            self.cfg.policy.lora,
        )
        if frozen is not None:
            updater.freeze(frozen)
        first = start()
        updater.reference(first)
        writer = EvidenceWriter(self.directory / "evidence", self.run, arm.version)
        progress = self._restored(updater, arm, stats)
        if progress is None:
            progress = _Progress(updater.init(first), stats)
        batches = BatchUpdate(updater, self.cfg)
        with Board(self.boards / arm.version, arm.start_step + progress.done) as board:
            while progress.done < arm.steps:
                row = self._step(batches, writer, arm, pool, progress)
                board.update(row)
                self.guard.check()
        return updater.trained(progress.state), progress.totals

    def _step(
        self,
        batches: BatchUpdate,
        writer: EvidenceWriter,
        arm: Arm,
        pool: Sequence[Item],
        progress: _Progress,
    ) -> dict[str, Any]:
        """One step: the evidence is written before the checkpoint that makes it count."""
        step = arm.start_step + progress.done
        began = time.perf_counter()
        tag = weights_tag(arm.version, step)
        self.sampler.engine.load_weights(batches.updater.weights(progress.state), tag)
        seconds = {"sync_s": time.perf_counter() - began}
        rollouts = collect(
            self.sampler, self.cfg, pool, progress.stats, step, progress.filter_state
        )
        began = time.perf_counter()
        measure_kl = measures_kl(self.cfg.algorithm, progress.done, arm.steps)
        progress.state, metrics = batches.run(progress.state, rollouts, step, measure_kl)
        seconds["update_s"] = time.perf_counter() - began
        row = update_row(rollouts, metrics, seconds, step)
        self._record(writer, rollouts, row, step)
        progress.filter_state = rollouts.filter_state
        progress.done += 1
        _count(progress.totals, rollouts, row)
        self._show(arm, progress.done, row)
        self._refuse_nonfinite(arm, row)
        due = progress.done % self.cfg.train.checkpoint_every == 0
        if due or progress.done == arm.steps or self.guard.requested:
            began = time.perf_counter()
            self._save(arm, progress)
            row["checkpoint_s"] = time.perf_counter() - began
            self._record(writer, rollouts, row, step)
        return row

    def _show(self, arm: Arm, done: int, row: dict[str, Any]) -> None:
        spent = sum(row[name] for name in ("sync_s", "rollout_s", "reward_s", "update_s"))
        self.view.step(
            arm.version,
            done,
            arm.steps,
            row["reward_mean"],
            row["dead_groups"] / max(row["drawn_groups"], 1),
            row["tokens"] / max(spent, 1e-9),
        )

    def _refuse_nonfinite(self, arm: Arm, row: dict[str, Any]) -> None:
        bad = row["nonfinite_consecutive"]
        if bad >= self.cfg.train.max_nonfinite:
            raise TrainingFailed(
                f"{bad} updates in a row had a non-finite gradient (version {arm.version}, "
                f"step {row['step']}); weights are unchanged since. Lower algorithm.lr "
                f"(now {self.cfg.algorithm.lr}) or look at the evidence in {self.directory}"
            )

    def _restored(self, updater: Updater, arm: Arm, stats: ItemStats) -> _Progress | None:
        """Where the newest checkpoint stands, or None without one."""
        found = crew.restore(self.checkpoints, updater)
        if found is None:
            return None
        for warning in found.warnings:
            self.view.note(f"checkpoint: {warning}")
        if found.meta["config_hash"] != arm.config_hash:
            raise InputError.one(
                "the checkpoint belongs to another configuration than the version's commit",
                str(self.checkpoints),
                found.meta["config_hash"][:12],
                f"move it away to train {arm.version} ({arm.config_hash[:12]}) anew",
            )
        stats.counts = {k: (v[0], v[1]) for k, v in found.meta["item_stats"].items()}
        self.view.note(f"{arm.version}: going on after update {found.meta['done']}")
        return _Progress(
            state=found.state,
            stats=stats,
            done=int(found.meta["done"]),
            filter_state=FilterState.from_dict(found.meta["filter_state"]),
            totals=TrainingTotals(**found.meta["totals"]),
        )

    def _save(self, arm: Arm, progress: _Progress) -> None:
        meta = {
            "version": arm.version,
            "done": progress.done,
            "config_hash": arm.config_hash,
            "item_stats": {k: list(v) for k, v in progress.stats.counts.items()},
            "filter_state": progress.filter_state.to_dict(),
            "totals": vars(progress.totals),
        }
        step = arm.start_step + progress.done
        crew.save(self.checkpoints, step, progress.state, meta)

    def _record(
        self, writer: EvidenceWriter, rollouts: StepRollouts, row: dict[str, Any], step: int
    ) -> None:
        """Write the step's part of the evidence; a second time replaces it."""
        for group in rollouts.groups:
            writer.rollouts(group.trajectories, "train", refill_round=group.refill_round)
        writer.update(row)
        writer.flush(f"{step:06d}")


def _count(totals: TrainingTotals, rollouts: StepRollouts, row: dict[str, Any]) -> None:
    lost = [t for t in rollouts.trajectories if t.grade.status == "unscorable"]
    totals.updates += int(row["optimizer_steps"] > 0)
    totals.optimizer_steps += row["optimizer_steps"]
    totals.no_live_group += int(row["live_groups"] == 0)
    totals.skipped += row["skipped_steps"]
    totals.rollouts += len(rollouts.trajectories)
    totals.tokens += rollouts.tokens
    totals.unscorable += len(lost)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote.

    Raises:
        InputError: the file is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError.one(
            f"the file is damaged ({error})", "resume", str(path), "restore it from a copy"
        ) from error
