"""The GRPO update: one jitted function from a packed batch to new weights, its state donated.

Micro-batches (rows) are summed as (sum, count) in a loop with a *traced* number of turns: dead
groups cost nothing and batches of any number of live groups share one compilation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from evojax.config import AlgorithmConf
from evojax.grpo.logprobs import row_at, row_logprobs
from evojax.grpo.objective import clipped_token_loss, masked_sum, mismatch
from evojax.grpo.pack import Packed, PackedRows
from evojax.policy.decoder import ModelConfig, Params, param_shapes

State = dict[str, Any]
Hyper = dict[str, jax.Array]
Sums = dict[str, jax.Array]

_SUMS = ("loss", "tokens", "entropy", "clip_high", "clip_low", "ratio", "k1", "k3")
_MAXIMA = ("ratio_max", "mismatch_max")


def row_loss(
    params: Params, cfg: ModelConfig, hyper: Hyper, row: PackedRows, remat: bool
) -> tuple[jax.Array, Sums]:
    """Loss of one row, divided by the batch's token count, and the sums behind the metrics.

    The ratio is against the sampler's own log-probabilities (logp_old = logp_rollout).
    """
    logp, entropy = row_logprobs(params, cfg, row, hyper["temperature"], remat)
    valid = row.response_mask
    token = clipped_token_loss(
        logp, row.logp_rollout, row.advantages, valid, hyper["eps_low"], hyper["eps_high"]
    )
    loss, tokens = masked_sum(token.loss, valid)
    drift = mismatch(row.logp_rollout, logp, valid)
    sums = {
        "loss": loss,
        "tokens": tokens,
        "entropy": masked_sum(entropy, valid)[0],
        "clip_high": masked_sum(token.clip_high, valid)[0],
        "clip_low": masked_sum(token.clip_low, valid)[0],
        "ratio": masked_sum(token.ratio, valid)[0],
        "k1": drift.k1[0],
        "k3": drift.k3[0],
        "ratio_max": jnp.max(jnp.where(valid, token.ratio, 0.0)),
        "mismatch_max": drift.max_abs,
    }
    return loss / row.token_count, jax.lax.stop_gradient(sums)


def batch_gradient(
    params: Params, cfg: ModelConfig, hyper: Hyper, rows: PackedRows, remat: bool = False
) -> tuple[Params, Sums]:
    """Gradient of ``sum of token losses / token_count`` over all rows, and the summed metrics."""

    def add_row(index: jax.Array, carry: tuple[Params, Sums]) -> tuple[Params, Sums]:
        total, sums = carry
        gradient, new = jax.grad(row_loss, has_aux=True)(
            params, cfg, hyper, row_at(rows, index), remat
        )
        merged = {name: sums[name] + new[name] for name in _SUMS}
        merged |= {name: jnp.maximum(sums[name], new[name]) for name in _MAXIMA}
        return jax.tree.map(jnp.add, total, gradient), merged

    zeros = jax.tree.map(jnp.zeros_like, params)
    nothing = {name: jnp.zeros((), jnp.float32) for name in (*_SUMS, *_MAXIMA)}
    return jax.lax.fori_loop(0, rows.rows, add_row, (zeros, nothing))


def _decayed(params: Params) -> Any:
    """Which leaves weight decay touches: every one but the norms' scales."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" not in jax.tree_util.keystr(path), params
    )


def _optimizer(hyper: Hyper) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(hyper["grad_clip"]),
        optax.scale_by_adam(b1=hyper["beta1"], b2=hyper["beta2"]),
        optax.add_decayed_weights(hyper["weight_decay"], mask=_decayed),
    )


def learning_rate(hyper: Hyper, step: jax.Array) -> jax.Array:
    """``lr * min(1, (step + 1) / warmup_steps)``; step counts updates done so far."""
    return hyper["lr"] * jnp.minimum(1.0, (step + 1) / jnp.maximum(hyper["warmup_steps"], 1.0))


@partial(jax.jit, static_argnames=("cfg", "remat"), donate_argnames=("state",))
def update(
    state: State, cfg: ModelConfig, hyper: Hyper, rows: PackedRows, remat: bool = False
) -> tuple[State, Sums]:
    """One optimizer step; a gradient that is not finite leaves weights and optimizer untouched.

    Args:
        state: from ``Updater.init``; donated, its buffers hold the result.
        hyper: float32 scalars, traced, so that arms with other values share the compilation.
    """
    params = state["params"]
    gradient, sums = batch_gradient(params, cfg, hyper, rows, remat)
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"])
    rate = learning_rate(hyper, state["step"])
    direction, opt_state = _optimizer(hyper).update(gradient, state["opt_state"], params)
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
        self.remat = remat
        names = ("lr", "warmup_steps", "beta1", "beta2", "weight_decay", "grad_clip")
        values = {name: getattr(algorithm, name) for name in (*names, "eps_low", "eps_high")}
        values["temperature"] = temperature
        self.hyper: Hyper = {name: jnp.float32(value) for name, value in values.items()}

    def init(self, params: Params) -> State:
        """Fresh state around a *copy* of ``params`` (the state is donated, the caller's is not).

        Keys: params, opt_state, step (updates done), nonfinite, nonfinite_consecutive (skipped
        for a gradient that was not finite) and no_signal (batches without any live group).
        """
        return _new_state(jax.tree.map(lambda p: jnp.array(p, copy=True), params), self.hyper)

    def abstract_state(self) -> State:
        """Shapes and types of the state; nothing is allocated."""
        return jax.eval_shape(lambda p: _new_state(p, self.hyper), param_shapes(self.cfg))

    def step(self, state: State, packed: Packed | None) -> tuple[State, dict[str, float]]:
        """Take one optimizer step; call again with the same batch for a further epoch.

        Args:
            state: is consumed (donated): use the one that comes back.
            packed: from ``pack``; None (no live group) changes nothing and is counted.

        Returns:
            New state and metrics: loss (global token mean), grad_norm (before clipping), lr,
            tokens, skipped (1 = gradient not finite), nonfinite_consecutive, no_signal (this
            batch); per packed token: entropy [nats], clip_high, clip_low, ratio_mean, ratio_max
            and mismatch_k1, mismatch_k3, mismatch_max [nats]: the trainer's distance from the
            sampler on the first epoch, the policy's own drift on later ones. Values that do not
            exist (no live group) are NaN.
        """
        if packed is None:
            state = state | {"no_signal": state["no_signal"] + 1}
            return state, self._no_signal(state)
        state, sums = update(state, self.cfg, self.hyper, packed.rows, self.remat)
        values = {name: float(value) for name, value in jax.device_get(sums).items()}
        consecutive = int(state["nonfinite_consecutive"])
        return state, _metrics(values, float(packed.rows.token_count), consecutive)

    def _no_signal(self, state: State) -> dict[str, float]:
        metrics = _metrics(
            dict.fromkeys((*_SUMS, *_MAXIMA, "grad_norm"), float("nan"))
            | {"tokens": 0.0, "skipped": 0.0}
            | {"lr": float(learning_rate(self.hyper, state["step"]))},
            1.0,
            int(state["nonfinite_consecutive"]),
        )
        return metrics | {"no_signal": 1.0}


def _new_state(params: Params, hyper: Hyper) -> State:
    counters = ("step", "nonfinite", "nonfinite_consecutive", "no_signal")
    return {
        "params": params,
        "opt_state": _optimizer(hyper).init(params),
        **{name: jnp.zeros((), jnp.int32) for name in counters},
    }


def _metrics(values: dict[str, float], token_count: float, consecutive: int) -> dict[str, float]:
    per_token = max(values["tokens"], 1.0)
    return {
        "loss": values["loss"] / token_count,
        "grad_norm": values["grad_norm"],
        "lr": values["lr"],
        "tokens": values["tokens"],
        "entropy": values["entropy"] / per_token,
        "clip_high": values["clip_high"] / per_token,
        "clip_low": values["clip_low"] / per_token,
        "ratio_mean": values["ratio"] / per_token,
        "ratio_max": values["ratio_max"],
        "mismatch_k1": values["k1"] / per_token,
        "mismatch_k3": values["k3"] / per_token,
        "mismatch_max": values["mismatch_max"],
        "skipped": values["skipped"],
        "nonfinite_consecutive": float(consecutive),
        "no_signal": 0.0,
    }
