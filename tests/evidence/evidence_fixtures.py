"""Hand-made trajectories."""

from __future__ import annotations

import numpy as np

from evojax.evidence.types import Completion, Grade, Item, Trajectory


def make_trajectory(
    step: int = 0,
    group: int = 0,
    sample: int = 0,
    status: str = "correct",
    reward: float = 1.0,
    stop: tuple[str, ...] = ("\n",),
    reason: str = "stop",
    **extra: object,
) -> Trajectory:
    item = Item("add/3+4", "add", "3 + 4 =", "7", "train", "line", stop=stop)
    completion = Completion(
        token_ids=np.array([7, 0], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        entropies=np.array([1.0, 0.5], np.float32),
        finish_reason=reason,  # type: ignore[arg-type]
        policy_version="v001@0",
    )
    values: dict[str, object] = dict(
        item=item,
        prompt_ids=np.array([3, 9, 4], np.int32),
        completion=completion,
        text=" 7",
        grade=Grade(status, "7", ""),  # type: ignore[arg-type]
        reward=reward,
        step=step,
        group=group,
        sample=sample,
        seed=2**63 + 5,
        components={"format": 1.0, "correct": 1.0},
        features={"chars": 2.0},
    )
    return Trajectory(**(values | extra))  # type: ignore[arg-type]
