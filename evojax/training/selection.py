"""Which training items a step sees: one registered function per way of choosing.

Every selector is a pure function of (seed, step, statistics): there is no hidden cursor, hence
arms of a round draw the same items and a resumed run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evojax.config import DataConf
from evojax.evidence.types import Item
from evojax.registry import Registry
from evojax.training.seeds import stream


@dataclass
class ItemStats:
    """Running success rate per item: (successes, scored samples) so far."""

    counts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, item_id: str, correct: float, scored: float) -> None:
        """Count ``correct`` of ``scored`` samples; unscorable samples are not in either."""
        c, n = self.counts.get(item_id, (0.0, 0.0))
        self.counts[item_id] = (c + correct, n + scored)

    def rate(self, item: Item, task_rate: Mapping[str, float]) -> float:
        """Success rate, shrunk to the task's mean by two pseudo-samples."""
        c, n = self.counts.get(item.id, (0.0, 0.0))
        return (c + 2.0 * task_rate.get(item.task, 0.5)) / (n + 2.0)

    def task_rates(self, items: Sequence[Item]) -> dict[str, float]:
        """Mean success rate per task over the items seen so far; 0.5 where none was."""
        sums: dict[str, list[float]] = {}
        for item in items:
            c, n = self.counts.get(item.id, (0.0, 0.0))
            total = sums.setdefault(item.task, [0.0, 0.0])
            total[0] += c
            total[1] += n
        return {task: (c / n if n else 0.5) for task, (c, n) in sums.items()}


Selector = Callable[[Sequence[Item], int, int, int, ItemStats, DataConf, int], list[Item]]
SELECTORS: Registry[Selector] = Registry("data selection")


def by_task(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Items grouped by task, tasks in alphabetical order, items in their given order."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.task, []).append(item)
    return dict(sorted(groups.items()))


def _task_slots(tasks: Sequence[str], step: int, count: int) -> list[tuple[str, int]]:
    """``count`` (task, running index) pairs of this step, dealt round over the tasks."""
    first = step * count
    return [(tasks[(first + i) % len(tasks)], (first + i) // len(tasks)) for i in range(count)]


@SELECTORS.register("uniform")
def uniform(
    items: Sequence[Item],
    step: int,
    count: int,
    seed: int,
    stats: ItemStats,
    conf: DataConf,
    refill_round: int,
) -> list[Item]:
    """Tasks in turn; within a task every item once per pass, in a seeded order.

    Args:
        items: the training pool. step: update index since the base policy. count: prompts wanted.
        stats: unused here. refill_round: 0 for the step's own prompts, k for the k-th extra draw,
            which comes from a stream of its own so that the main stream is not shifted by it.
    """
    groups = by_task(items)
    chosen = []
    for task, index in _task_slots(list(groups), step, count):
        pool = groups[task]
        epoch, place = divmod(index, len(pool))
        order = stream(seed, "items", task, epoch, refill_round).permutation(len(pool))
        chosen.append(pool[order[place]])
    return chosen


@SELECTORS.register("difficulty")
def difficulty(
    items: Sequence[Item],
    step: int,
    count: int,
    seed: int,
    stats: ItemStats,
    conf: DataConf,
    refill_round: int,
) -> list[Item]:
    """Draw items whose success rate is near ``target_rate`` more often, without replacement.

    Weight of an item with rate p: exp(-sharpness * |p - target| / 0.5).
    """
    weights = selection_weights(items, stats, conf)
    rng = stream(seed, "difficulty", step, refill_round)
    picked = rng.choice(len(items), size=min(count, len(items)), replace=False, p=weights)
    return [items[i] for i in picked]


def selection_weights(items: Sequence[Item], stats: ItemStats, conf: DataConf) -> np.ndarray:
    """Probability of each item under difficulty-aware selection, float64 ``[n]``, sums to 1."""
    rates = stats.task_rates(items)
    p = np.array([stats.rate(item, rates) for item in items])
    weights = np.exp(-conf.sharpness * np.abs(p - conf.target_rate) / 0.5)
    return weights / weights.sum()
