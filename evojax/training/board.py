"""TensorBoard scalars of a version, one event file per session under ``tensorboard/<version>``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX import SummaryWriter

_SCALARS = {
    "reward_mean": "train/reward",
    "entropy": "train/entropy_nats",
    "kl_k3": "train/kl_to_start_k3_nats",
    "groups_filtered": "train/groups_filtered",
    "shortfall": "train/shortfall_groups",
    "filter_threshold": "train/filter_threshold",
    "grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/lr",
    "loss": "optimizer/loss",
    "entropy_trainer": "optimizer/entropy_nats",
    "clip_high": "optimizer/clip_high",
    "clip_low": "optimizer/clip_low",
    "clip_dual": "optimizer/clip_dual",
    "mismatch_k3": "mismatch/k3_nats",
    "mismatch_max": "mismatch/max_nats",
    "ess": "mismatch/effective_sample_share",
    "correction_truncated": "mismatch/correction_truncated",
    "policy_age_mean": "mismatch/policy_age_mean",
    "rollout_s": "time/rollout_s",
    "reward_s": "time/reward_s",
    "update_s": "time/update_s",
    "sync_s": "time/sync_s",
    "checkpoint_s": "time/checkpoint_s",
    "peak_rss_mb": "time/peak_rss_mb",
}


class Board:
    """Writes the numbers of each update; a resumed session hides what it is about to repeat.

    Args:
        directory: of this version. first_step: steps from here on are written (again).
    """

    def __init__(self, directory: Path, first_step: int):
        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()

    def update(self, row: Mapping[str, Any]) -> None:
        """Add one row of the ``updates`` table; numbers that do not exist are left out."""
        step = int(row["step"])
        for name, tag in _SCALARS.items():
            value = float(row[name])
            if math.isfinite(value):
                self._writer.add_scalar(tag, value, step)
        shares = {
            "train/dead_group_share": row["dead_groups"] / max(row["drawn_groups"], 1),
            "train/useful_token_share": row["useful_tokens"] / max(row["tokens"], 1),
            "time/padding_share": 1 - row["tokens_packed"] / max(row["tokens_padded"], 1),
        }
        for tag, value in shares.items():
            self._writer.add_scalar(tag, value, step)
