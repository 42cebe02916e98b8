"""What one rollout is made of: item, completion, grade, trajectory.

These types are the ground floor of the house: every other package may import them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Split = Literal["train", "eval", "audit"]
FinishReason = Literal["stop", "length", "abort"]
GradeStatus = Literal["correct", "wrong", "unscorable"]


@dataclass(frozen=True)
class Item:
    """One problem.

    Args:
        id: stable identifier, e.g. ``add_sub/3+4``; twins (3 + 4, 4 + 3) share one canonical id.
        task: family name, e.g. ``add_sub``.
        prompt: text that the policy completes (the few-shot examples included).
        answer: the reference answer as text; never shown to the policy.
        split: train, eval or audit; the three are disjoint by ``id``.
        grader: registered name of the grader that judges completions of this item.
        stop: texts that end a completion, e.g. a newline.
        chat: messages instead of a plain prompt (rendered by the chat template); None for plain.
    """

    id: str
    task: str
    prompt: str
    answer: str
    split: Split
    grader: str
    stop: tuple[str, ...] = ("\n",)
    chat: tuple[dict[str, str], ...] | None = None


@dataclass(frozen=True)
class Completion:
    """What an engine returned for one sample. Token in, token out: ids are never re-encoded.

    Args:
        token_ids: sampled ids, the stop token included when one was sampled, int32 ``[n]``.
        logprobs: nats under the *sampling* distribution, float32 ``[n]``, finite and <= 0.
        entropies: entropy of the sampling distribution per token, nats, float32 ``[n]``.
        finish_reason: stop, length (budget used up) or abort (never scored).
        policy_version: version tag of the weights that wrote it.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    finish_reason: FinishReason
    policy_version: str


@dataclass(frozen=True)
class Grade:
    """A grader's answer. Unscorable is not wrong: it is left out of every mean.

    Args:
        status: correct, wrong or unscorable.
        extracted: the answer read from the completion, "" when none was found.
        detail: why, in a few words (shown in the evidence).
    """

    status: GradeStatus
    extracted: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Trajectory:
    """One row of the ``rollouts`` table before it is written.

    Args:
        prompt_ids: int32 ``[p]``; completion: the sampled part.
        text: decoded completion (for reading and grading only).
        reward: composed reward, NaN when unscorable.
        components: value of each reward component, unweighted.
        features: behaviour features by name (numbers only).
        group: index of the group within the step; sample: index within the group.
        seed: seed of this sample's random stream.
        advantage: group-normalised advantage, 0 in eval.
        kept: False when a filter left the trajectory out of the update.
    """

    item: Item
    prompt_ids: np.ndarray
    completion: Completion
    text: str
    grade: Grade
    reward: float
    step: int
    group: int
    sample: int
    seed: int
    components: dict[str, float] = field(default_factory=dict)
    features: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    kept: bool = True

    @property
    def truncated(self) -> bool:
        """Whether the token budget cut it off; without a stop rule every length is complete."""
        has_stop_rule = bool(self.item.stop) or self.item.chat is not None
        return self.completion.finish_reason == "length" and has_stop_rule
