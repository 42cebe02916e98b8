"""The Engine protocol: the only thing training knows about how text is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from evojax.evidence.types import Completion


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; top-p and top-k are not offered, for the trainer scores the full softmax.

    Args:
        temperature: > 0; logits are divided by it, in the sampler and in the trainer alike.
        max_new_tokens: budget per completion, tokens.
        stop_token_ids: ids that end a completion (kept as its last token).
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


class Engine(Protocol):
    """Samples completions from the current weights."""

    def generate(
        self,
        token_prompts: Sequence[np.ndarray],
        sampling: SamplingParams,
        n: int,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """``n`` completions for each prompt, in order.

        Args:
            token_prompts: int32 ``[p_i]`` each.
            seeds: one per prompt; equal seeds, weights and sampling give equal completions,
                whatever other prompts share the batch.
        """
        ...

    def load_weights(self, params: Any, version: str) -> None:
        """Serve ``params`` from now on; later completions report ``version``."""
        ...

    def health(self) -> dict[str, Any]:
        """Version served, counters and timings so far."""
        ...
