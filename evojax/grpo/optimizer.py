"""Optimizers and learning-rate schedules by name; every hyper-parameter is a traced scalar.

The names are static, the numbers are not: arms with other numbers share one compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from evojax.policy.decoder import Params
from evojax.registry import Registry

Hyper = dict[str, jax.Array]
Scaling = Callable[[Hyper], optax.GradientTransformation]
Schedule = Callable[[jax.Array, jax.Array], jax.Array]

OPTIMIZERS: Registry[Scaling] = Registry("optimizer")
SCHEDULES: Registry[Schedule] = Registry("learning-rate schedule")

_FACTORED_FROM = 128  # smaller matrices keep a full second moment


@OPTIMIZERS.register("adamw")
def adamw(hyper: Hyper) -> optax.GradientTransformation:
    """``m / (sqrt(v) + 1e-8)`` of bias-corrected moments with ``beta1``, ``beta2``.

    References:
        arXiv 1711.05101 (the decay itself is added by ``optimizer``).
    """
    return optax.scale_by_adam(b1=hyper["beta1"], b2=hyper["beta2"])


@OPTIMIZERS.register("adafactor")
def adafactor(hyper: Hyper) -> optax.GradientTransformation:
    """``g / sqrt(v)`` with ``v`` factored into row and column means, cut to a block RMS of 1.

    The second moment's decay is ``1 - t^-0.8`` and there is no first moment, hence ``beta1`` and
    ``beta2`` are not used. Steps are not scaled by the parameters' size: ``lr`` means the same as
    for the others.

    References:
        arXiv 1804.04235, sections 4, 6 and 7.
    """
    return optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=_FACTORED_FROM),
        optax.clip_by_block_rms(1.0),
    )


@OPTIMIZERS.register("lion")
def lion(hyper: Hyper) -> optax.GradientTransformation:
    """``sign(beta1 m + (1 - beta1) g)``, then ``m = beta2 m + (1 - beta2) g``.

    References:
        arXiv 2302.06675, algorithm 2.
    """
    return optax.scale_by_lion(b1=hyper["beta1"], b2=hyper["beta2"])


@SCHEDULES.register("constant")
def constant(progress: jax.Array, floor: jax.Array) -> jax.Array:
    """1 throughout."""
    return jnp.ones_like(progress)


@SCHEDULES.register("linear")
def linear(progress: jax.Array, floor: jax.Array) -> jax.Array:
    """``1 - (1 - floor) progress``."""
    return 1.0 - (1.0 - floor) * progress


@SCHEDULES.register("cosine")
def cosine(progress: jax.Array, floor: jax.Array) -> jax.Array:
    """``floor + (1 - floor) (1 + cos(pi progress)) / 2``.

    References:
        arXiv 1608.03983, equation 5 (without restarts).
    """
    return floor + (1.0 - floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def learning_rate(schedule: str, hyper: Hyper, step: jax.Array) -> jax.Array:
    """Rate of the next optimizer step: a linear warm-up times the schedule.

    ``lr * min(1, (step + 1) / warmup_steps) * f(progress, lr_floor)`` with
    ``progress = clip((step - warmup_steps) / decay_steps, 0, 1)``: the warm-up's last step has
    the full rate and ``decay_steps`` after it the rate is ``lr * lr_floor``.

    Args:
        schedule: name in ``SCHEDULES``. step: int ``[]``, optimizer steps done so far.
        hyper: needs lr, lr_floor, warmup_steps, decay_steps.
    """
    warm = jnp.minimum(1.0, (step + 1) / jnp.maximum(hyper["warmup_steps"], 1.0))
    progress = jnp.clip((step - hyper["warmup_steps"]) / hyper["decay_steps"], 0.0, 1.0)
    shape = SCHEDULES.get(schedule, "algorithm.schedule")
    return hyper["lr"] * warm * shape(progress, hyper["lr_floor"])


def _decayed(params: Params) -> Any:
    """Which leaves weight decay touches: every one but the norms' scales."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" not in jax.tree_util.keystr(path), params
    )


def optimizer(name: str, hyper: Hyper) -> optax.GradientTransformation:
    """Direction of a step, to be multiplied by the learning rate and *subtracted*.

    The gradient is cut to a global norm of ``grad_clip``, scaled by the named rule, and
    ``weight_decay * weights`` is added (decoupled, and never on the norms' scales).

    Args:
        name: in ``OPTIMIZERS``. hyper: needs grad_clip, beta1, beta2, weight_decay.
    """
    return optax.chain(
        optax.clip_by_global_norm(hyper["grad_clip"]),
        OPTIMIZERS.get(name, "algorithm.optimizer")(hyper),
        optax.add_decayed_weights(hyper["weight_decay"], mask=_decayed),
    )
