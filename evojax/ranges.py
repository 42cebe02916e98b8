"""Limits of every number of the configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Limits of a number; NaN and infinities are always outside."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        """
        >>> str(Range(0, 1, open_low=True)), str(Range(1))
        ('above 0 and at most 1', 'at least 1')
        """
        parts = []
        if self.low > -math.inf:
            parts.append(f"{'above' if self.open_low else 'at least'} {self.low:g}")
        if self.high < math.inf:
            parts.append(f"{'below' if self.open_high else 'at most'} {self.high:g}")
        return " and ".join(parts) or "a finite number"


_POSITIVE = Range(0, open_low=True)
_FROM_0, _FROM_1 = Range(0), Range(1)
_UNIT = Range(0, 1, open_low=True, open_high=True)

RANGES: dict[str, Range] = {
    "seed": _FROM_0,
    "policy.lora.rank": _FROM_0,
    "policy.lora.alpha": _POSITIVE,
    "rollout.max_batch": _FROM_1,
    "domain.train_items": _FROM_1,
    "domain.eval_items": Range(2),  # an interval over items needs two
    "domain.audit_items": _FROM_1,
    "domain.split_seed": _FROM_0,
    "domain.grader_timeout_s": _POSITIVE,
    "data.target_rate": Range(0, 1),
    "data.sharpness": Range(0, 100),  # far beyond, the weights of most items underflow to 0
    "sampling.temperature": _POSITIVE,
    "sampling.group_size": Range(2),  # one sample has nothing to be compared with
    "sampling.max_new_tokens": _FROM_1,
    "reward.clip": _POSITIVE,
    "reward.overlong_buffer": _FROM_0,
    "filter.keep": Range(0, 1, open_low=True),
    "filter.min_std": _POSITIVE,
    "filter.ema_decay": Range(0, 1, open_low=True),
    "filter.ema_warmup": _FROM_0,
    "filter.min_keep": Range(0, 1, open_high=True),  # 1 would keep every group
    "filter.refill_rounds": _FROM_0,
    "algorithm.dead_tolerance": _FROM_0,
    "algorithm.advantage_clip": _POSITIVE,
    "algorithm.eps_low": _UNIT,
    "algorithm.eps_high": _POSITIVE,  # below 1, but for cispo
    "algorithm.dual_clip": Range(1, open_low=True),
    "algorithm.correction_low": _FROM_0,
    "algorithm.correction_high": _POSITIVE,
    "algorithm.kl_coef": _FROM_0,
    "algorithm.kl_every": _FROM_1,
    "algorithm.entropy_coef": _FROM_0,
    "algorithm.epochs": _FROM_1,
    "algorithm.minibatches": _FROM_1,
    "algorithm.lr": _POSITIVE,
    "algorithm.warmup_steps": _FROM_0,
    "algorithm.decay_steps": _FROM_1,
    "algorithm.lr_floor": Range(0, 1),
    "algorithm.beta1": Range(0, 1, open_high=True),
    "algorithm.beta2": Range(0, 1, open_high=True),
    "algorithm.weight_decay": _FROM_0,
    "algorithm.grad_clip": _POSITIVE,
    "hardware.mesh.data": _FROM_1,
    "hardware.mesh.fsdp": _FROM_1,
    "hardware.mesh.tp": _FROM_1,
    "hardware.chips": _FROM_1,
    "hardware.host_chips": _FROM_1,
    "hardware.hbm_gb": _POSITIVE,
    "hardware.peak_tflops": _POSITIVE,
    "hardware.hbm_gb_s": _POSITIVE,
    "hardware.ici_gb_s": _POSITIVE,
    "plan.prompt_tokens": _FROM_1,
    "plan.timeout_s": _POSITIVE,
    "train.steps": _FROM_1,
    "train.candidate_steps": _FROM_1,
    "train.prompts_per_step": _FROM_1,
    "train.micro_batch_groups": _FROM_1,
    "train.checkpoint_every": _FROM_1,
    "train.max_nonfinite": _FROM_1,
    "eval.samples": _FROM_1,
    "eval.temperature": _POSITIVE,
    "eval.max_new_tokens": _FROM_1,
    "eval.seed": _FROM_0,
    "diagnostics.timeout_s": _POSITIVE,
    "diagnostics.memory_mb": Range(16),
    "evolution.rounds": _FROM_0,
    "evolution.candidates": _FROM_1,
    "evolution.min_backtest_gain": Range(),
    "evolution.gate.alpha": _UNIT,
    "evolution.gate.resamples": Range(100),
    "evolution.gate.min_delta": Range(),
    "evolution.gate.seed": _FROM_0,
}
