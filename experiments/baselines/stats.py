"""What the runs of a recipe say together: gains with intervals over items and training seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
Row = Mapping[str, Any]


def two_level(
    deltas: np.ndarray, resamples: int = RESAMPLES, seed: int = 1234
) -> tuple[float, tuple[float, float]]:
    """Mean gain and its 95 % percentile interval over items and training seeds.

    Every resample draws items with replacement, then training seeds with replacement, and takes
    the mean over all pairs of them: the items are the same for every seed (crossed, not nested), so
    a lucky item or a lucky seed counts for all its pairs at once.

    Args:
        deltas: float64 ``[seeds, items]``, paired gain; NaN where an item was not scorable.

    Returns:
        (mean, (low, high)); NaN when nothing was scorable. With one seed the interval is over items
        only.

    >>> two_level(np.array([[0.5, 0.5], [0.5, 0.5]]))
    (0.5, (0.5, 0.5))
    """
    known = np.isfinite(deltas)
    if not known.any():
        return math.nan, (math.nan, math.nan)
    seeds, items = deltas.shape
    rng = np.random.default_rng(seed)
    by_item = rng.multinomial(items, np.full(items, 1 / items), resamples).astype(float)
    by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), resamples).astype(float)
    total = np.einsum("rs,si,ri->r", by_seed, np.where(known, deltas, 0.0), by_item, optimize=True)
    count = np.einsum("rs,si,ri->r", by_seed, known.astype(float), by_item, optimize=True)
    means = total[count > 0] / count[count > 0]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(deltas[known].mean()), (float(low), float(high))


def gains(rows: Sequence[Row], over: Sequence[Row] | None = None) -> np.ndarray:
    """Paired gain ``[seeds, items]`` over the untrained policy, or over another recipe's runs.

    Args:
        rows: runs of one recipe, one a seed. over: runs of the other recipe; seeds that both have
            are compared, each with its twin.

    Raises:
        ValueError: no common seed, or two runs that were scored on different items.
    """
    if over is None:
        pairs = [(row["base_scores"], row["scores"]) for row in rows]
    else:
        twins = {row["seed"]: row["scores"] for row in over}
        pairs = [(twins[r["seed"]], r["scores"]) for r in rows if r["seed"] in twins]
    items = {tuple(sorted(scores)) for pair in pairs for scores in pair}
    if len(items) != 1:
        raise ValueError(f"{len(pairs)} pairs of runs on {len(items)} different sets of items")
    (names,) = items

    def column(scores: Mapping[str, float | None]) -> np.ndarray:
        return np.array([math.nan if scores[n] is None else scores[n] for n in names], float)

    return np.array([column(after) - column(before) for before, after in pairs])


def summarise(rows: Sequence[Row], recipes: Sequence[str], base: str) -> list[dict[str, Any]]:
    """One entry for each recipe that has runs, in the order of ``recipes``."""
    found = []
    plain = [row for row in rows if row["arm"] == base]
    for recipe in recipes:
        mine = sorted((r for r in rows if r["arm"] == recipe), key=lambda r: r["seed"])
        if not mine:
            continue
        gain = gains(mine)
        mean, interval = two_level(gain)
        entry: dict[str, Any] = {
            "recipe": recipe,
            "seeds": [row["seed"] for row in mine],
            "items": gain.shape[1],
            "gain": mean,
            "ci95": interval,
            "by_seed": [float(np.nanmean(line)) for line in gain],
            "over_base": None,
        }
        if recipe != base and {r["seed"] for r in plain} & set(entry["seeds"]):
            difference, around = two_level(gains(mine, plain))
            entry["over_base"] = {"mean": difference, "ci95": around}
        for name in ("rollouts", "tokens", "optimizer_steps", "wall_s", "dead_share",
                     "filtered_share", "clip_share"):  # fmt: skip
            entry[name] = float(np.mean([row[name] for row in mine]))
        found.append(entry)
    return found


def markdown(entries: Sequence[Mapping[str, Any]]) -> str:
    """The table of the README, one line a recipe; wall is of the whole run, evaluation included."""
    lines = [
        "| recipe | gain over the untrained policy [95 %] | each seed | against base [95 %] "
        "| rollouts | tokens | optimizer steps | wall, min | dead | filtered | clipped |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for e in entries:
        other = e["over_base"]
        lines.append(
            f"| {e['recipe']} | {_interval(e['gain'], e['ci95'])} "
            f"| {' '.join(f'{value:+.3f}' for value in e['by_seed'])} "
            f"| {'' if other is None else _interval(other['mean'], other['ci95'])} "
            f"| {e['rollouts']:.0f} | {e['tokens']:.0f} | {e['optimizer_steps']:.0f} "
            f"| {e['wall_s'] / 60:.1f} | {e['dead_share']:.0%} | {e['filtered_share']:.0%} "
            f"| {e['clip_share']:.2%} |"
        )
    return "\n".join(lines)


def _interval(mean: float, interval: Sequence[float]) -> str:
    return f"{mean:+.3f} [{interval[0]:+.3f}, {interval[1]:+.3f}]"
