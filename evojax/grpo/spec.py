"""What of the algorithm's settings is compiled in (names) and what is traced (numbers)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from evojax.config import AlgorithmConf
from evojax.grpo.optimizer import Hyper

_TRACED = ("eps_low", "eps_high", "correction_low", "correction_high", "kl_coef", "entropy_coef")
_TRACED += ("lr", "warmup_steps", "decay_steps", "lr_floor")
_TRACED += ("beta1", "beta2", "weight_decay", "grad_clip")


@dataclass(frozen=True)
class UpdateSpec:
    """The update's static half; hashable, so that it can be a static argument of ``jax.jit``.

    Args:
        objective, correction, optimizer, schedule: registered names.
        dual: the objective has a dual clip.
        kl_loss: registered name, None when the KL coefficient is 0.
        entropy: the entropy has a coefficient, hence a gradient.
        trainer_old: the ratio is against the trainer's own log-probabilities at the weights that
            sampled; otherwise against the sampler's.
        reuse_logp: those are the current ones, for there is only one optimizer step a batch:
            ``logp_old = stop_gradient(logp_cur)``, without a forward pass of its own.
        lora_scale: of the adapters, None where every weight is trained.
    """

    objective: str
    dual: bool
    correction: str
    kl_loss: str | None
    entropy: bool
    trainer_old: bool
    reuse_logp: bool
    optimizer: str
    schedule: str
    lora_scale: float | None = None

    @property
    def needs_dead(self) -> bool:
        """Whether groups with equal rewards carry a gradient (of the KL or entropy term)."""
        return self.kl_loss is not None or self.entropy

    @property
    def scores_old(self) -> bool:
        """Whether ``logp_old`` takes a forward pass of its own."""
        return self.trainer_old and not self.reuse_logp


def _reuses_logp(algorithm: AlgorithmConf) -> bool:
    one_step = algorithm.epochs * algorithm.minibatches == 1
    return algorithm.old_logprobs == "trainer" and one_step


def _has_dual(algorithm: AlgorithmConf) -> bool:
    """Only ``clip`` has a dual clip, and only a ratio that can leave 1 meets it."""
    set_here = algorithm.dual_clip is not None and algorithm.objective == "clip"
    return set_here and not _reuses_logp(algorithm)


def spec_of(algorithm: AlgorithmConf, lora_scale: float | None = None) -> UpdateSpec:
    """The static half of ``algorithm``, and the scale of adapters, if there are any.

    >>> spec = spec_of(AlgorithmConf())
    >>> spec.kl_loss, spec.needs_dead, spec.scores_old
    (None, False, False)
    >>> spec_of(AlgorithmConf(old_logprobs="trainer", epochs=2)).scores_old
    True
    """
    trainer = algorithm.old_logprobs == "trainer"
    return UpdateSpec(
        objective=algorithm.objective,
        dual=_has_dual(algorithm),
        correction=algorithm.correction if trainer else "none",  # else the ratio carries it
        kl_loss=algorithm.kl_loss if algorithm.kl_coef else None,
        entropy=algorithm.entropy_coef != 0,
        trainer_old=trainer,
        reuse_logp=_reuses_logp(algorithm),
        optimizer=algorithm.optimizer,
        schedule=algorithm.schedule,
        lora_scale=lora_scale,
    )


def hyper_of(algorithm: AlgorithmConf, temperature: float) -> Hyper:
    """The traced half of ``algorithm``: float32 scalars by name, with the sampler's temperature.

    ``dual_clip`` is there only when it acts: that it does, is static.
    """
    values = {name: getattr(algorithm, name) for name in _TRACED}
    values["temperature"] = temperature
    if _has_dual(algorithm):
        values["dual_clip"] = algorithm.dual_clip
    return {name: jnp.float32(value) for name, value in values.items()}
