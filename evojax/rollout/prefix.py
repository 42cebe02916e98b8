"""Which prompts of a call begin alike: the shared beginning is computed once.

Few-shot prompts of one task differ only in their last line, so most of the prefill is repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LEAST_SHARED = 16
_LEAST_KEPT = 0.5  # joining a family may shorten its common beginning to this part, no further
_LONE_TAIL = 16


@dataclass(frozen=True)
class PrefixPlan:
    """Prompts as (prefix, rest).

    Args:
        prefixes: token ids of each distinct beginning (may be empty).
        which: int32 ``[P]``, the prefix of each prompt.
        rests: token ids of each prompt after its prefix, never empty.
    """

    prefixes: list[np.ndarray]
    which: np.ndarray
    rests: list[np.ndarray]


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens two sequences share.

    >>> common_length(np.array([5, 6, 7]), np.array([5, 6, 8, 9]))
    2
    """
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


def plan_prefixes(prompts: Sequence[np.ndarray]) -> PrefixPlan:
    """Group prompts into families with a long common beginning.

    A prompt without family gives up all but its last tokens as a prefix of its own, so that one
    such prompt does not make the rests of all others long.
    """
    families: list[tuple[int, list[int]]] = []  # length of the common beginning, members
    for index in sorted(range(len(prompts)), key=lambda i: prompts[i].tolist()):
        prompt = prompts[index]
        if families:
            length, members = families[-1]
            shared = min(common_length(prompts[members[0]][:length], prompt), len(prompt) - 1)
            if shared >= max(_LEAST_SHARED, _LEAST_KEPT * length):
                families[-1] = (shared, [*members, index])
                continue
        families.append((len(prompt) - 1, [index]))
    prefixes: list[np.ndarray] = []
    which = np.zeros(len(prompts), np.int32)
    rests: list[np.ndarray] = [prompts[0]] * len(prompts)
    for length, members in families:
        if len(members) == 1:
            length = max(len(prompts[members[0]]) - _LONE_TAIL, 0)
        for index in members:
            which[index] = len(prefixes)
            rests[index] = prompts[index][length:]
        prefixes.append(prompts[members[0]][:length])
    return PrefixPlan(prefixes, which, rests)
