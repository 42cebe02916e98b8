"""Whether a candidate is really better: a paired comparison over the same items.

Two arms answer the same items with the same sampler seeds. The unit that is resampled is the
*item*, with all its samples; the statistic is the mean paired difference. Everything is seeded and
deterministic. One training run per arm is one training seed, and every verdict says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

EXACT_ITEMS = 16  # up to this many non-zero differences every sign pattern is counted
MAX_UNSCORABLE = 0.2
IMPLAUSIBLE_JUMP = 0.5
SEED_LABEL = "one training seed"
_CHUNK = 2_000_000

Outcome = Literal["promoted", "rejected", "undecided", "invalid"]


@dataclass(frozen=True)
class GateRule:
    """When a difference counts.

    Args:
        alpha: family-wise error rate over the candidates of a round.
        resamples: bootstrap resamples and Monte Carlo sign patterns.
        min_delta: the interval has to lie above this.
    """

    alpha: float = 0.05
    resamples: int = 10_000
    min_delta: float = 0.0
    seed: int = 1234


@dataclass(frozen=True)
class Arm:
    """One version's evaluation.

    Args:
        scores: item -> mean score over its samples; NaN when no sample could be scored.
        protocol: whatever has to be equal for two scores to be comparable (split, samples,
            temperature, seed, hash of the items); compared with ``==``.
        unscorable: share of samples without a score.
    """

    version: str
    scores: Mapping[str, float]
    protocol: object
    unscorable: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Candidate minus control over the items that both could be scored on.

    Args:
        mean: mean paired difference; ci95: its percentile bootstrap interval.
        p: two-sided sign-flip permutation p-value.
        spread: standard deviation of the item differences.
        items: how many were compared; left_out: unscorable in either arm.
    """

    mean: float
    ci95: tuple[float, float]
    p: float
    spread: float
    items: int
    left_out: int


@dataclass(frozen=True)
class Verdict:
    """What the gate says of one candidate, in words and in numbers."""

    version: str
    outcome: Outcome
    words: str
    vs: str
    comparison: Comparison | None = None
    p_holm: float | None = None
    flags: tuple[str, ...] = ()
    label: str = SEED_LABEL
    problems: tuple[str, ...] = field(default_factory=tuple)


def bootstrap_mean(
    scores: Mapping[str, float], resamples: int = 10_000, seed: int = 1234
) -> tuple[float, tuple[float, float]]:
    """Mean over scorable items and its 95 % percentile bootstrap interval.

    Returns:
        (mean, (low, high)); all NaN when no item has a score.
    """
    values = np.array([scores[k] for k in sorted(scores)], dtype=np.float64)
    values = values[np.isfinite(values)]
    if values.size == 0:
        return math.nan, (math.nan, math.nan)
    return float(values.mean()), _interval(values, resamples, seed)


def paired_bootstrap(
    control: Mapping[str, float],
    candidate: Mapping[str, float],
    resamples: int = 10_000,
    seed: int = 1234,
) -> Comparison:
    """Compare two arms item by item.

    Items without a finite score in either arm are left out and counted; they are never 0.

    >>> paired_bootstrap({"a": 0.0, "b": 0.5}, {"a": 0.5, "b": 1.0}).mean
    0.5
    """
    items = sorted(control.keys() | candidate.keys())
    pairs = [(control.get(i, math.nan), candidate.get(i, math.nan)) for i in items]
    usable = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    delta = np.array([b - a for a, b in usable], dtype=np.float64)
    left_out = len(items) - delta.size
    if delta.size == 0:
        return Comparison(math.nan, (math.nan, math.nan), 1.0, math.nan, 0, left_out)
    return Comparison(
        mean=float(delta.mean()),
        ci95=_interval(delta, resamples, seed),
        p=sign_flip_p(delta, resamples, seed),
        spread=float(delta.std(ddof=1)) if delta.size > 1 else math.nan,
        items=int(delta.size),
        left_out=left_out,
    )


def sign_flip_p(delta: np.ndarray, resamples: int = 10_000, seed: int = 1234) -> float:
    """Two-sided p of the mean difference if each item's sign were a coin toss.

    Exact over all 2^n patterns for n <= 16 non-zero differences, else Monte Carlo with the
    observed pattern counted in: (1 + #{|S| >= |s|}) / (1 + R). With n items p is at least
    2^(1-n): five items never reach 0.05.

    >>> sign_flip_p(np.array([1.0, 1.0, 1.0]))
    0.25
    """
    moving = delta[delta != 0.0]
    if moving.size == 0:
        return 1.0
    observed = abs(float(moving.sum()))
    edge = observed - 1e-12 * float(np.abs(moving).sum())
    if moving.size <= EXACT_ITEMS:
        codes = np.arange(2**moving.size)[:, None] >> np.arange(moving.size)
        sums = (1 - 2 * (codes & 1)) @ moving
        return float(np.mean(np.abs(sums) >= edge))
    rng = np.random.default_rng([seed, 1])
    hits = 0
    for size in _chunks(resamples, moving.size):
        signs = 1 - 2 * rng.integers(0, 2, size=(size, moving.size), dtype=np.int8)
        hits += int(np.sum(np.abs(signs @ moving) >= edge))
    return (1 + hits) / (1 + resamples)


def _interval(values: np.ndarray, resamples: int, seed: int) -> tuple[float, float]:
    rng = np.random.default_rng([seed, 0])
    means = [
        values[rng.integers(0, values.size, size=(size, values.size))].mean(axis=1)
        for size in _chunks(resamples, values.size)
    ]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def _chunks(total: int, width: int) -> list[int]:
    step = max(1, _CHUNK // max(1, width))
    return [min(step, total - at) for at in range(0, total, step)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [1.0] * len(p_values)
    worst = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = worst
    return adjusted


def validity_problems(control: Arm, candidate: Arm) -> list[str]:
    """What makes two evaluations incomparable; empty when they may be compared."""
    problems = []
    if control.protocol != candidate.protocol:
        problems.append("the two arms were not evaluated by the same protocol")
    if control.scores.keys() != candidate.scores.keys():
        odd = len(control.scores.keys() ^ candidate.scores.keys())
        problems.append(f"the item sets differ in {odd} items")
    for arm in (control, candidate):
        if not arm.scores:
            problems.append(f"{arm.version} has no scores")
        for item, score in arm.scores.items():
            if isinstance(score, bool) or not isinstance(score, (int, float)) or math.isinf(score):
                problems.append(f"{arm.version} has the score {score!r} on {item}")
                break
        if not arm.unscorable <= MAX_UNSCORABLE:
            problems.append(
                f"{arm.unscorable:.0%} of the samples of {arm.version} could not be scored"
            )
    return problems


def judge_all(
    control: Arm, candidates: Sequence[Arm], rule: GateRule, training_seeds: int = 1
) -> list[Verdict]:
    """One verdict a candidate; p-values adjusted by Holm over the candidates that are valid.

    Promoted: the adjusted p is below alpha and the interval lies above min_delta. Rejected: the
    interval lies at or below min_delta. Invalid: the evaluations cannot be compared. Undecided:
    everything else; more items or more seeds could settle it.
    """
    faults = [validity_problems(control, c) for c in candidates]
    compared = {
        n: paired_bootstrap(control.scores, c.scores, rule.resamples, rule.seed)
        for n, c in enumerate(candidates)
        if not faults[n]
    }
    adjusted = dict(zip(compared, holm([c.p for c in compared.values()]), strict=True))
    label = SEED_LABEL if training_seeds == 1 else f"{training_seeds} training seeds"
    verdicts = []
    for n, arm in enumerate(candidates):
        if faults[n]:
            words = f"{arm.version} is invalid: {'; '.join(faults[n])}"
            verdicts.append(
                Verdict(arm.version, "invalid", words, control.version, label=label,
                        problems=tuple(faults[n]))
            )  # fmt: skip
        else:
            verdicts.append(_judge(control, arm, compared[n], adjusted[n], rule, label))
    return verdicts


def _judge(
    control: Arm, arm: Arm, found: Comparison, p_holm: float, rule: GateRule, label: str
) -> Verdict:
    low, high = found.ci95
    outcome: Outcome = "undecided"
    if found.items == 0:
        outcome = "invalid"
    elif p_holm < rule.alpha and low > rule.min_delta:
        outcome = "promoted"
    elif high <= rule.min_delta:
        outcome = "rejected"
    jump = abs(found.mean) > IMPLAUSIBLE_JUMP
    flags = ("implausible jump: read its rollouts before trusting it",) if jump else ()
    words = (
        f"{arm.version} is {outcome}: {found.mean:+.3f} against {control.version} "
        f"(95 % interval {low:+.3f} to {high:+.3f}, p {p_holm:.4f} after Holm, {found.items} items"
        + (f", {found.left_out} left out as unscorable" if found.left_out else "")
        + f"; {label})"
        + (f". Flag: {flags[0]}" if flags else "")
    )
    return Verdict(arm.version, outcome, words, control.version, found, p_holm, flags, label)
