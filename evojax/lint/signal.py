"""A probe of everything between graded rollouts and advantages, on made-up rollouts.

A tiny random model is hardly ever right, which leaves estimators and filters nothing to differ
on; here every kind of group occurs, over many steps.
"""

from __future__ import annotations

import numpy as np

from evojax.config import EvojaxConf
from evojax.evidence.types import Completion, Grade, Item, Trajectory
from evojax.grpo.filters import FilterState
from evojax.lint.trail import Trail
from evojax.rewards.base import Scored
from evojax.rewards.compose import compose
from evojax.training.seeds import stream
from evojax.training.signal import judge

STEPS, GROUPS, SAMPLES, BUDGET = 8, 12, 6, 12
_ITEM = Item("lint/1", "lint", "1+1=", "2", "train", "line", ("\n",))


def signal(conf: EvojaxConf, trail: Trail) -> None:
    """Compose rewards, apply trajectory rules, estimate advantages, filter groups; 8 steps."""
    state = FilterState()
    for step in range(STEPS):
        groups = [_group(conf, step, group) for group in range(GROUPS)]
        found = judge(groups, conf, state)
        state = found.state
        trail.mark("rewards", [[t.reward for t in group] for group in groups])
        trail.mark("advantages", found.advantages.advantages)
        trail.mark("weights of rollouts", found.advantages.weight)
        trail.mark("filter", (found.kept, found.threshold, state.to_dict()))


def _group(conf: EvojaxConf, step: int, group: int) -> list[Trajectory]:
    """Rollouts of one problem whose success rate depends on ``group``; the first are all alike."""
    rng = stream(0, "lint", step, group)
    rate = group / (GROUPS - 1)
    return [_rollout(conf, rng, rate, step, group, sample) for sample in range(SAMPLES)]


def _rollout(
    conf: EvojaxConf, rng: np.random.Generator, rate: float, step: int, group: int, sample: int
) -> Trajectory:
    length = int(rng.integers(1, BUDGET + 1))
    right = bool(rng.random() < rate)
    near = rng.random()
    text = "2" if right else ("3" if near < rate else "nothing" if near < 0.9 else "")
    grade = Grade("correct" if right else "wrong", extracted=text)
    ids = np.arange(length, dtype=np.int32)
    zeros = np.zeros(length, np.float32)
    end = "length" if length == BUDGET else "stop"
    scored = Scored(_ITEM, text, grade, length, BUDGET, conf.reward.overlong_buffer)
    reward, parts = compose(conf.reward.components, scored, conf.reward.clip)
    return Trajectory(
        item=_ITEM,
        prompt_ids=ids,
        completion=Completion(ids, zeros, zeros, end, "v001@0"),
        text=text,
        grade=grade,
        reward=reward,
        step=step,
        group=group,
        sample=sample,
        seed=0,
        components=parts,
        features={"tokens": float(length)},
    )
