"""What a change would have done to rollouts that are stored already. Pure and deterministic.

Rewards are composed anew from the stored components; trajectory rules and group filters judge them
as they would have in training; refills and item weights are worked out in expectation. What cannot
be replayed (temperature, learning rate, epochs) is said to be so: a backtest is evidence for a
change, not a trial of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from evojax.config import DataConf, EvojaxConf
from evojax.evidence.types import Item
from evojax.evolution.intervention import Intervention
from evojax.evolution.stored_groups import (
    Group,
    Judged,
    contribution_table,
    judge_stored,
    not_stored,
    read_groups,
)
from evojax.training.selection import ItemStats, selection_weights

MAX_LIVE_LOSS = 0.2  # a change may not cost more than this share of the live groups
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class BacktestResult:
    """What the replay found.

    Args:
        replayable: false when stored rollouts say nothing about the change.
        groups: stored groups replayed; live_before, live_after: those that carry a gradient, i.e.
            have unequal rewards and pass the filter (``live_after`` is an expectation for refills
            and item weights).
        revived, killed: groups that became live, or stopped being so.
        sign_flips: rollouts whose advantage changed its sign.
        extra_rollouts: cost of refills, as a share of the rollouts drawn.
        variance_share: each component's share of the within-group reward variance.
        violations: groups in which a wrong rollout would outrank a right one.
        gain: change of the live share of the batch: for rewards, rules, refills and item weights
            of the groups drawn, for a group filter of those it leaves in the loss.
        metric_before, metric_after: the predicted metric, when it can be replayed.
        refusals: why the change may not be trained; empty when it may.
    """

    replayable: bool
    words: str
    groups: int = 0
    live_before: float = 0.0
    live_after: float = 0.0
    revived: int = 0
    killed: int = 0
    sign_flips: int = 0
    extra_rollouts: float = 0.0
    variance_share: dict[str, float] = field(default_factory=dict)
    violations: int = 0
    gain: float = 0.0
    metric: str = ""
    metric_before: float | None = None
    metric_after: float | None = None
    refusals: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        return bool(self.refusals)


def backtest(intervention: Intervention, rollouts: pa.Table, cfg: EvojaxConf) -> BacktestResult:
    """Replay the stored training rollouts of the parent under the intervention.

    Args:
        rollouts: the evidence's ``rollouts`` table (any splits; train is used).
        cfg: the parent's configuration.
    """
    groups = read_groups(rollouts)
    if not groups:
        return BacktestResult(False, "No training rollouts are stored, nothing can be replayed.")
    keys = set(intervention.edits)
    for matches, replay in _REPLAYS:
        if any(matches(key) for key in keys):
            result = _with_refusals(replay(intervention, groups, cfg), intervention, cfg)
            rest = sorted(key for key in keys if not matches(key))
            note = f" Not replayed: {', '.join(rest)}." if rest else ""
            return dataclasses.replace(result, words=result.words + note)
    words = (
        f"{', '.join(sorted(keys))} acts on sampling or on the update itself: stored rollouts "
        f"cannot show its effect. {len(groups)} groups are stored, "
        f"{sum(j.kept for j in judge_stored(groups, cfg))} of them with a gradient."
    )
    return BacktestResult(False, words, len(groups))


def _advantage_signs(rewards: np.ndarray) -> np.ndarray:
    if not np.isfinite(rewards).any():
        return np.zeros(rewards.shape)
    centred = np.nan_to_num(rewards - np.nanmean(rewards))
    return np.where(np.abs(centred) > _TOLERANCE, np.sign(centred), 0.0)


def _replay_judgement(
    intervention: Intervention, groups: list[Group], cfg: EvojaxConf
) -> BacktestResult:
    """Rewards, trajectory rules and group filter, before and after, over the stored groups."""
    after = edited(cfg, intervention.edits)
    if absent := not_stored(groups, after):
        words = f"The stored rollouts hold no value of {', '.join(absent)}: not replayable."
        return BacktestResult(False, words, len(groups))
    old, new = judge_stored(groups, cfg), judge_stored(groups, after)
    was, now = np.array([j.kept for j in old]), np.array([j.kept for j in new])
    flips = sum(
        int(np.sum(_advantage_signs(a.rewards) * _advantage_signs(b.rewards) < 0))
        for a, b in zip(old, new, strict=True)
    )
    violations = sum(_outranked(g, j.rewards) for g, j in zip(groups, new, strict=True))
    revived, killed = int(np.sum(now & ~was)), int(np.sum(was & ~now))
    words = (
        f"Of {len(groups)} stored groups {was.sum()} carried a gradient and {now.sum()} would: "
        f"{revived} revived, {killed} lost. {flips} advantages would change their sign. In "
        f"{violations} groups a wrong rollout would outrank a right one."
    )
    shares: dict[str, float] = {}
    if any(key.startswith("reward.") for key in intervention.edits):
        shares = _variance_shares(groups, after)
        listed = ", ".join(f"{k} {v:.0%}" for k, v in sorted(shares.items()))
        words += f" Within-group variance: {listed}."
    gain = float(now.mean() - was.mean())
    if any(key in _GROUP_FILTER for key in intervention.edits):
        gain = _live_share(new) - _live_share(old)
    metric = intervention.predicts.metric
    return BacktestResult(
        True, words, len(groups), int(was.sum()), int(now.sum()), revived, killed, flips,
        variance_share=shares, violations=violations, gain=gain, metric=metric,
        metric_before=_dead_metric(metric, groups, old),
        metric_after=_dead_metric(metric, groups, new),
    )  # fmt: skip


def _live_share(judged: Sequence[Judged]) -> float:
    """Share of the groups in the batch that carry a gradient; 0 for an empty batch."""
    return sum(j.kept for j in judged) / max(sum(j.stays for j in judged), 1)


def _outranked(group: Group, rewards: np.ndarray) -> bool:
    seen = np.isfinite(rewards)
    right, wrong = rewards[seen & group.correct], rewards[seen & ~group.correct]
    return bool(right.size and wrong.size and wrong.max() > right.min() + _TOLERANCE)


def _dead_metric(metric: str, groups: list[Group], judged: Sequence[Judged]) -> float | None:
    """The dead-group metrics, the only predicted ones that a replay decides."""
    dead = np.array([not j.live for j in judged])
    right = np.array([bool(g.correct[g.scorable].all()) for g in groups])
    wrong = np.array([not g.correct[g.scorable].any() for g in groups])
    stays = np.array([j.stays for j in judged])
    masks = {
        "dead_group_share": dead,
        "update_dead_share": dead[stays] if stays.any() else np.zeros(1),
        "dead_all_wrong_share": dead & wrong,
        "dead_all_correct_share": dead & right,
    }
    return float(masks[metric].mean()) if metric in masks else None


def _variance_shares(groups: list[Group], cfg: EvojaxConf) -> dict[str, float]:
    """Share of each weighted component in the sum of their within-group variances."""
    sums: dict[str, float] = {}
    for group in groups:
        parts = contribution_table(group, cfg)
        for name in parts[0]:
            values = np.array([part[name] for part in parts])[group.scorable]
            sums[name] = sums.get(name, 0.0) + (float(values.var()) if values.size else 0.0)
    total = sum(sums.values())
    return {name: v / total for name, v in sums.items()} if total > 0 else {}


def _replay_refill(
    intervention: Intervention, groups: list[Group], cfg: EvojaxConf
) -> BacktestResult:
    """With a lost share d, r rounds leave d^(r+1) lost and cost d + ... + d^r in extra rollouts.

    Lost are groups that carry no gradient: dead ones, and those that the group filter takes.
    """
    judged = judge_stored(groups, cfg)
    first = [j for g, j in zip(groups, judged, strict=True) if g.first]
    dead = 1.0 - float(np.mean([j.kept for j in first]))
    rounds = int(intervention.edits["filter.refill_rounds"])
    now = cfg.filter.refill_rounds
    left, left_now = dead ** (rounds + 1), dead ** (now + 1)
    extra = sum(dead**k for k in range(1, rounds + 1)) - sum(dead**k for k in range(1, now + 1))
    count = len(first)
    words = (
        f"Of {count} groups drawn first {dead:.0%} had no gradient. With {rounds} refill rounds "
        f"{left:.0%} of a batch is expected to stay so, {left_now:.0%} with the present {now}, "
        f"for {extra:+.0%} rollouts."
    )
    predicts = intervention.predicts.metric == "update_dead_share"
    return BacktestResult(
        True, words, count, count * (1 - left_now), count * (1 - left), extra_rollouts=extra,
        gain=left_now - left, metric=intervention.predicts.metric,
        metric_before=left_now if predicts else None, metric_after=left if predicts else None,
    )  # fmt: skip


def _replay_selection(
    intervention: Intervention, groups: list[Group], cfg: EvojaxConf
) -> BacktestResult:
    """Expected live share sum_i w_i (1 - p_i^G - (1 - p_i)^G) under the old and new weights."""
    stats, tasks = ItemStats(), {}
    for group in groups:
        right, seen = int((group.correct & group.scorable).sum()), int(group.scorable.sum())
        stats.add(group.item, right, seen)
        tasks[group.item] = group.task
    items = [
        Item(id=i, task=tasks[i], prompt="", answer="", split="train", grader="")
        for i in sorted(tasks)
    ]
    rates = stats.task_rates(items)
    p = np.array([stats.rate(item, rates) for item in items])
    size = cfg.sampling.group_size
    chance = 1.0 - p**size - (1.0 - p) ** size
    now, then = (
        _weights(cfg.data, items, stats),
        _weights(edited(cfg, intervention.edits).data, items, stats),
    )
    before, after = float(now @ chance), float(then @ chance)
    reach = 1.0 / float(np.sum(then**2))
    words = (
        f"Over {len(items)} problems seen, the expected live share of a group goes from "
        f"{before:.0%} to {after:.0%}; the new weights are as even as {reach:.0f} equal problems."
    )
    dead = intervention.predicts.metric == "dead_group_share"
    return BacktestResult(
        True, words, len(groups), before * len(groups), after * len(groups), gain=after - before,
        metric=intervention.predicts.metric, metric_before=1 - before if dead else None,
        metric_after=1 - after if dead else None,
    )  # fmt: skip


def _weights(conf: DataConf, items: list[Item], stats: ItemStats) -> np.ndarray:
    if conf.selection == "difficulty":
        return selection_weights(items, stats, conf)
    return np.full(len(items), 1.0 / len(items))


def edited(cfg: EvojaxConf, edits: Mapping[str, Any]) -> EvojaxConf:
    """A copy of ``cfg`` with each dotted key set to its value."""
    copy = deepcopy(cfg)
    for key, value in edits.items():
        *path, leaf = key.split(".")
        node: Any = copy
        for part in path:
            node = getattr(node, part)
        if isinstance(node, dict):
            node[leaf] = value
        else:
            setattr(node, leaf, value)
    return copy


def _with_refusals(
    result: BacktestResult, intervention: Intervention, cfg: EvojaxConf
) -> BacktestResult:
    if not result.replayable:
        return result
    reasons = []
    if result.violations:
        reasons.append(f"a wrong rollout would outrank a right one in {result.violations} groups")
    if result.live_after < (1 - MAX_LIVE_LOSS) * result.live_before:
        reasons.append(f"more than {MAX_LIVE_LOSS:.0%} of the live groups would be lost")
    if result.gain < cfg.evolution.min_backtest_gain:
        reasons.append(
            f"the live share would change by {result.gain:+.3f}, at least "
            f"{cfg.evolution.min_backtest_gain:+.3f} is asked for"
        )
    before, after = result.metric_before, result.metric_after
    if before is not None and after is not None:
        up = intervention.predicts.direction == "up"
        if (after < before - _TOLERANCE) if up else (after > before + _TOLERANCE):
            reasons.append(
                f"{result.metric} would go from {before:.3f} to {after:.3f}, against the prediction"
            )
    return dataclasses.replace(result, refusals=tuple(reasons))


_Replay = Callable[[Intervention, list[Group], EvojaxConf], BacktestResult]
_GROUP_FILTER = frozenset(
    f"filter.{key}" for key in ("group", "keep", "min_std", "ema_decay", "ema_warmup", "min_keep")
)
_REPLAYS: tuple[tuple[Callable[[str], bool], _Replay], ...] = (
    (
        lambda key: key.startswith("reward.") or key == "filter.trajectory" or key in _GROUP_FILTER,
        _replay_judgement,
    ),
    (lambda key: key == "filter.refill_rounds", _replay_refill),
    (lambda key: key.startswith("data."), _replay_selection),
)
