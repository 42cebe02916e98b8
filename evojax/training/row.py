"""The ``updates`` row of one step: what was drawn, what the update did, what it cost."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from evojax.evidence.types import Completion
from evojax.training.collect import StepRollouts

_FROM_UPDATE = ("lr", "loss", "grad_norm", "ratio_mean", "ratio_max", "clip_high", "clip_low")
_FROM_UPDATE += ("clip_dual", "correction_kept", "correction_truncated", "kl_k1", "kl_k3")
_FROM_UPDATE += ("mismatch_k1", "mismatch_k3", "mismatch_max", "ess")
_COUNTS = ("optimizer_steps", "skipped_steps", "nonfinite_consecutive", "no_signal")
_COUNTS += ("tokens_sequences", "tokens_packed", "tokens_padded")


def weights_tag(version: str, step: int) -> str:
    """Name of the weights behind ``step`` updates; completions carry it as ``policy_version``."""
    return f"{version}@{step}"


def policy_age(completions: Iterable[Completion], step: int) -> tuple[float, float]:
    """Steps that the weights moved on between sampling and update: mean over tokens, and most.

    Args:
        completions: whose ``policy_version`` is from ``weights_tag``. step: of the update.

    Returns:
        (0, 0) when every token was sampled by the weights that are updated; NaN without tokens.

    >>> ids = np.arange(3)
    >>> old, new = (Completion(ids[:n], ids, ids, "stop", f"v1@{n}") for n in (1, 3))
    >>> policy_age([old, new], 3)
    (0.5, 2.0)
    """
    ages = [
        (step - int(c.policy_version.rpartition("@")[2]), len(c.token_ids)) for c in completions
    ]
    tokens = sum(n for _, n in ages)
    if tokens == 0:
        return float("nan"), float("nan")
    return sum(a * n for a, n in ages) / tokens, float(max(a for a, n in ages if n))


def peak_rss_mb() -> float:
    """Most memory that this process has held so far, MB (10^6 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def useful_tokens(rollouts: StepRollouts) -> int:
    """Response tokens of the sequences whose advantage is not 0."""
    return sum(
        len(t.completion.token_ids) for t in rollouts.trajectories if t.kept and t.advantage != 0.0
    )


def update_row(
    rollouts: StepRollouts, metrics: Mapping[str, float], seconds: Mapping[str, float], step: int
) -> dict[str, Any]:
    """One row of the ``updates`` table, without checkpoint_s.

    Args:
        metrics: from ``BatchUpdate.run``. seconds: update_s and sync_s.
        step: update index counted from the base policy.
    """
    scored = [t.reward for t in rollouts.trajectories if np.isfinite(t.reward)]
    entropies = np.concatenate([t.completion.entropies for t in rollouts.trajectories])
    advantages = rollouts.advantages
    age_mean, age_max = policy_age((t.completion for t in rollouts.trajectories), step)
    filters = rollouts.counters()
    return {
        **{name: metrics[name] for name in _FROM_UPDATE},
        **{name: int(metrics[name]) for name in _COUNTS},
        **seconds,
        "step": step,
        "skipped": metrics["skipped_steps"] > 0,
        "entropy": float(entropies.mean()),
        "entropy_trainer": metrics["entropy"],
        "reward_mean": float(np.mean(scored)) if scored else float("nan"),
        "tokens": rollouts.tokens,
        "useful_tokens": useful_tokens(rollouts),
        "groups": int(advantages.weight.any(axis=1).sum()),
        "live_groups": int(advantages.live.sum()),
        "dead_groups": int(advantages.dead.sum()),
        "drawn_groups": len(rollouts.groups),
        "groups_filtered": int(filters["groups_filtered"]),
        "filter_emptied": bool(filters["filter_emptied"]),
        "filter_threshold": filters["filter_threshold"],
        "trajectories_filtered": int(filters["trajectories_filtered"]),
        "shortfall": rollouts.shortfall,
        "policy_version": rollouts.completions[0][0].policy_version,
        "policy_age_mean": age_mean,
        "policy_age_max": age_max,
        "rollout_s": rollouts.sample_s,
        "reward_s": rollouts.reward_s,
        "checkpoint_s": 0.0,
        "peak_rss_mb": peak_rss_mb(),
    }
