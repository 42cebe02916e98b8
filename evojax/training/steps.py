"""One batch of rollouts, as many optimizer steps as epochs and minibatches ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evojax.config import AlgorithmConf, EvojaxConf
from evojax.grpo.pack import Packed, carry_scores, pack
from evojax.grpo.update import PER_TOKEN, Updater
from evojax.training.collect import StepRollouts
from evojax.training.seeds import stream

State = dict[str, Any]
Metrics = dict[str, float]

_AT_SAMPLING = ("mismatch_k1", "mismatch_k3", "ess")
_MEANS = (*(name for name in PER_TOKEN if name not in _AT_SAMPLING), "loss", "ratio_mean")
_PACKING = ("tokens_sequences", "tokens_packed", "tokens_padded")


def measures_kl(algorithm: AlgorithmConf, done: int, steps: int) -> bool:
    """Whether a step measures its distance from the weights that the version started from.

    Every step when the KL is in the loss, else every ``kl_every``-th and the last.

    Args:
        done: steps of the version before this one. steps: of the version in all.

    >>> [n for n in range(10) if measures_kl(AlgorithmConf(kl_every=4), n, 10)]
    [3, 7, 9]
    """
    return algorithm.kl_coef > 0 or (done + 1) % algorithm.kl_every == 0 or done + 1 == steps


@dataclass(frozen=True)
class BatchUpdate:
    """Takes the optimizer steps of one batch of rollouts.

    Log-probabilities under the policy that sampled and under the KL reference are scored once,
    before the first step; minibatches in whatever order then take them along.

    Args:
        updater: of the version. cfg: of the arm.
    """

    updater: Updater
    cfg: EvojaxConf

    def run(
        self, state: State, rollouts: StepRollouts, step: int, measure_kl: bool
    ) -> tuple[State, Metrics]:
        """Update on one batch.

        Args:
            state: is consumed. step: update index counted from the base policy; it seeds the
                order of the minibatches.
            measure_kl: score the batch under the reference.

        Returns:
            New state and the metrics of ``merged``; kl_k1 and kl_k3 are NaN without
            ``measure_kl``.
        """
        full = self._pack(rollouts, None)
        if full is None:
            state, metrics = self.updater.step(state, None)
            return state, merged([metrics], 1) | dict.fromkeys(_PACKING, 0.0)
        if self.updater.spec.scores_old:
            full = self.updater.score_old(state, full)
        if measure_kl:
            full = self.updater.score_reference(full)
        found: list[Metrics] = []
        at_sampling = 1
        for epoch in range(self.cfg.algorithm.epochs):
            for packed in self._minibatches(rollouts, full, step, epoch):
                state, metrics = self.updater.step(state, packed)
                found.append(metrics | {name: packed.stats[name] for name in _PACKING})
            if epoch == 0 and self.updater.spec.trainer_old:
                at_sampling = len(found)
        total = merged(found, at_sampling)
        total |= {name: sum(m[name] for m in found) for name in _PACKING}
        if not measure_kl:
            total |= {"kl_k1": float("nan"), "kl_k3": float("nan")}
        return state, total

    def _minibatches(
        self, rollouts: StepRollouts, full: Packed, step: int, epoch: int
    ) -> Iterator[Packed]:
        """The packs of one epoch; a minibatch without any gradient has none."""
        count = self.cfg.algorithm.minibatches
        if count == 1:
            yield full
            return
        groups = np.flatnonzero(rollouts.advantages.weight.any(axis=1))
        order = stream(self.cfg.seed, "minibatch", step, epoch).permutation(groups)
        for part in np.array_split(order, count):
            packed = self._pack(rollouts, part.tolist())
            if packed is not None:
                yield carry_scores(full, packed)

    def _pack(self, rollouts: StepRollouts, groups: Sequence[int] | None) -> Packed | None:
        return pack(
            rollouts.prompts,
            rollouts.completions,
            rollouts.advantages,
            self.cfg.train.micro_batch_groups,
            aggregation=self.cfg.algorithm.aggregation,
            horizon=self.cfg.sampling.max_new_tokens,
            include_dead=self.updater.spec.needs_dead,
            groups=groups,
            shards=self.updater.shards,
            share=self.updater.cfg.linear is None,
        )


def merged(steps: Sequence[Metrics], at_sampling: int) -> Metrics:
    """Metrics of several optimizer steps on one batch, as one row.

    Means are weighted by tokens, maxima are maxima, ``grad_norm`` is a plain mean, ``lr`` the
    last one; skipped steps only count as such, unless there is nothing else. The distance of
    trainer and sampler is that of the first ``at_sampling`` steps: later ones were made by
    weights that no longer are those that sampled.

    Args:
        steps: from ``Updater.step``, in order, at least one.

    Returns:
        The keys of ``Updater.step`` without ``skipped`` and ``tokens``, with ``skipped_steps`` and
        ``optimizer_steps`` (those that changed the weights) instead.
    """
    good = [m for m in steps if not m["skipped"]] or list(steps)
    sampled = [m for m in steps[:at_sampling] if not m["skipped"]] or list(steps[:at_sampling])
    skipped = sum(m["skipped"] for m in steps)
    signal = [m for m in steps if not m["no_signal"]]
    return {
        **{name: _mean(good, name) for name in _MEANS},
        **{name: _mean(sampled, name) for name in _AT_SAMPLING},
        "ratio_max": max(m["ratio_max"] for m in good),
        "mismatch_max": max(m["mismatch_max"] for m in sampled),
        "grad_norm": float(np.mean([m["grad_norm"] for m in good])),
        "lr": steps[-1]["lr"],
        "skipped_steps": skipped,
        "optimizer_steps": len(signal) - skipped,
        "nonfinite_consecutive": max(m["nonfinite_consecutive"] for m in steps),
        "no_signal": float(not signal),
    }


def _mean(steps: Sequence[Metrics], name: str) -> float:
    """Mean over tokens; without any token what the steps say (NaN)."""
    tokens = sum(m["tokens"] for m in steps)
    if tokens == 0:
        return steps[0][name]
    return sum(m[name] * m["tokens"] for m in steps) / tokens
