"""What a report is made of: plain data, gathered by the loop, drawn by ``evojax.report.html``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Interval = tuple[float, float]


@dataclass(frozen=True)
class Score:
    """A mean over items, in [0, 1], with its 95 % interval."""

    mean: float
    ci95: Interval | None = None


@dataclass(frozen=True)
class Delta:
    """A paired difference of scores.

    Args:
        vs: version compared with. p: raw p-value. p_holm: after Holm across candidates.
    """

    vs: str
    mean: float
    ci95: Interval | None = None
    p: float | None = None
    p_holm: float | None = None


@dataclass(frozen=True)
class HealthAlert:
    """An alert of the health report, already in words."""

    level: Literal["warn", "critical"]
    text: str


@dataclass(frozen=True)
class VersionCard:
    """One version (an arm, a candidate, or the base).

    Args:
        verdict: base, control, trained, promoted, rejected, undecided, invalid or failed.
        reason: the verdict in words. diff: unified diff of the configuration, "" for none.
        backtest: name -> value of what the replay on stored rollouts gave.
        predicted: what the hypothesis said would move, in words.
    """

    id: str
    parent: str | None
    verdict: str
    branch: str = ""
    commit: str = ""
    factor: str = ""
    hypothesis: str = ""
    predicted: str = ""
    reason: str = ""
    score: Score | None = None
    delta: Delta | None = None
    diff: str = ""
    backtest: dict[str, Any] = field(default_factory=dict)
    alerts: tuple[HealthAlert, ...] = ()


@dataclass(frozen=True)
class CurvePoint:
    """One update of one version.

    Args:
        step: updates counted from the base policy. reward: mean of the scored rollouts.
        dead: share of dead groups. entropy: nats per token. None = not measured.
    """

    step: int
    reward: float | None
    dead: float | None
    entropy: float | None


@dataclass(frozen=True)
class SampleCard:
    """One stored rollout, to be read.

    Args:
        reward: None when unscorable. status: correct, wrong or unscorable.
    """

    version: str
    step: int
    item: str
    task: str
    prompt: str
    text: str
    expected: str
    status: str
    reward: float | None
    advantage: float


@dataclass(frozen=True)
class ReportData:
    """Everything that one run's report shows.

    Args:
        headline: the verdict in words. wall_s: seconds. gain: final against base, paired.
        series: version -> its curve. rerun: command that trains the winner again.
        notes: what the reader must know, e.g. "rests on one training seed".
    """

    experiment: str
    run: str
    seed: int
    device: str
    wall_s: float
    headline: str
    base: Score | None
    final: Score | None
    audit: Score | None
    gain: Delta | None
    promoted: str | None
    versions: tuple[VersionCard, ...]
    series: dict[str, tuple[CurvePoint, ...]]
    samples: tuple[SampleCard, ...]
    rerun: str
    notes: tuple[str, ...] = ()
