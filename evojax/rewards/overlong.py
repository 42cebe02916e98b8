"""A penalty that grows over the last tokens of the budget."""

from __future__ import annotations

from evojax.rewards.base import REWARDS, Scored


@REWARDS.register("overlong")
def overlong(scored: Scored) -> float:
    """Soft overlong punishment of the completion's length in tokens, in [-1, 0].

    See `length_penalty`. Give it a positive weight: the value itself is the penalty.
    """
    return length_penalty(scored.response_tokens, scored.budget_tokens, scored.overlong_buffer)


def length_penalty(tokens: int, budget: int, buffer: int) -> float:
    """``max(-1, min(0, ((budget - buffer) - tokens) / buffer))``.

    0 up to ``budget - buffer`` tokens, then a straight line down to -1 at the budget, and -1
    beyond it. A buffer of 0 is the limit of that line: -1 for a completion that used up its
    budget, else 0.

    Args:
        tokens: length of the completion, its stop token included.
        budget: most tokens it could have had. buffer: tokens, >= 0.

    References:
        DAPO, arXiv 2503.14476, section 3.4, there with budget 20480 and buffer 4096.

    >>> [length_penalty(n, 20480, 4096) for n in (16384, 18432, 20480, 30000)]
    [0.0, -0.5, -1.0, -1.0]
    >>> length_penalty(5, 6, 0), length_penalty(6, 6, 0)
    (0.0, -1.0)
    """
    if tokens >= budget:
        return -1.0
    over = tokens - (budget - buffer)
    return -over / buffer if over > 0 else 0.0
