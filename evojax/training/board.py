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
    "grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/lr",
    "loss": "optimizer/loss",
    "mismatch_k3": "optimizer/mismatch_k3_nats",
    "clip_high": "optimizer/clip_high",
    "clip_low": "optimizer/clip_low",
    "rollout_s": "time/rollout_s",
    "update_s": "time/update_s",
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
        dead = row["dead_groups"] / max(row["drawn_groups"], 1)
        self._writer.add_scalar("train/dead_group_share", dead, step)
