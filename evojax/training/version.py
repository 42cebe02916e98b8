"""Training one version: collect -> update -> checkpoint, step by step, with exact resume.

Everything a later step depends on is either a pure function of (seed, step) or inside the
checkpoint: weights, optimizer, update counters and the items' success rates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evojax.config import EvojaxConf
from evojax.errors import InputError, TrainingFailed
from evojax.evidence.types import Item
from evojax.evidence.writer import EvidenceWriter
from evojax.grpo.pack import pack
from evojax.grpo.update import Updater
from evojax.policy.decoder import ModelConfig, Params
from evojax.report.live import LiveView
from evojax.training import checkpoint
from evojax.training.board import Board
from evojax.training.collect import Sampler, StepRollouts, collect
from evojax.training.interrupt import InterruptGuard
from evojax.training.selection import ItemStats

_FROM_UPDATE = (
    "lr",
    "loss",
    "grad_norm",
    "clip_high",
    "clip_low",
    "ratio_mean",
    "ratio_max",
    "mismatch_k1",
    "mismatch_k3",
    "mismatch_max",
)


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
    """Counters of one version's training."""

    updates: int = 0
    rollouts: int = 0
    tokens: int = 0
    skipped: int = 0
    no_live_group: int = 0
    unscorable: int = 0


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
        self, arm: Arm, start: Callable[[], Params], pool: Sequence[Item], stats: ItemStats
    ) -> tuple[Params, TrainingTotals]:
        """Run (or finish) the arm and return its weights.

        Args:
            start: loads the starting weights; not called when a checkpoint is found.
            pool: training items. stats: success rates known from the parent.

        Raises:
            Interrupted: a stop was asked for; the state is saved first.
            TrainingFailed: updates kept being non-finite.
            UnavailableError: the disk failed.
        """
        updater = Updater(self.model, self.cfg.algorithm, self.cfg.sampling.temperature)
        writer = EvidenceWriter(self.directory / "evidence", self.run, arm.version)
        state, done, totals = self._restore_or_start(updater, arm, start, stats)
        with Board(self.boards / arm.version, arm.start_step + done) as board:
            state = self._steps(updater, writer, board, arm, pool, stats, state, done, totals)
        return state["params"], totals

    def _steps(
        self,
        updater: Updater,
        writer: EvidenceWriter,
        board: Board,
        arm: Arm,
        pool: Sequence[Item],
        stats: ItemStats,
        state: dict[str, Any],
        done: int,
        totals: TrainingTotals,
    ) -> dict[str, Any]:
        while done < arm.steps:
            step = arm.start_step + done
            self.sampler.engine.load_weights(state["params"], f"{arm.version}@{step}")
            rollouts = collect(self.sampler, self.cfg, pool, stats, step)
            state, row = self._update(updater, state, rollouts, step)
            self._record(writer, rollouts, row, step)
            board.update(row)
            self._count(totals, rollouts, row)
            done += 1
            self.view.step(
                arm.version,
                done,
                arm.steps,
                row["reward_mean"],
                row["dead_groups"] / max(row["drawn_groups"], 1),
                row["tokens"] / max(row["rollout_s"] + row["update_s"], 1e-9),
            )
            last = done == arm.steps
            bad = row["nonfinite_consecutive"]
            if bad >= self.cfg.train.max_nonfinite:
                raise TrainingFailed(
                    f"{bad} updates in a row had a non-finite gradient (version {arm.version}, "
                    f"step {step}); weights are unchanged since. Lower algorithm.lr "
                    f"(now {self.cfg.algorithm.lr}) or look at the evidence in {self.directory}"
                )
            if last or done % self.cfg.train.checkpoint_every == 0 or self.guard.requested:
                self._save(state, arm, done, stats, totals)
            self.guard.check()
        return state

    def _restore_or_start(
        self, updater: Updater, arm: Arm, start: Callable[[], Params], stats: ItemStats
    ) -> tuple[dict[str, Any], int, TrainingTotals]:
        abstract = updater.abstract_state()
        found = checkpoint.restore(self.checkpoints, abstract)
        if found is None:
            return updater.init(start()), 0, TrainingTotals()
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
        return found.state, int(found.meta["done"]), TrainingTotals(**found.meta["totals"])

    def _save(
        self,
        state: dict[str, Any],
        arm: Arm,
        done: int,
        stats: ItemStats,
        totals: TrainingTotals,
    ) -> None:
        meta = {
            "version": arm.version,
            "done": done,
            "config_hash": arm.config_hash,
            "item_stats": {k: list(v) for k, v in stats.counts.items()},
            "totals": vars(totals),
        }
        checkpoint.save(self.checkpoints, arm.start_step + done, state, meta, keep=2)

    def _update(
        self, updater: Updater, state: dict[str, Any], rollouts: StepRollouts, step: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        started = time.perf_counter()
        packed = pack(
            rollouts.prompts,
            rollouts.completions,
            rollouts.advantages,
            self.cfg.train.micro_batch_groups,
        )
        metrics: dict[str, float] = {}
        for _ in range(self.cfg.algorithm.epochs if packed is not None else 1):
            state, metrics = updater.step(state, packed)
        row = self._row(rollouts, metrics, step)
        row["update_s"] = time.perf_counter() - started
        return state, row

    def _row(self, rollouts: StepRollouts, metrics: dict[str, float], step: int) -> dict[str, Any]:
        scored = [t.reward for t in rollouts.trajectories if np.isfinite(t.reward)]
        entropies = np.concatenate([t.completion.entropies for t in rollouts.trajectories])
        advantages = rollouts.advantages
        return {
            **{name: metrics[name] for name in _FROM_UPDATE},
            "step": step,
            "entropy": float(entropies.mean()),
            "reward_mean": float(np.mean(scored)) if scored else float("nan"),
            "tokens": rollouts.tokens,
            "groups": int(advantages.weight.any(axis=1).sum()),
            "live_groups": int(advantages.live.sum()),
            "dead_groups": int(advantages.dead.sum()),
            "drawn_groups": len(rollouts.groups),
            "skipped": bool(metrics["skipped"]),
            "nonfinite_consecutive": int(metrics["nonfinite_consecutive"]),
            "no_signal": int(metrics["no_signal"]),
            "rollout_s": rollouts.seconds,
            "policy_version": rollouts.completions[0][0].policy_version,
        }

    def _record(
        self, writer: EvidenceWriter, rollouts: StepRollouts, row: dict[str, Any], step: int
    ) -> None:
        for group in rollouts.groups:
            writer.rollouts(group.trajectories, "train", refill_round=group.refill_round)
        writer.update(row)
        writer.flush(f"{step:06d}")

    def _count(self, totals: TrainingTotals, rollouts: StepRollouts, row: dict[str, Any]) -> None:
        lost = [t for t in rollouts.trajectories if t.grade.status == "unscorable"]
        totals.updates += int(row["live_groups"] > 0 and not row["skipped"])
        totals.no_live_group += int(row["live_groups"] == 0)
        totals.skipped += int(row["skipped"])
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
