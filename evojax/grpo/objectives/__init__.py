"""Policy objectives: what one token adds to the loss, each a function filed under its name."""

from __future__ import annotations

from evojax.grpo.objectives import cispo, clip, gspo
from evojax.grpo.objectives.base import (
    LOG_RATIO_BOUND,
    OBJECTIVES,
    Bounds,
    Objective,
    SumCount,
    TokenLoss,
    log_ratio,
    masked_sum,
)

__all__ = [
    "LOG_RATIO_BOUND",
    "OBJECTIVES",
    "Bounds",
    "Objective",
    "SumCount",
    "TokenLoss",
    "cispo",
    "clip",
    "gspo",
    "log_ratio",
    "masked_sum",
]
