"""What a change would have done to rollouts that are stored already. Pure and deterministic.

Rewards are composed anew from the stored components, refills and item weights are worked out in
expectation. What cannot be replayed (temperature, learning rate, epochs) is said to be so: a
backtest is evidence for a change, not a trial of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from evojax.config import DataConf, EvojaxConf
from evojax.evidence.types import Item
from evojax.evolution.intervention import Intervention
from evojax.training.selection import ItemStats, selection_weights

MAX_LIVE_LOSS = 0.2  # a change may not cost more than this share of the live groups
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Group:
    """One stored group: the rollouts of one problem in one step.

    Args:
        reward: float64 ``[s]`` as composed at the time, NaN when unscorable.
        correct: ``[s]`` bool. truncated: ``[s]`` bool. scorable: ``[s]`` bool.
        components: one mapping a rollout, unweighted values by name.
        first: drawn first, not as the replacement of a dead group.
    """

    item: str
    task: str
    reward: np.ndarray
    correct: np.ndarray
    truncated: np.ndarray
    scorable: np.ndarray
    components: tuple[dict[str, float], ...]
    first: bool


@dataclass(frozen=True)
class BacktestResult:
    """What the replay found.

    Args:
        replayable: false when stored rollouts say nothing about the change.
        groups: stored groups replayed; live_before, live_after: those with unequal rewards
            (``live_after`` is an expectation for refills and item weights).
        revived, killed: groups that became live, or stopped being so.
        sign_flips: rollouts whose advantage changed its sign.
        extra_rollouts: cost of refills, as a share of the rollouts drawn.
        variance_share: each component's share of the within-group reward variance.
        violations: groups in which a wrong rollout would outrank a right one.
        gain: change of the live share of the batch.
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
        f"{sum(_live(g.reward, cfg) for g in groups)} of them live."
    )
    return BacktestResult(False, words, len(groups))


def read_groups(rollouts: pa.Table) -> list[Group]:
    """Groups of the train split, ordered by step and group."""
    wanted = ("split", "step", "group", "sample", "item", "task", "grade_status", "reward",
              "truncated", "components", "refill_round")  # fmt: skip
    rows = [r for r in rollouts.select(wanted).to_pylist() if r["split"] == "train"]
    rows.sort(key=lambda r: (r["step"], r["group"], r["sample"]))
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["step"], row["group"]), []).append(row)
    return [_group(members) for members in found.values()]


def _group(rows: Sequence[Mapping[str, Any]]) -> Group:
    return Group(
        item=rows[0]["item"],
        task=rows[0]["task"],
        reward=np.array([np.nan if r["reward"] is None else r["reward"] for r in rows], float),
        correct=np.array([r["grade_status"] == "correct" for r in rows]),
        truncated=np.array([bool(r["truncated"]) for r in rows]),
        scorable=np.array([r["grade_status"] != "unscorable" for r in rows]),
        components=tuple(dict(r["components"] or {}) for r in rows),
        first=rows[0]["refill_round"] == 0,
    )


def _live(rewards: np.ndarray, cfg: EvojaxConf) -> bool:
    seen = rewards[np.isfinite(rewards)]
    return bool(seen.size >= 2 and np.ptp(seen) > cfg.algorithm.dead_tolerance)


def _composed(group: Group, weights: Mapping[str, float]) -> np.ndarray:
    """Weighted sum of the stored components; NaN where unscorable or a component is not stored."""
    total = np.array(
        [sum(w * c.get(name, np.nan) for name, w in weights.items()) for c in group.components],
        float,
    )
    return np.where(group.scorable, total, np.nan)


def _advantage_signs(rewards: np.ndarray) -> np.ndarray:
    if not np.isfinite(rewards).any():
        return np.zeros(rewards.shape)
    centred = np.nan_to_num(rewards - np.nanmean(rewards))
    return np.where(np.abs(centred) > _TOLERANCE, np.sign(centred), 0.0)


def _replay_reward(
    intervention: Intervention, groups: list[Group], cfg: EvojaxConf
) -> BacktestResult:
    before = dict(cfg.reward.components)
    after = before | {
        key.removeprefix("reward.components."): float(value)
        for key, value in intervention.edits.items()
    }
    stored = set.intersection(*(set(c) for g in groups for c in g.components))
    absent = sorted(name for name, w in after.items() if w and name not in stored)
    if absent:
        words = f"The stored rollouts hold no value of {', '.join(absent)}: not replayable."
        return BacktestResult(False, words, len(groups))
    old = [_composed(g, {k: w for k, w in before.items() if w}) for g in groups]
    new = [_composed(g, {k: w for k, w in after.items() if w}) for g in groups]
    return _compare(
        intervention, groups, old, new, cfg, variance_share=_variance_shares(groups, after)
    )


def _replay_truncation(
    intervention: Intervention, groups: list[Group], cfg: EvojaxConf
) -> BacktestResult:
    weights = dict(cfg.reward.components)
    whole = [_composed(g, weights) for g in groups]
    cut = [np.where(g.truncated, np.nan, r) for g, r in zip(groups, whole, strict=True)]
    drops = bool(intervention.edits["filter.drop_truncated"])
    old, new = (whole, cut) if drops else (cut, whole)
    return _compare(intervention, groups, old, new, cfg)


def _compare(
    intervention: Intervention,
    groups: list[Group],
    old: list[np.ndarray],
    new: list[np.ndarray],
    cfg: EvojaxConf,
    variance_share: dict[str, float] | None = None,
) -> BacktestResult:
    was = np.array([_live(r, cfg) for r in old])
    now = np.array([_live(r, cfg) for r in new])
    flips = sum(
        int(np.sum(_advantage_signs(a) * _advantage_signs(b) < 0))
        for a, b in zip(old, new, strict=True)
    )
    violations = sum(_outranked(g, r) for g, r in zip(groups, new, strict=True))
    revived, killed = int(np.sum(now & ~was)), int(np.sum(was & ~now))
    words = (
        f"Of {len(groups)} stored groups {was.sum()} were live and {now.sum()} would be: "
        f"{revived} revived, {killed} lost. {flips} advantages would change their sign. In "
        f"{violations} groups a wrong rollout would outrank a right one."
    )
    if variance_share:
        shares = ", ".join(f"{k} {v:.0%}" for k, v in sorted(variance_share.items()))
        words += f" Within-group variance: {shares}."
    metric = intervention.predicts.metric
    return BacktestResult(
        True, words, len(groups), float(was.sum()), float(now.sum()), revived, killed, flips,
        variance_share=variance_share or {}, violations=violations,
        gain=float(now.mean() - was.mean()), metric=metric,
        metric_before=_dead_metric(metric, groups, old, cfg),
        metric_after=_dead_metric(metric, groups, new, cfg),
    )  # fmt: skip


def _outranked(group: Group, rewards: np.ndarray) -> bool:
    seen = np.isfinite(rewards)
    right, wrong = rewards[seen & group.correct], rewards[seen & ~group.correct]
    return bool(right.size and wrong.size and wrong.max() > right.min() + _TOLERANCE)


def _dead_metric(
    metric: str, groups: list[Group], rewards: list[np.ndarray], cfg: EvojaxConf
) -> float | None:
    """The dead-group metrics, the only predicted ones that rewards alone decide."""
    dead = np.array([not _live(r, cfg) for r in rewards])
    right = np.array([bool(g.correct[g.scorable].all()) for g in groups])
    wrong = np.array([not g.correct[g.scorable].any() for g in groups])
    masks = {
        "dead_group_share": dead,
        "update_dead_share": dead,
        "dead_all_wrong_share": dead & wrong,
        "dead_all_correct_share": dead & right,
    }
    return float(masks[metric].mean()) if metric in masks else None


def _variance_shares(groups: list[Group], weights: Mapping[str, float]) -> dict[str, float]:
    """Share of each weighted component in the sum of their within-group variances."""
    sums = dict.fromkeys((k for k, w in weights.items() if w), 0.0)
    for group in groups:
        for name in sums:
            values = _composed(group, {name: weights[name]})
            values = values[np.isfinite(values)]
            sums[name] += float(values.var()) if values.size else 0.0
    total = sum(sums.values())
    return {name: v / total for name, v in sums.items()} if total > 0 else {}


def _replay_refill(
    intervention: Intervention, groups: list[Group], cfg: EvojaxConf
) -> BacktestResult:
    """With a dead share d, r rounds leave d^(r+1) dead and cost d + ... + d^r in extra rollouts."""
    first = [g for g in groups if g.first]
    dead = 1.0 - float(np.mean([_live(g.reward, cfg) for g in first]))
    rounds = int(intervention.edits["filter.refill_rounds"])
    now = cfg.filter.refill_rounds
    left, left_now = dead ** (rounds + 1), dead ** (now + 1)
    extra = sum(dead**k for k in range(1, rounds + 1)) - sum(dead**k for k in range(1, now + 1))
    count = len(first)
    words = (
        f"Of {count} groups drawn first {dead:.0%} were dead. With {rounds} refill rounds "
        f"{left:.0%} of a batch is expected to stay dead, {left_now:.0%} with the present {now}, "
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
    now, then = _weights(cfg.data, items, stats), _weights(_edited(cfg, intervention), items, stats)
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


def _edited(cfg: EvojaxConf, intervention: Intervention) -> DataConf:
    values = {f: getattr(cfg.data, f) for f in ("selection", "target_rate", "sharpness")}
    edits = {k.removeprefix("data."): v for k, v in intervention.edits.items()}
    return DataConf(**(values | edits))


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
_REPLAYS: tuple[tuple[Callable[[str], bool], _Replay], ...] = (
    (lambda key: key.startswith("reward.components."), _replay_reward),
    (lambda key: key == "filter.refill_rounds", _replay_refill),
    (lambda key: key == "filter.drop_truncated", _replay_truncation),
    (lambda key: key.startswith("data."), _replay_selection),
)
