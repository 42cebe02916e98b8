"""One small version, worked out by hand: seven training groups, four eval items, four updates."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evojax.evidence.reader import Evidence, load
from evojax.evidence.types import Completion, Grade, Item, Trajectory
from evojax.evidence.writer import EvidenceWriter

_STATUS = {"c": "correct", "w": "wrong", "u": "unscorable"}


def _sample(item, split, status, step, group, sample, dead, kept, length, formatted):
    grade = Grade(_STATUS[status], "" if status == "u" else status)  # type: ignore[arg-type]
    reward = {"c": 1.0, "w": 0.0, "u": float("nan")}[status]
    spent = length == 4
    return Trajectory(
        item=Item(item, item[0], f"{item} =", "c", split, "line"),
        prompt_ids=np.array([1, 2], np.int32),
        completion=Completion(
            token_ids=np.zeros(length, np.int32),
            logprobs=np.full(length, -0.25 if spent else -0.5, np.float32),
            entropies=np.full(length, 0.5, np.float32),
            finish_reason="length" if spent else "stop",
            policy_version=f"v001@{step}",
        ),
        text=status,
        grade=grade,
        reward=reward,
        step=step,
        group=group,
        sample=sample,
        seed=0,
        components={} if status == "u" else {"correct": reward, "format": float(formatted)},
        advantage=0.0 if dead or status == "u" else (1.0 if status == "c" else -1.0),
        kept=kept and status != "u",
    )


# step, group, item, grades, dead, kept, refill round, lengths, well-formed
TRAIN = [
    (0, 0, "a1", "cccw", False, True, 0, (2, 2, 2, 4), (1, 1, 1, 1)),
    (0, 1, "b1", "wwww", True, True, 0, (2, 2, 2, 2), (0, 0, 0, 0)),
    (1, 0, "a3", "cccc", True, True, 0, (2, 2, 2, 2), (1, 1, 1, 1)),
    (1, 1, "b1", "wwcu", False, True, 0, (2, 2, 2, 2), (1, 1, 1, 1)),
    (2, 0, "a2", "ccww", False, True, 0, (2, 2, 2, 2), (1, 1, 1, 0)),
    (2, 1, "b2", "wwww", True, False, 0, (2, 2, 2, 2), (1, 1, 1, 1)),
    (2, 2, "b1", "cwww", False, True, 1, (2, 2, 2, 2), (1, 1, 1, 1)),
]
EVAL = [("a9", "cwu"), ("b8", "ww"), ("b9", "cc"), ("b7", "uu")]


def build_evidence(directory: Path) -> Evidence:
    """Write the example below ``directory`` and load it."""
    writer = EvidenceWriter(directory / "evidence", "run", "v001")
    for step, group, item, grades, dead, kept, refill, lengths, formatted in TRAIN:
        rows = [
            _sample(item, "train", g, step, group, i, dead, kept, lengths[i], formatted[i])
            for i, g in enumerate(grades)
        ]
        writer.rollouts(rows, "train", refill_round=refill)
    for group, (item, grades) in enumerate(EVAL):
        rows = [
            _sample(item, "eval", g, 4, group, i, True, True, 2, 1) for i, g in enumerate(grades)
        ]
        writer.rollouts(rows, "eval")
    measured = zip((0.9, 0.6, 0.4, 0.1), (1.0, 2.0, 12.0, float("nan")), strict=True)
    for step, (entropy, norm) in enumerate(measured):
        writer.update(
            {
                "step": step,
                "entropy": entropy,
                "grad_norm": norm,
                "clip_high": (0.0, 0.1, 0.2, 0.9)[step],
                "clip_low": 0.0,
                "ratio_max": (1.0, 1.5, 1.25, 9.0)[step],
                "clip_dual": (0.0, 0.03, 0.06, 0.9)[step],
                "mismatch_k1": (-0.001, 0.002, 0.005, 9.0)[step],
                "mismatch_k3": (0.001, 0.002, 0.003, 9.0)[step],
                "mismatch_max": (0.1, 0.3, 0.2, 9.0)[step],
                "ess": (1.0, 0.9, 0.8, 0.1)[step],
                "correction_kept": (1.0, 0.9, 0.95, 0.0)[step],
                "correction_truncated": (0.0, 0.2, 0.1, 1.0)[step],
                "kl_k1": (float("nan"), 0.01, -0.02, float("nan"))[step],
                "kl_k3": (float("nan"), 0.03, 0.04, float("nan"))[step],
                "policy_age_max": (0.0, 1.0, 2.0, 1.0)[step],
                "tokens": 10 * (step + 1),
                "useful_tokens": (5, 10, 20, 0)[step],
                "tokens_packed": (30, 40, 50, 0)[step],
                "tokens_padded": (40, 60, 60, 0)[step],
                "live_groups": (1, 1, 2, 0)[step],
                "groups_filtered": (0, 0, 1, 0)[step],
                "shortfall": (1, 1, 0, 2)[step],
                "skipped": step == 3,
                "skipped_steps": 2 * (step == 3),
            }
        )
    writer.flush("all")
    return load(directory)
