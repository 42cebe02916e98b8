"""Group filters by name: importing this package registers every one of them."""

from evojax.grpo.filters import absolute, ema_quantile, none, top_p_mass, uncertainty
from evojax.grpo.filters.base import (
    GROUP_FILTERS,
    Filtered,
    FilterRule,
    FilterState,
    GroupFilter,
)

__all__ = [
    "GROUP_FILTERS",
    "FilterRule",
    "FilterState",
    "Filtered",
    "GroupFilter",
    "absolute",
    "ema_quantile",
    "none",
    "top_p_mass",
    "uncertainty",
]
