"""What every advantage estimator takes and returns, and the one rule for groups that teach nothing.

NumPy in float64: the table is tiny, and float32 means leave residues that look like a signal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from evojax.registry import Registry

STD_EPS = 1e-6


@dataclass(frozen=True)
class RewardTable:
    """Rewards of one batch: G groups (prompts) of S members (samples).

    Args:
        rewards: float64 ``[G, S]``; NaN marks an unscorable member.
        tolerance: reward units, >= 0: rewards closer than this are equal.
        include: bool ``[G, S]``; False leaves a member out as if it were unscorable (filters).
            None includes all.
        components: name to float64 ``[G, S]``: what each reward component contributed, its weight
            applied, so that they sum to ``rewards`` before any reward clip. Only ``gdpo`` reads
            them.
        weights: name to the weight in ``components``; normalising a contribution takes the size
            of its weight away, so ``gdpo`` needs it again.

    Raises:
        ValueError: shapes differ, or a negative tolerance.
    """

    rewards: np.ndarray
    tolerance: float
    include: np.ndarray | None = None
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rewards = np.asarray(self.rewards, dtype=np.float64)
        object.__setattr__(self, "rewards", rewards)
        if rewards.ndim != 2:
            raise ValueError(f"rewards must be [groups, samples], got shape {rewards.shape}")
        if not self.tolerance >= 0.0:
            raise ValueError(f"tolerance must be at least 0, got {self.tolerance}")
        tables = {
            name: np.asarray(value, dtype=np.float64) for name, value in self.components.items()
        }
        object.__setattr__(self, "components", tables)
        if self.include is not None:
            object.__setattr__(self, "include", np.asarray(self.include, dtype=bool))
            tables = tables | {"include": self.include}
        wrong = {name: t.shape for name, t in tables.items() if t.shape != rewards.shape}
        if wrong:
            raise ValueError(f"rewards have shape {rewards.shape}, but {wrong}")


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one batch's groups, and what became of every member.

    Args:
        advantages: float32 ``[G, S]``, 0 for members without weight.
        weight: bool ``[G, S]``: the member's tokens count in the loss. Members of a dead group
            do (their loss is 0), unscorable members and those of a dropped group do not.
        scorable: bool ``[G, S]``: the reward is a finite number.
        dead: bool ``[G]``: all usable rewards are equal, so the group teaches nothing.
        dropped: bool ``[G]``: fewer than two usable members, so there is nothing to compare.
    """

    advantages: np.ndarray
    weight: np.ndarray
    scorable: np.ndarray
    dead: np.ndarray
    dropped: np.ndarray

    @property
    def live(self) -> np.ndarray:
        """bool ``[G]``: groups that carry a gradient."""
        return ~(self.dead | self.dropped)

    def counts(self) -> dict[str, float]:
        """Counts and shares for the log; ``dead_share`` is over groups that were compared."""
        compared = int((~self.dropped).sum())
        members = self.scorable.size
        unscorable = members - int(self.scorable.sum())
        return {
            "groups": float(len(self.dead)),
            "groups_dead": float(self.dead.sum()),
            "groups_dropped": float(self.dropped.sum()),
            "dead_share": float(self.dead.sum()) / compared if compared else 0.0,
            "unscorable": float(unscorable),
            "unscorable_share": unscorable / members if members else 0.0,
        }


AdvantageFn = Callable[[RewardTable], GroupAdvantages]

ADVANTAGES: Registry[AdvantageFn] = Registry("advantage")


class Members(NamedTuple):
    """Who takes part: ``usable`` members are scorable and included.

    Args:
        scorable, usable: bool ``[G, S]``.
        dropped: bool ``[G]``: fewer than two usable members.
        weight: bool ``[G, S]``: usable members of groups that are not dropped.
    """

    scorable: np.ndarray
    usable: np.ndarray
    dropped: np.ndarray
    weight: np.ndarray


def members(table: RewardTable) -> Members:
    """Sort the members of a table; nobody unscorable or left out enters a statistic."""
    scorable = np.isfinite(table.rewards)
    usable = scorable if table.include is None else scorable & table.include
    dropped = usable.sum(axis=1) < 2
    return Members(scorable, usable, dropped, usable & ~dropped[:, None])


def degenerate(values: np.ndarray, usable: np.ndarray, tolerance: float) -> np.ndarray:
    """bool ``[G]``: the usable values of the group span no more than ``tolerance``.

    The test is on the range, never on ``std > 0``, for rounding leaves a tiny std behind. A group
    with no usable value is degenerate.

    >>> tenths = np.full((1, 8), 0.1, np.float32)
    >>> degenerate(tenths, np.ones((1, 8), bool), 1e-6).tolist()
    [True]
    """
    high = np.where(usable, values, -np.inf).max(axis=1, initial=-np.inf)
    low = np.where(usable, values, np.inf).min(axis=1, initial=np.inf)
    return high - low <= tolerance


def centred(values: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """``values - group mean`` over the usable members, float64 ``[G, S]``, 0 for the others."""
    filled = np.where(usable, values, 0.0)
    mean = filled.sum(axis=1) / np.maximum(usable.sum(axis=1), 1)
    return np.where(usable, filled - mean[:, None], 0.0)


def group_std(deviations: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Standard deviation of each group, ddof 1, float64 ``[G]``, from centred values."""
    number = usable.sum(axis=1)
    return np.sqrt((deviations**2).sum(axis=1) / np.maximum(number - 1, 1))


def normalised(values: np.ndarray, usable: np.ndarray, tolerance: float) -> np.ndarray:
    """``(v - mean) / (std + 1e-6)`` per group, ddof 1; exactly 0 for degenerate groups."""
    deviations = centred(values, usable)
    scaled = deviations / (group_std(deviations, usable) + STD_EPS)[:, None]
    return np.where(degenerate(values, usable, tolerance)[:, None], 0.0, scaled)


def finish(raw: np.ndarray, judged: np.ndarray, who: Members, tolerance: float) -> GroupAdvantages:
    """Apply the degenerate rule, the same for every estimator.

    A group whose ``judged`` values span no more than ``tolerance`` is dead: its advantages are
    exactly 0 and its members keep their weight. A group with fewer than two usable members is
    dropped: advantages 0 and no weight.

    Args:
        raw: float64 ``[G, S]``, advantages before the rule; may be anything in groups it zeroes.
        judged: float64 ``[G, S]``, what the rule looks at: the rewards (``gdpo``: the sum of the
            normalised components).
        who: from ``members``. tolerance: in units of ``judged``.
    """
    dead = ~who.dropped & degenerate(judged, who.usable, tolerance)
    live = ~(dead | who.dropped)
    advantages = np.where(live[:, None] & who.usable, raw, 0.0)
    return GroupAdvantages(
        advantages.astype(np.float32), who.weight, who.scorable, dead, who.dropped
    )
