"""The update: one jitted function from a packed batch to new weights, its state donated."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from evojax.config import AlgorithmConf
from evojax.grpo.correction import effective_share
from evojax.grpo.gradient import MAXIMA, SUMS, Sums, batch_gradient
from evojax.grpo.logprobs import score
from evojax.grpo.optimizer import Hyper, learning_rate, optimizer
from evojax.grpo.pack import Packed, PackedRows
from evojax.grpo.spec import UpdateSpec, hyper_of, spec_of
from evojax.policy.decoder import ModelConfig, Params, param_shapes

State = dict[str, Any]

PER_TOKEN = ("entropy", "clip_high", "clip_low", "clip_dual", "correction_kept")
PER_TOKEN += ("correction_truncated", "kl_k1", "kl_k3", "mismatch_k1", "mismatch_k3")


@partial(jax.jit, static_argnames=("cfg", "spec"), donate_argnames=("state",))
def update(
    state: State, cfg: ModelConfig, spec: UpdateSpec, hyper: Hyper, rows: PackedRows
) -> tuple[State, Sums]:
    """One optimizer step; a gradient that is not finite leaves weights and optimizer untouched.

    Args:
        state: from ``Updater.init``; donated, its buffers hold the result.
        hyper: float32 scalars, traced, so that arms with other values share the compilation.
    """
    params = state["params"]
    gradient, sums = batch_gradient(params, cfg, spec, hyper, rows)
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"])
    rate = learning_rate(spec.schedule, hyper, state["step"])
    rule = optimizer(spec.optimizer, hyper)
    direction, opt_state = rule.update(gradient, state["opt_state"], params)
    moved = jax.tree.map(lambda p, d: p - rate * d, params, direction)

    def keep_if_finite(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    bad = 1 - finite.astype(jnp.int32)
    new_state = {
        "params": keep_if_finite(moved, params),
        "opt_state": keep_if_finite(opt_state, state["opt_state"]),
        "step": state["step"] + 1 - bad,
        "nonfinite": state["nonfinite"] + bad,
        "nonfinite_consecutive": (state["nonfinite_consecutive"] + 1) * bad,
        "no_signal": state["no_signal"],
    }
    return new_state, sums | {"grad_norm": norm, "lr": rate, "skipped": bad}


class Updater:
    """Owns the update's settings; the state is a plain pytree that travels through ``step``.

    Args:
        cfg: shape of the policy.
        algorithm: objective and optimizer settings.
        temperature: the sampling temperature of the rollouts.
        remat: recompute layers in the backward pass: less memory, more time.
    """

    def __init__(
        self, cfg: ModelConfig, algorithm: AlgorithmConf, temperature: float, *, remat: bool = False
    ):
        self.cfg = cfg
        self.spec = spec_of(algorithm, remat)
        self.hyper = hyper_of(algorithm, temperature)
        self._reference: Params | None = None

    def init(self, params: Params) -> State:
        """Fresh state around a *copy* of ``params`` (the state is donated, the caller's is not).

        Keys: params, opt_state, step (optimizer steps done), nonfinite, nonfinite_consecutive
        (skipped for a gradient that was not finite) and no_signal (batches without any live
        group).
        """
        copy = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
        return _new_state(copy, self.spec, self.hyper)

    def abstract_state(self) -> State:
        """Shapes and types of the state; nothing is allocated."""
        return jax.eval_shape(
            lambda p: _new_state(p, self.spec, self.hyper), param_shapes(self.cfg)
        )

    def lower(self, state: State, packed: Packed) -> Any:
        """The update's lowered program (``jax.stages.Lowered``); nothing runs.

        Args:
            state: real or abstract. packed: a batch of the shapes to lower for.
        """
        return update.lower(state, self.cfg, self.spec, self.hyper, packed.rows)

    def reference(self, params: Params) -> None:
        """Keep ``params`` as the KL reference: by reference, and never donated."""
        self._reference = params

    def score_reference(self, packed: Packed) -> Packed:
        """``packed`` with ``logp_ref`` under the reference.

        Raises:
            RuntimeError: ``reference`` was not called.
        """
        if self._reference is None:
            raise RuntimeError("reference comes before score_reference")
        scores = score(self._reference, self.cfg, packed.rows, self.hyper["temperature"])
        return _replaced(packed, logp_ref=np.asarray(scores))

    def score_old(self, state: State, packed: Packed) -> Packed:
        """``packed`` with ``logp_old`` under the state's weights, which must have sampled it."""
        scores = score(state["params"], self.cfg, packed.rows, self.hyper["temperature"])
        return _replaced(packed, logp_old=np.asarray(scores))

    def step(self, state: State, packed: Packed | None) -> tuple[State, dict[str, float]]:
        """Take one optimizer step; call again with the same batch for a further epoch.

        Args:
            state: is consumed (donated): use the one that comes back.
            packed: from ``pack``; None (no live group) changes nothing and is counted. Its
                ``logp_old`` must be scored when ``spec.scores_old``, its ``logp_ref`` when there
                is a KL loss.

        Returns:
            New state and metrics. Of the step: loss, grad_norm (before clipping), lr, tokens,
            skipped (1 = gradient not finite), nonfinite_consecutive, no_signal. Per packed token:
            entropy [nats], ratio_mean, ratio_max, clip_high, clip_low, clip_dual,
            correction_kept, correction_truncated, kl_k1, kl_k3 [nats, only meaningful when
            ``logp_ref`` is scored]. Trainer against sampler: mismatch_k1, mismatch_k3,
            mismatch_max [nats] and ess, the effective sample size as a share of the tokens; they
            are the policy's own drift where the weights have moved since sampling. Values that do
            not exist (no live group) are NaN.
        """
        if packed is None:
            state = state | {"no_signal": state["no_signal"] + 1}
            return state, self._no_signal(state)
        state, sums = update(state, self.cfg, self.spec, self.hyper, packed.rows)
        values = {name: float(value) for name, value in jax.device_get(sums).items()}
        return state, _metrics(values, int(state["nonfinite_consecutive"]))

    def _no_signal(self, state: State) -> dict[str, float]:
        values = dict.fromkeys((*SUMS, *MAXIMA, "grad_norm"), float("nan"))
        values |= {"tokens": 0.0, "skipped": 0.0}
        values["lr"] = float(learning_rate(self.spec.schedule, self.hyper, state["step"]))
        return _metrics(values, int(state["nonfinite_consecutive"])) | {"no_signal": 1.0}


def _replaced(packed: Packed, **arrays: np.ndarray) -> Packed:
    return Packed(packed.rows._replace(**arrays), packed.owner, packed.stats)


def _new_state(params: Params, spec: UpdateSpec, hyper: Hyper) -> State:
    counters = ("step", "nonfinite", "nonfinite_consecutive", "no_signal")
    return {
        "params": params,
        "opt_state": optimizer(spec.optimizer, hyper).init(params),
        **{name: jnp.zeros((), jnp.int32) for name in counters},
    }


def _metrics(values: dict[str, float], consecutive: int) -> dict[str, float]:
    tokens = max(values["tokens"], 1.0)
    copied = ("loss", "grad_norm", "lr", "tokens", "ratio_max", "mismatch_max", "skipped")
    return {
        **{name: values[name] for name in copied},
        **{name: values[name] / tokens for name in PER_TOKEN},
        "ratio_mean": values["ratio"] / tokens,
        "ess": effective_share(values["is_weight"], values["is_weight_square"], values["tokens"]),
        "nonfinite_consecutive": float(consecutive),
        "no_signal": 0.0,
    }
