"""Stored rollouts, judged anew: rewards, trajectory rules and group filter under any recipe."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from evojax.config import EvojaxConf
from evojax.grpo.advantages.base import centred, group_std
from evojax.grpo.filters import GROUP_FILTERS, FilterState
from evojax.rewards.compose import contributions
from evojax.rewards.overlong import length_penalty
from evojax.training.signal import filter_rule
from evojax.training.trajectory_rules import TRAJECTORY_RULES, Facts, first_match

COLUMNS = (
    "split", "step", "group", "sample", "item", "task", "grade_status", "reward", "truncated",
    "components", "refill_round", "response_tokens", "features",
)  # fmt: skip
RECOMPUTED = frozenset({"overlong"})  # follows from the stored length, whatever the buffer was


@dataclass(frozen=True)
class Group:
    """One stored group: the rollouts of one problem in one step.

    Args:
        correct, truncated, scorable: ``[s]`` bool. tokens: completion lengths, int ``[s]``.
        components: one mapping a rollout, unweighted values by name. features: likewise.
        first: drawn first, not as the replacement of a group without a gradient.
    """

    item: str
    task: str
    step: int
    correct: np.ndarray
    truncated: np.ndarray
    scorable: np.ndarray
    tokens: np.ndarray
    components: tuple[dict[str, float], ...]
    features: tuple[dict[str, float], ...]
    first: bool


@dataclass(frozen=True)
class Judged:
    """What a recipe makes of one stored group.

    Args:
        rewards: float64 ``[s]``, NaN for rollouts that are unscorable or that a rule takes.
        live: the rewards are unequal. stays: the loss counts its tokens: it has two rewards or
            more, and the group filter leaves it in the batch.
    """

    rewards: np.ndarray
    live: bool
    stays: bool

    @property
    def kept(self) -> bool:
        """Whether it carries a gradient."""
        return self.live and self.stays


def read_groups(rollouts: pa.Table) -> list[Group]:
    """Groups of the train split, ordered by step and group."""
    rows = [r for r in rollouts.select(COLUMNS).to_pylist() if r["split"] == "train"]
    rows.sort(key=lambda r: (r["step"], r["group"], r["sample"]))
    by_group = itertools.groupby(rows, key=lambda r: (r["step"], r["group"]))
    return [_group(list(members)) for _, members in by_group]


def _group(rows: Sequence[Mapping[str, Any]]) -> Group:
    return Group(
        item=rows[0]["item"],
        task=rows[0]["task"],
        step=rows[0]["step"],
        correct=np.array([r["grade_status"] == "correct" for r in rows]),
        truncated=np.array([bool(r["truncated"]) for r in rows]),
        scorable=np.array([r["grade_status"] != "unscorable" for r in rows]),
        tokens=np.array([r["response_tokens"] for r in rows]),
        components=tuple(dict(r["components"] or {}) for r in rows),
        features=tuple(dict(r["features"] or {}) for r in rows),
        first=rows[0]["refill_round"] == 0,
    )


def not_stored(groups: Sequence[Group], cfg: EvojaxConf) -> list[str]:
    """Components and features that ``cfg`` needs and some stored rollout lacks."""
    values = [set(c) for g in groups for c, s in zip(g.components, g.scorable, strict=True) if s]
    have = set.intersection(*values) | RECOMPUTED if values else RECOMPUTED
    found = {name for name, weight in cfg.reward.components.items() if weight} - have
    features = set.intersection(*(set(f) for g in groups for f in g.features))
    for name in cfg.filter.trajectory:
        found |= set(TRAJECTORY_RULES.get(name, "filter.trajectory").needs) - features
    return sorted(found)


def contribution_table(group: Group, cfg: EvojaxConf) -> list[dict[str, float]]:
    """What each weighted component adds to the reward, one mapping a rollout."""
    budget, buffer = cfg.sampling.max_new_tokens, cfg.reward.overlong_buffer
    return [
        contributions(
            cfg.reward.components,
            stored | {"overlong": length_penalty(int(tokens), budget, buffer)},
        )
        for stored, tokens in zip(group.components, group.tokens, strict=True)
    ]


def rewards_of(group: Group, cfg: EvojaxConf) -> np.ndarray:
    """Rewards composed anew, float64 ``[s]``; NaN where unscorable or taken by a rule."""
    total = np.array([sum(parts.values()) for parts in contribution_table(group, cfg)], float)
    if cfg.reward.clip is not None:
        total = np.clip(total, -cfg.reward.clip, cfg.reward.clip)
    facts = zip(group.truncated, group.scorable & ~group.correct, group.features, strict=True)
    names = list(cfg.filter.trajectory)
    taken = [first_match(names, Facts(bool(t), bool(w), f)) is not None for t, w, f in facts]
    return np.where(group.scorable & ~np.array(taken), total, np.nan)


def is_live(rewards: np.ndarray, tolerance: float) -> bool:
    """Whether at least two rewards are known and they span more than ``tolerance``."""
    seen = rewards[np.isfinite(rewards)]
    return bool(seen.size >= 2 and np.ptp(seen) > tolerance)


def judge_stored(groups: Sequence[Group], cfg: EvojaxConf) -> list[Judged]:
    """What ``cfg`` makes of the stored groups, step by step, as `collect` would have.

    The group filter starts without any memory, as a version's training does.

    Args:
        groups: ordered by step. cfg: with the edits to be tried.
    """
    choose = GROUP_FILTERS.get(cfg.filter.group, "filter.group")
    rule, state = filter_rule(cfg.filter), FilterState()
    judged: list[Judged] = []
    for _, members in itertools.groupby(groups, key=lambda g: g.step):
        rewards = [rewards_of(g, cfg) for g in members]
        live = np.array([is_live(r, cfg.algorithm.dead_tolerance) for r in rewards])
        std = np.array([_std(r) for r in rewards])
        stays, state, _ = choose(std, live, state, rule)
        stays = stays & np.array([np.isfinite(r).sum() >= 2 for r in rewards])
        if cfg.filter.refill_rounds:
            stays = stays & live
        judged += [
            Judged(r, bool(a), bool(b)) for r, a, b in zip(rewards, live, stays, strict=True)
        ]
    return judged


def _std(rewards: np.ndarray) -> float:
    usable = np.isfinite(rewards)[None]
    return float(group_std(centred(rewards[None], usable), usable)[0])
