"""Advantages: how much better one sample of a prompt did than its siblings.

Each estimator is a function on the reward table ``[G, S]`` of one step, filed under its name.
NumPy in float64: the table is tiny, and float32 means leave residues that look like a signal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from evojax.registry import Registry

STD_EPS = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one step's groups, and what became of every member.

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


class AdvantageFn(Protocol):
    """An estimator; see ``group_normalised`` for the arguments."""

    def __call__(
        self, rewards: ArrayLike, *, tolerance: float, include: np.ndarray | None = None
    ) -> GroupAdvantages: ...


ADVANTAGES: Registry[AdvantageFn] = Registry("advantage")


@ADVANTAGES.register("grpo")
def group_normalised(
    rewards: ArrayLike, *, tolerance: float, include: np.ndarray | None = None
) -> GroupAdvantages:
    """GRPO: ``A_i = (r_i - mean) / (std + 1e-6)``, std with ddof 1, per group.

    A group whose rewards span no more than ``tolerance`` is dead: its advantages are exactly 0.
    The test is on the range, never on ``std > 0``, for rounding leaves a tiny std behind.

    Args:
        rewards: ``[G, S]``; NaN or None marks an unscorable member, which is left out of its
            group's statistics and gets advantage 0 and no weight.
        tolerance: reward units, >= 0.
        include: bool ``[G, S]``; False leaves a member out as if it were unscorable (filters).

    Returns:
        GroupAdvantages; groups with fewer than two usable members are dropped.

    References:
        DeepSeekMath, arXiv 2402.03300, section 4.1.

    >>> out = group_normalised([[1.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, None]], tolerance=1e-6)
    >>> out.advantages.round(2).tolist()
    [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]]
    >>> out.dead.tolist(), out.weight[1].tolist()
    ([False, True], [True, True, True, False])
    """
    table = np.asarray(rewards, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(f"rewards must be [groups, samples], got shape {table.shape}")
    scorable = np.isfinite(table)
    usable = scorable if include is None else scorable & np.asarray(include, dtype=bool)
    number = usable.sum(axis=1)
    dropped = number < 2
    weight = usable & ~dropped[:, None]

    high = np.where(usable, table, -np.inf).max(axis=1, initial=-np.inf)
    low = np.where(usable, table, np.inf).min(axis=1, initial=np.inf)
    dead = ~dropped & (high - low <= tolerance)
    live = ~(dead | dropped)

    filled = np.where(usable, table, 0.0)
    mean = filled.sum(axis=1) / np.maximum(number, 1)
    centred = np.where(usable, filled - mean[:, None], 0.0)
    std = np.sqrt((centred**2).sum(axis=1) / np.maximum(number - 1, 1))
    advantages = np.where(live[:, None], centred / (std + STD_EPS)[:, None], 0.0)
    return GroupAdvantages(advantages.astype(np.float32), weight, scorable, dead, dropped)
