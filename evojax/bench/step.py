"""Whole training steps through the real trainer, taken apart into their seconds.

``VersionTrainer`` runs them: it samples with ``EmbeddedEngine``, grades, rewards, packs, updates,
writes evidence and hands the new weights to the engine. Only two things are put around it: a
clock around the engine's calls, and grades by place in the group, so that no group is dead.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from evojax.bench.shapes import Shape, shape_items
from evojax.config import DomainConf, EvojaxConf, PolicyConf
from evojax.domains.math.domain import MathDomain
from evojax.evidence.reader import load as load_evidence
from evojax.evidence.types import Completion, FinishReason, Grade, Item
from evojax.policy.load import Policy
from evojax.report.live import LiveView
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine
from evojax.training.collect import Sampler
from evojax.training.interrupt import InterruptGuard
from evojax.training.selection import ItemStats
from evojax.training.version import Arm, VersionTrainer


@dataclass
class StepTimes:
    """One training step.

    Args:
        rollout_s: sampling. reward_s: grading, rewards, advantages, filters. update_s: packing and
            optimizer. sync_s: handing the weights to the engine. All seconds.
        response_tokens, useful_tokens: sampled, and those of them with a non-zero advantage.
        live_share: groups with unequal rewards. natural_live_share: the same under the task's own
            grades.
        groups: per group its prompt, completions and rewards, as trained on.
    """

    rollout_s: float
    reward_s: float
    update_s: float
    sync_s: float
    response_tokens: int
    useful_tokens: int
    live_share: float
    natural_live_share: float
    groups: list[StepGroup] = field(repr=False)

    @property
    def step_s(self) -> float:
        """Seconds of the step; evidence and checkpoints, written beside it, are not in it."""
        return self.rollout_s + self.reward_s + self.update_s + self.sync_s


@dataclass(frozen=True)
class StepGroup:
    """One group of a step: prompt ids, completions, rewards ``[S]``, the prompt as text."""

    prompt: np.ndarray
    completions: list[Completion]
    rewards: list[float]
    text: str


class TimedEngine:
    """The engine with a clock around each call.

    Args:
        engine: the real one. forced: no token ends a completion, all have their full length.
    """

    def __init__(self, engine: EmbeddedEngine, forced: bool):
        self.engine = engine
        self.forced = forced
        self.sync_s: list[float] = []
        self.generate_s: list[float] = []

    def load_weights(self, params: Any, version: str) -> None:
        """See ``Engine``; begins a new step."""
        began = time.perf_counter()
        self.engine.load_weights(params, version)
        self.sync_s.append(time.perf_counter() - began)
        self.generate_s.append(0.0)

    def generate(
        self,
        token_prompts: Sequence[np.ndarray],
        sampling: SamplingParams,
        n: int,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """See ``Engine``."""
        if self.forced:
            sampling = dataclasses.replace(sampling, stop_token_ids=())
        began = time.perf_counter()
        out = self.engine.generate(token_prompts, sampling, n, seeds)
        self.generate_s[-1] += time.perf_counter() - began
        return out

    def health(self) -> dict[str, Any]:
        """See ``Engine``."""
        return self.engine.health()


class GradedDomain(MathDomain):
    """The math domain, remembering its grades.

    Args:
        shape: names the tasks. live: grade by place in the group, right and wrong in turn, so that
            every group is live whatever was sampled; the task's own grades are only remembered.
    """

    def __init__(self, shape: Shape, live: bool):
        super().__init__(DomainConf(tasks=list(shape.tasks)))
        self.live = live
        self.natural: list[Grade] = []

    def grade(
        self, items: Sequence[Item], texts: Sequence[str], finish_reasons: Sequence[FinishReason]
    ) -> list[Grade]:
        """See ``Domain``."""
        grades = super().grade(items, texts, finish_reasons)
        self.natural += grades
        if not self.live:
            return grades
        return [Grade("wrong" if i % 2 else "correct") for i in range(len(grades))]


def step_conf(shape: Shape, policy: PolicyConf, steps: int, micro_batch_groups: int) -> EvojaxConf:
    """The main job's configuration with the shape's sizes."""
    conf = EvojaxConf(experiment=f"bench_{shape.name}", policy=policy, live=False)
    conf.domain.tasks = list(shape.tasks)
    conf.sampling.group_size = shape.samples
    conf.sampling.max_new_tokens = shape.new
    conf.train.steps = steps
    conf.train.prompts_per_step = shape.prompts
    conf.train.micro_batch_groups = micro_batch_groups
    conf.train.checkpoint_every = steps
    return conf


def run_steps(
    policy: Policy,
    shape: Shape,
    conf: EvojaxConf,
    *,
    live: bool,
    pool: Sequence[Item] | None = None,
) -> list[StepTimes]:
    """Train ``conf.train.steps`` steps and take their times; the first ones compile.

    Args:
        live: every group is live (the worst case); False: the task's own grades.
        pool: training items; ``shape_items`` by default.
    """
    items = list(pool) if pool is not None else shape_items(shape, policy.tokenizer)
    engine = TimedEngine(
        EmbeddedEngine(policy.cfg, policy.tokenizer.pad_id, conf.rollout.max_batch), shape.forced
    )
    domain = GradedDomain(shape, live)
    arm = Arm("v001", 0, conf.train.steps, "bench")
    with tempfile.TemporaryDirectory(prefix="evojax-bench-") as scratch:
        directory = Path(scratch) / "versions" / arm.version
        view = LiveView(False, arm.steps, Console(quiet=True))
        trainer = VersionTrainer(
            policy.cfg, Sampler(engine, domain, policy.tokenizer), conf, directory, "bench", view,
            InterruptGuard(),
        )  # fmt: skip
        trainer.train(arm, lambda: policy.params, items, ItemStats())
        evidence = load_evidence(directory)
    domain.close()
    rows = sorted(evidence.updates().to_pylist(), key=lambda row: row["step"])
    groups = _groups(evidence.rollouts("train").to_pylist())
    natural = _live_shares([g.status == "correct" for g in domain.natural], shape)
    return [
        _times(row, groups[row["step"]], engine.sync_s[i], engine.generate_s[i], natural[i])
        for i, row in enumerate(rows)
    ]


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


def _times(
    row: dict[str, Any], groups: list[StepGroup], sync: float, generate: float, natural: float
) -> StepTimes:
    lengths = [sum(len(c.token_ids) for c in g.completions) for g in groups]
    live = [max(g.rewards) > min(g.rewards) for g in groups]
    return StepTimes(
        rollout_s=generate,
        reward_s=row["rollout_s"] - generate,
        update_s=row["update_s"],
        sync_s=sync,
        response_tokens=sum(lengths),
        useful_tokens=sum(n for n, alive in zip(lengths, live, strict=True) if alive),
        live_share=sum(live) / len(live),
        natural_live_share=natural,
        groups=groups,
    )


def peak_rss_gb() -> float:
    """Largest resident memory of this process so far, GB (10^9 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
