"""What a group filter is: which of a step's groups teach enough to be trained on.

A filter judges groups by ``s_g``, the standard deviation of the rewards within group g. It is a
*std* in reward units, not a variance, with divisor n - 1, as in the sources of all four rules.
Dead groups (``s_g`` = 0 up to the tolerance) always go; what differs is which live ones follow.
NumPy in float64: there is one number per group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from evojax.errors import InputError
from evojax.registry import Registry

_ROUNDING = 1e-9  # shares of counts: 0.3 * 10 is 3 groups


@dataclass(frozen=True)
class FilterState:
    """What a filter remembers between steps; part of the checkpoint.

    Args:
        mean, variance: running statistics of the live groups' reward std (reward units, squared).
        seen: live groups that went into them.
    """

    mean: float = 0.0
    variance: float = 0.0
    seen: int = 0

    def to_dict(self) -> dict[str, float | int]:
        """JSON-ready; floats survive the round trip bit by bit."""
        return {"mean": self.mean, "variance": self.variance, "seen": self.seen}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> FilterState:
        """What `to_dict` gave.

        Raises:
            InputError: a value is missing or cannot be one.

        >>> FilterState.from_dict(FilterState(0.5, 0.25, 3).to_dict())
        FilterState(mean=0.5, variance=0.25, seen=3)
        """
        try:
            state = cls(float(stored["mean"]), float(stored["variance"]), int(stored["seen"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(stored) from error
        if not (math.isfinite(state.mean) and 0 <= state.variance < math.inf and state.seen >= 0):
            raise _damaged(stored)
        return state


def _damaged(stored: object) -> InputError:
    remedy = "go on from an older checkpoint"
    return InputError.one("not the state of a group filter", "checkpoint", stored, remedy)


class FilterRule(NamedTuple):
    """The numbers of the rules; each reads those that it needs.

    Args:
        keep: quantile, mass or share in (0, 1]. min_std: reward units, >= 0.
        ema_decay: weight of one new group in the running statistics, (0, 1].
        ema_warmup: groups. min_keep: share of the live groups, [0, 1].
    """

    keep: float
    min_std: float
    ema_decay: float
    ema_warmup: int
    min_keep: float


class Filtered(NamedTuple):
    """A filter's answer.

    Args:
        keep: bool ``[G]``, True for groups that stay in the batch.
        state: for the next step.
        threshold: std (reward units) that a kept group reaches; NaN where there is none.
    """

    keep: np.ndarray
    state: FilterState
    threshold: float


GroupFilter = Callable[[np.ndarray, np.ndarray, FilterState, FilterRule], Filtered]

GROUP_FILTERS: Registry[GroupFilter] = Registry("group filter")


def at_least(share: float, count: int) -> int:
    """Smallest whole number that is no less than ``share`` of ``count``.

    >>> at_least(0.5, 5), at_least(0.3, 10), at_least(0.0, 5)
    (3, 3, 0)
    """
    return math.ceil(share * count - _ROUNDING)


def at_most(share: float, count: int) -> int:
    """Largest whole number that is no more than ``share`` of ``count``.

    >>> at_most(0.5, 5), at_most(0.3, 10)
    (2, 3)
    """
    return math.floor(share * count + _ROUNDING)


def strongest(std: np.ndarray, live: np.ndarray, count: int) -> np.ndarray:
    """bool ``[G]``: the ``count`` live groups with the largest std; of equal ones the first drawn.

    >>> strongest(np.array([0.5, 0.2, 0.5]), np.array([True, True, True]), 1).tolist()
    [True, False, False]
    """
    order = np.argsort(np.where(live, -std, np.inf), kind="stable")
    keep = np.zeros(len(std), dtype=bool)
    keep[order[:count]] = True
    return keep & live


def weakest_kept(std: np.ndarray, keep: np.ndarray) -> float:
    """Smallest std among the kept groups; NaN when none is."""
    return float(std[keep].min()) if keep.any() else math.nan
