from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from evojax.training.board import Board

event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")
ROW = {
    "step": 3, "reward_mean": 0.25, "entropy": 0.9, "entropy_trainer": 0.8,
    "grad_norm": float("nan"), "lr": 1e-5, "loss": 0.1, "mismatch_k3": 0.0, "mismatch_max": 0.0,
    "ess": 1.0, "correction_truncated": 0.0, "clip_high": 0.0, "clip_low": 0.0, "clip_dual": 0.0,
    "kl_k3": float("nan"), "policy_age_mean": 0.0, "rollout_s": 1.0, "reward_s": 0.1,
    "update_s": 2.0, "sync_s": 0.2, "checkpoint_s": 0.0, "peak_rss_mb": 900.0, "dead_groups": 2,
    "drawn_groups": 8, "groups_filtered": 0, "shortfall": 2, "filter_threshold": float("nan"),
    "tokens": 40, "useful_tokens": 30, "tokens_packed": 75, "tokens_padded": 100,
}  # fmt: skip


def events(directory: Path) -> list[Any]:
    """Read the records: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    found = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))
            at += 12 + size + 4
    return found


def test_scalars_are_written_and_missing_numbers_left_out(tmp_path: Path) -> None:
    with Board(tmp_path, 3) as board:
        board.update(ROW)
    scalars = {v.tag: (e.step, v.simple_value) for e in events(tmp_path) for v in e.summary.value}
    assert scalars["train/reward"] == (3, 0.25)
    assert scalars["train/dead_group_share"] == (3, 0.25)
    assert scalars["train/useful_token_share"] == (3, 0.75)
    assert scalars["time/padding_share"] == (3, 0.25)
    assert "optimizer/grad_norm" not in scalars and "train/kl_to_start_k3_nats" not in scalars
