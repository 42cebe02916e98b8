"""Scoring a version: Avg@k over a fixed item set, with seeds that depend on the item only.

Because neither items nor seeds depend on the version, two versions are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evojax.config import EvojaxConf
from evojax.evidence.types import Item, Trajectory
from evojax.training.collect import Sampler
from evojax.training.seeds import derive


@dataclass(frozen=True)
class Evaluation:
    """Scores of one version on one split.

    Args:
        scores: item id -> mean correctness over its scorable samples; NaN when it has none.
        unscorable: share of samples that no grader could judge.
        trajectories: every sample, for the evidence.
    """

    scores: dict[str, float]
    unscorable: float
    trajectories: list[Trajectory]

    @property
    def mean(self) -> float:
        """Avg@k: mean over items of the mean over samples; NaN without a scorable item."""
        values = [s for s in self.scores.values() if np.isfinite(s)]
        return float(np.mean(values)) if values else float("nan")


def evaluate(sampler: Sampler, cfg: EvojaxConf, items: Sequence[Item], step: int) -> Evaluation:
    """Sample every item ``eval.samples`` times at ``eval.temperature`` and grade.

    Args:
        step: update count of the weights that are being scored (recorded in the evidence).
    """
    seeds = [derive(cfg.eval.seed, "eval", item.id) for item in items]
    drawn = sampler.draw(
        items,
        cfg.eval.samples,
        seeds,
        cfg.eval.temperature,
        cfg.eval.max_new_tokens,
        cfg.reward,
        step,
    )
    scores, lost, total = {}, 0, 0
    for group in drawn.groups:
        scored = [t for t in group.trajectories if t.grade.status != "unscorable"]
        lost += len(group.trajectories) - len(scored)
        total += len(group.trajectories)
        right = sum(t.grade.status == "correct" for t in scored)
        scores[group.item.id] = right / len(scored) if scored else float("nan")
    return Evaluation(
        scores, lost / max(total, 1), [t for g in drawn.groups for t in g.trajectories]
    )
