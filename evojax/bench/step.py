"""Whole training steps through the real trainer, and what each part of them took.

``VersionTrainer`` runs them: it samples with ``EmbeddedEngine``, grades, rewards, packs, updates,
writes evidence, hands the new weights to the engine and saves checkpoints; the seconds are its own,
read from the evidence. Two things are put around it: completions of a forced length, and grades by
place in the group, so that no group is dead.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from evojax.bench.shapes import Shape, shape_items
from evojax.config import DomainConf, EvojaxConf, PolicyConf
from evojax.domains.base import load_domain
from evojax.evidence.reader import load as load_evidence
from evojax.evidence.types import Completion, FinishReason, Grade, Item, Split
from evojax.grpo.advantages import RewardTable, estimate
from evojax.grpo.pack import Packed, pack
from evojax.policy.load import Policy
from evojax.report.live import LiveView
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine
from evojax.training.collect import Sampler
from evojax.training.interrupt import InterruptGuard
from evojax.training.selection import ItemStats
from evojax.training.version import Arm, VersionTrainer

PARTS = ("rollout_s", "reward_s", "update_s", "sync_s")


@dataclass(frozen=True)
class StepGroup:
    """One group of a step: prompt ids, completions, rewards ``[S]``, the prompt as text."""

    prompt: np.ndarray
    completions: list[Completion]
    rewards: list[float]
    text: str


@dataclass(frozen=True)
class Step:
    """One training step.

    Args:
        row: of the ``updates`` table; its ``*_s`` are seconds.
        groups: what was trained on. natural_live_share: groups with unequal rewards under the
            task's own grades, whatever the grades were that trained.
    """

    row: dict[str, Any]
    groups: list[StepGroup] = field(repr=False)
    natural_live_share: float

    @property
    def seconds(self) -> float:
        """Of the step; evidence and checkpoints, written beside it, are not in it."""
        return sum(self.row[name] for name in PARTS)

    @property
    def live_share(self) -> float:
        """Groups with unequal rewards, as trained on."""
        return self.row["live_groups"] / self.row["drawn_groups"]

    def repacked(self, conf: EvojaxConf) -> Packed | None:
        """The batch as the update saw it; None when no group was live."""
        rewards = np.array([group.rewards for group in self.groups])
        algorithm = conf.algorithm
        return pack(
            [group.prompt for group in self.groups],
            [group.completions for group in self.groups],
            estimate(algorithm.advantage, RewardTable(rewards, algorithm.dead_tolerance)),
            conf.train.micro_batch_groups,
            aggregation=algorithm.aggregation,
            horizon=conf.sampling.max_new_tokens,
        )


class FullLength:
    """The engine without stop tokens: every completion uses up its budget."""

    def __init__(self, engine: EmbeddedEngine):
        self.engine = engine

    def generate(
        self,
        token_prompts: Sequence[np.ndarray],
        sampling: SamplingParams,
        n: int,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """See ``Engine``."""
        unstopped = dataclasses.replace(sampling, stop_token_ids=())
        return self.engine.generate(token_prompts, unstopped, n, seeds)

    def load_weights(self, params: Any, version: str) -> None:
        """See ``Engine``."""
        self.engine.load_weights(params, version)

    def health(self) -> dict[str, Any]:
        """See ``Engine``."""
        return self.engine.health()


class GradedDomain:
    """The math domain with its grades watched.

    Args:
        shape: names the tasks. live: grade by place in the group, right and wrong in turn, so that
            every group is live whatever was sampled; the task's own grades are only remembered.
    """

    def __init__(self, shape: Shape, live: bool):
        self.domain = load_domain(DomainConf(tasks=list(shape.tasks)))
        self.live = live
        self.natural: list[Grade] = []

    def grade(
        self, items: Sequence[Item], texts: Sequence[str], finish_reasons: Sequence[FinishReason]
    ) -> list[Grade]:
        """See ``Domain``."""
        grades = self.domain.grade(items, texts, finish_reasons)
        self.natural += grades
        if not self.live:
            return grades
        return [Grade("wrong" if i % 2 else "correct") for i in range(len(grades))]

    def items(self, split: Split) -> list[Item]:
        """See ``Domain``."""
        return self.domain.items(split)

    def features(self, item: Item, text: str, completion_tokens: int) -> dict[str, float]:
        """See ``Domain``."""
        return self.domain.features(item, text, completion_tokens)

    def describe(self) -> dict[str, Any]:
        """See ``Domain``."""
        return self.domain.describe()

    def close(self) -> None:
        """See ``Domain``."""
        self.domain.close()


def step_conf(shape: Shape, policy: PolicyConf, steps: int) -> EvojaxConf:
    """The main job's configuration with the shape's sizes.

    The distance from the starting weights, a forward pass of its own, is measured on the last step
    only, and a checkpoint is saved after it.
    """
    conf = EvojaxConf(experiment=f"bench_{shape.name}", policy=policy, live=False)
    conf.domain.tasks = list(shape.tasks)
    conf.sampling.group_size = shape.samples
    conf.sampling.max_new_tokens = shape.new
    conf.algorithm.kl_every = steps
    conf.train.steps = steps
    conf.train.prompts_per_step = shape.prompts
    conf.train.micro_batch_groups = shape.micro_batch_groups
    conf.train.checkpoint_every = steps
    return conf


def run_steps(policy: Policy, shape: Shape, conf: EvojaxConf, *, live: bool) -> list[Step]:
    """Train ``conf.train.steps`` steps on ``shape_items``; the first one compiles.

    Args:
        live: every group is live (the worst case); False: the task's own grades.
    """
    embedded = EmbeddedEngine(policy.cfg, policy.tokenizer.pad_id, conf.rollout.max_batch)
    engine = FullLength(embedded) if shape.forced else embedded
    domain = GradedDomain(shape, live)
    arm = Arm("v001", 0, conf.train.steps, "bench")
    with tempfile.TemporaryDirectory(prefix="evojax-bench-") as scratch:
        directory = Path(scratch) / "versions" / arm.version
        view = LiveView(False, arm.steps, Console(stderr=True))
        sampler = Sampler(engine, domain, policy.tokenizer)
        trainer = VersionTrainer(
            policy.cfg, sampler, conf, directory, "bench", view, InterruptGuard()
        )
        items = shape_items(shape, policy.tokenizer)
        trainer.train(arm, lambda: policy.params, items, ItemStats())
        evidence = load_evidence(directory)
    domain.close()
    rows = sorted(evidence.updates().to_pylist(), key=lambda row: row["step"])
    groups = _groups(evidence.rollouts("train").to_pylist())
    natural = _live_shares([g.status == "correct" for g in domain.natural], shape)
    return [Step(row, groups[row["step"]], natural[row["step"]]) for row in rows]


def _groups(rollouts: list[dict[str, Any]]) -> dict[int, list[StepGroup]]:
    """Rollout rows as groups by step."""
    members: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in sorted(rollouts, key=lambda r: (r["step"], r["group"], r["sample"])):
        members.setdefault((row["step"], row["group"]), []).append(row)
    found: dict[int, list[StepGroup]] = {}
    for (step, _), rows in members.items():
        size = rows[0]["prompt_tokens"]
        found.setdefault(step, []).append(
            StepGroup(
                prompt=np.array(rows[0]["token_ids"][:size], np.int32),
                completions=[_completion(row) for row in rows],
                rewards=[row["reward"] for row in rows],
                text=rows[0]["prompt"],
            )
        )
    return found


def _completion(row: dict[str, Any]) -> Completion:
    return Completion(
        np.array(row["token_ids"][row["prompt_tokens"] :], np.int32),
        np.array(row["rollout_logprobs"], np.float32),
        np.array(row["entropies"], np.float32),
        row["stop_reason"],
        row["policy_version"],
    )


def _live_shares(correct: Sequence[bool], shape: Shape) -> list[float]:
    table = np.array(correct).reshape(-1, shape.prompts, shape.samples)
    return (table.any(axis=2) & ~table.all(axis=2)).mean(axis=1).tolist()
