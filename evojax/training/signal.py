"""From the rewards of a step's groups to advantages: trajectory rules, estimator, group filter."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evojax.config import EvojaxConf, FilterConf
from evojax.evidence.types import Trajectory
from evojax.grpo.advantages import GroupAdvantages, RewardTable, estimate
from evojax.grpo.advantages.base import centred, group_std
from evojax.grpo.filters import GROUP_FILTERS, FilterRule, FilterState
from evojax.rewards.compose import contributions
from evojax.training.trajectory_rules import Facts, first_match


@dataclass(frozen=True)
class Signal:
    """What a step's groups teach.

    Args:
        advantages: of every group drawn; groups that a filter took have no weight.
        kept: bool ``[G]``: groups that carry a gradient.
        state: of the group filter, for the next step.
        threshold: reward std that the filter asked for; NaN where it has none.
        groups_filtered: live groups that the filter took.
        emptied: it took every live group.
        trajectories_filtered: rollouts left out by each rule of ``filter.trajectory``; one that
            several rules apply to counts for the first.
    """

    advantages: GroupAdvantages
    kept: np.ndarray
    state: FilterState
    threshold: float
    groups_filtered: int
    emptied: bool
    trajectories_filtered: dict[str, int]


def judge(groups: Sequence[Sequence[Trajectory]], cfg: EvojaxConf, state: FilterState) -> Signal:
    """Advantages of all groups that a step has drawn so far, and which of them to train on.

    Rollouts that a trajectory rule takes are left out of their group's statistics and of the
    loss's divisor. So are groups that the group filter takes; under a filter, or with refills,
    these include the dead ones, which otherwise stay in the divisor with an advantage of 0.

    Args:
        groups: the samples of each group. state: of the filter, as after the *previous step*,
            however many draws this step has made.
    """
    names = list(cfg.filter.trajectory)
    rules = [[first_match(names, Facts.of(t)) for t in group] for group in groups]
    table = reward_table(groups, cfg, np.array([[r is None for r in row] for row in rules]))
    result = estimate(cfg.algorithm.advantage, table, cfg.algorithm.advantage_clip)
    live = result.live
    std = group_std(centred(table.rewards, result.weight), result.weight)
    choose = GROUP_FILTERS.get(cfg.filter.group, "filter.group")
    found = choose(std, live, state, filter_rule(cfg.filter))
    stays = found.keep & live if cfg.filter.refill_rounds else found.keep
    weight = result.weight & stays[:, None]
    advantages = np.where(weight, result.advantages, 0).astype(np.float32)
    lost = int((live & ~stays).sum())
    hits = Counter(r for row in rules for r in row if r is not None)
    return Signal(
        advantages=dataclasses.replace(result, advantages=advantages, weight=weight),
        kept=live & stays,
        state=found.state,
        threshold=found.threshold,
        groups_filtered=lost,
        emptied=lost > 0 and lost == int(live.sum()),
        trajectories_filtered={name: hits[name] for name in names},
    )


def reward_table(
    groups: Sequence[Sequence[Trajectory]], cfg: EvojaxConf, include: np.ndarray
) -> RewardTable:
    """Rewards and what each component adds to them, ``[G, S]`` each.

    Args:
        include: bool ``[G, S]``, False for rollouts that a rule took.
    """
    weights = {name: weight for name, weight in cfg.reward.components.items() if weight}
    parts = [[contributions(weights, t.components) for t in group] for group in groups]
    return RewardTable(
        rewards=np.array([[t.reward for t in group] for group in groups], dtype=np.float64),
        include=include,
        components={
            name: np.array([[part[name] for part in row] for row in parts], dtype=np.float64)
            for name in weights
        },
        weights=weights,
        tolerance=cfg.algorithm.dead_tolerance,
    )


def filter_rule(conf: FilterConf) -> FilterRule:
    """The numbers that the group filters read."""
    return FilterRule(
        keep=conf.keep,
        min_std=conf.min_std,
        ema_decay=conf.ema_decay,
        ema_warmup=conf.ema_warmup,
        min_keep=conf.min_keep,
    )
