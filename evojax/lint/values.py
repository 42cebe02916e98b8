"""Other values of a setting, to be tried in turn until one shows an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from omegaconf import DictConfig

from evojax.guards import plain

Other = Callable[[Any], Iterable[Any]]


def _names(*names: str) -> Other:
    return lambda now: [name for name in names if name != now]


def _values(*values: Any) -> Other:
    return lambda now: [value for value in values if value != now]


def _scaled(*factors: float) -> Other:
    """Multiples, for a number that is not 0."""
    return lambda now: [now * factor for factor in factors]


# Values that act at once: a bound so tight that everything meets it, a filter that takes all.
# Keys that are not here get a neighbouring number, the other truth value, or an unknown name.
_OTHERS: dict[str, Other] = {
    "mode": _names("train", "evolve"),
    "policy.source": _names("random", "path"),
    "policy.compute_dtype": _names("bfloat16", "float32"),
    "policy.remat": _names("full", "dots"),
    "policy.repo": _values(None, "someone/model"),
    "policy.revision": _values(""),
    "policy.arch.family": _names("qwen2", "qwen3"),
    "policy.arch.head_dim": _values(4, 8),
    "policy.arch.rotary_share": _values(0.5, 1.0),
    "policy.arch.rope_scaling.factor": lambda now: [now * 2],
    "policy.arch.vocab_size": lambda now: [now + 8],
    "policy.arch.hidden_size": _scaled(2),
    "policy.arch.intermediate_size": _scaled(2),
    "policy.arch.num_heads": _scaled(2),
    "policy.arch.num_kv_heads": _scaled(2),
    "policy.arch.max_position": _values(4),
    "policy.lora.rank": lambda now: [0 if now else 2],
    "policy.lora.targets": _values(["v"], ["o"]),
    "rollout.max_batch": _values(1, 2),
    "domain.tasks": _values(["gcd"], ["tiny_succ"]),
    "domain.train_items": _values(1, 2),
    "domain.grader_timeout_s": _values(1e-4),
    "data.target_rate": _values(0.0, 1.0),
    "data.sharpness": _values(0.0, 20.0),
    "reward.components": lambda now: [
        {**now, name: 0.5 + now.get(name, 0.0)} for name in ("partial", "format", "correct")
    ],
    "reward.clip": _values(0.25, None),
    "filter.trajectory": _values(["truncated"], []),
    "filter.min_std": _values(100.0),
    "filter.ema_warmup": _values(0, 10_000),
    "filter.ema_decay": _values(1.0, 0.01),
    "filter.keep": _values(0.5, 0.99),
    "filter.min_keep": _values(0.99, 0.0),
    "algorithm.dead_tolerance": _values(1e6),
    "algorithm.advantage_clip": _values(0.01, None),
    "algorithm.eps_low": _values(1e-9, 0.9),
    "algorithm.eps_high": _values(1e-9, 0.9),
    "algorithm.dual_clip": _values(1.5, None),
    "algorithm.correction_low": _values(1.5),
    "algorithm.correction_high": _values(0.5),
    "algorithm.kl_coef": lambda now: [0.0 if now else 0.5],
    "algorithm.kl_every": _values(1, 2),
    "algorithm.entropy_coef": lambda now: [0.0 if now else 0.1],
    "algorithm.warmup_steps": lambda now: [now + 5],
    "algorithm.decay_steps": _values(1, 2),
    "algorithm.grad_clip": _values(1e-4),
    "train.checkpoint_every": _values(1, 2),
    "train.micro_batch_groups": _values(1, 2),
    "train.max_nonfinite": _values(1, 2),
    "diagnostics.metrics": _values(["entropy"], ["reward_spread"]),
    "diagnostics.timeout_s": _values(0.02),
    "diagnostics.memory_mb": _values(16),
    "evolution.rounds": lambda now: [now - 1 if now else 1],
    "evolution.candidates": _values(1, 2),
    "evolution.proposer": _names("random", "playbook"),
    "evolution.boundary.mutable": _values(["data"], ["filter"]),
    "evolution.gate.alpha": _values(1e-6),
    "evolution.gate.min_delta": _values(0.9),
    "evolution.min_backtest_gain": _values(10.0),
    "plan.programs": _values(["update"], ["rollout"]),
    "experiment": _values("another"),
}
_NOWHERE = "/nonexistent/evojax-lint"


def _registered(key: str) -> Iterable[str]:
    """Names that the registry of a key holds; empty for other keys."""
    from evojax.grpo.advantages import ADVANTAGES
    from evojax.grpo.aggregation import AGGREGATIONS
    from evojax.grpo.correction import CORRECTIONS
    from evojax.grpo.filters import GROUP_FILTERS
    from evojax.grpo.kl import KL_LOSSES
    from evojax.grpo.objectives import OBJECTIVES
    from evojax.grpo.optimizer import OPTIMIZERS, SCHEDULES
    from evojax.training.selection import SELECTORS

    parts: dict[str, Iterable[str]] = {
        "algorithm.advantage": ADVANTAGES,
        "algorithm.aggregation": AGGREGATIONS,
        "algorithm.correction": CORRECTIONS,
        "algorithm.kl_loss": KL_LOSSES,
        "algorithm.objective": OBJECTIVES,
        "algorithm.optimizer": OPTIMIZERS,
        "algorithm.schedule": SCHEDULES,
        "algorithm.old_logprobs": ("rollout", "trainer"),
        "data.selection": SELECTORS,
        "filter.group": GROUP_FILTERS,
    }
    return parts.get(key, ())


def others(cfg: DictConfig, leaf: str) -> list[Any]:
    """Values of ``leaf`` other than the present one, the most telling first.

    >>> from omegaconf import OmegaConf
    >>> cfg = OmegaConf.create({"seed": 3, "live": True, "algorithm": {"optimizer": "lion"}})
    >>> others(cfg, "seed"), others(cfg, "live"), others(cfg, "algorithm.optimizer")
    ([4, 2], [False], ['adafactor', 'adamw'])
    """
    now = plain(cfg, leaf)
    if leaf in _OTHERS:
        return list(_OTHERS[leaf](now))
    if names := [name for name in _registered(leaf) if name != now]:
        return names
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, int):
        return [now + 1, now - 1] if now > 1 else [now + 1]
    if isinstance(now, float):
        return [now * 0.5, now * 2] if now else [0.5, 0.1]
    return [_NOWHERE]
