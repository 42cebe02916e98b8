"""The update: one jitted function from a packed batch to new weights, its state donated."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from evojax.config import AlgorithmConf, LoraConf
from evojax.grpo.correction import effective_share
from evojax.grpo.gradient import MAXIMA, SUMS, Sums, batch_gradient
from evojax.grpo.logprobs import score
from evojax.grpo.optimizer import Hyper, learning_rate, optimizer
from evojax.grpo.pack import Packed, PackedRows
from evojax.grpo.spec import UpdateSpec, hyper_of, spec_of
from evojax.policy import sharding
from evojax.policy.decoder import ModelConfig, Params, param_shapes
from evojax.policy.lora import joined, merge, scale_of, trainable_shapes

State = dict[str, Any]

PER_TOKEN = ("entropy", "clip_high", "clip_low", "clip_dual", "correction_kept")
PER_TOKEN += ("correction_truncated", "kl_k1", "kl_k3", "mismatch_k1", "mismatch_k3")


@partial(jax.jit, static_argnames=("cfg", "spec"), donate_argnames=("state",))
def update(
    state: State,
    cfg: ModelConfig,
    spec: UpdateSpec,
    hyper: Hyper,
    rows: PackedRows,
    frozen: Params | None = None,
) -> tuple[State, Sums]:
    """One optimizer step; a gradient that is not finite leaves weights and optimizer untouched.

    Args:
        state: from ``Updater.init``; donated, its buffers hold the result, laid out alike on the
            devices of a mesh.
        hyper: float32 scalars, traced, so that arms with other values share the compilation.
        frozen: the weights that adapters change; None where every weight is trained.
    """
    params = state["params"]
    gradient, sums = batch_gradient(params, cfg, spec, hyper, rows, frozen)
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
    found = sums | {"grad_norm": norm, "lr": rate, "skipped": bad}
    return sharding.laid_out(new_state), sharding.replicated(found)


class Updater:
    """Owns the update's settings; the state is a plain pytree that travels through ``step``.

    Args:
        cfg: shape of the policy.
        algorithm: objective and optimizer settings.
        temperature: the sampling temperature of the rollouts.
        mesh: devices that state and batches are spread over; None: the default device.
        lora: adapters that are trained in place of the weights, see ``freeze``; None or rank 0:
            every weight is trained.

    Raises:
        InputError: weights that the mesh cannot cut evenly.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        algorithm: AlgorithmConf,
        temperature: float,
        *,
        mesh: Mesh | None = None,
        lora: LoraConf | None = None,
    ):
        self.cfg = cfg
        self.lora = lora if lora is not None and lora.rank > 0 else None
        self.spec = spec_of(algorithm, scale_of(self.lora) if self.lora else None)
        self.hyper = hyper_of(algorithm, temperature)
        self.mesh = mesh if mesh is not None and mesh.size > 1 else None
        self._where = self._shardings(self._shapes())
        self._reference: Params | None = None
        self._frozen: Params | None = None

    @property
    def shards(self) -> int:
        """Rows that a micro-batch must have, see ``pack``."""
        return sharding.batch_shards(self.mesh)

    def _shardings(self, shapes: Any) -> Any:
        """Where each array of a state, or of the weights, lies on the mesh."""
        if self.mesh is None:
            return None
        return sharding.shardings(shapes, self.mesh, sharding.head_units(self.cfg))

    def _shapes(self) -> State:
        shapes = trainable_shapes(self.cfg, self.lora)
        return jax.eval_shape(lambda p: _new_state(p, self.spec, self.hyper), shapes)

    def _on_mesh(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _spread(self, packed: Packed) -> PackedRows:
        """The batch's arrays on the mesh."""
        if self.mesh is None:
            return packed.rows
        return sharding.place(packed.rows, sharding.row_shardings(packed.rows, self.mesh))

    def init(self, params: Params) -> State:
        """Fresh state around a *copy* of ``params`` (the state is donated, the caller's is not).

        Keys: params, opt_state, step (optimizer steps done), nonfinite, nonfinite_consecutive
        (skipped for a gradient that was not finite) and no_signal (batches without any live
        group).
        """
        if self._where is None:
            copy = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
            return _new_state(copy, self.spec, self.hyper)
        copy = sharding.place(params, self._where["params"])
        begin = jax.jit(lambda p: _new_state(p, self.spec, self.hyper), out_shardings=self._where)
        return begin(copy)

    def abstract_state(self) -> State:
        """Shapes, types and places of the state; nothing is allocated."""
        shapes = self._shapes()
        return shapes if self._where is None else sharding.placed(shapes, self._where)

    def lower(self, state: State, packed: Packed) -> Any:
        """The update's lowered program (``jax.stages.Lowered``); nothing runs.

        Args:
            state: real or abstract. packed: a batch of the shapes to lower for.
        """
        rows = packed.rows
        if self.mesh is not None:
            rows = sharding.placed(rows, sharding.row_shardings(rows, self.mesh))
        with self._on_mesh():
            frozen = self.abstract_frozen()
            return update.lower(state, self.cfg, self.spec, self.hyper, rows, frozen)

    def abstract_frozen(self) -> Params | None:
        """Shapes, types and places of what adapters change; None without adapters."""
        if self.lora is None:
            return None
        shapes = param_shapes(self.cfg)
        where = self._shardings(shapes)
        return shapes if where is None else sharding.placed(shapes, where)

    def freeze(self, params: Params) -> None:
        """Keep the weights that the adapters change: by reference, never changed or donated."""
        where = self._shardings(param_shapes(self.cfg))
        self._frozen = params if where is None else sharding.place(params, where)

    def reference(self, params: Params) -> None:
        """Keep ``params`` as the KL reference: by reference, and never donated."""
        where = self._where
        self._reference = params if where is None else sharding.place(params, where["params"])

    def score_reference(self, packed: Packed) -> Packed:
        """``packed`` with ``logp_ref`` under the reference.

        Raises:
            RuntimeError: ``reference`` was not called.
        """
        if self._reference is None:
            raise RuntimeError("reference comes before score_reference")
        return _replaced(packed, logp_ref=self._scored(self._reference, packed))

    def score_old(self, state: State, packed: Packed) -> Packed:
        """``packed`` with ``logp_old`` under the state's weights, which must have sampled it."""
        return _replaced(packed, logp_old=self._scored(state["params"], packed))

    def _scored(self, params: Params, packed: Packed) -> np.ndarray:
        with self._on_mesh():
            rows = self._spread(packed)
            weights = joined(params, self._base(), self.spec.lora_scale)
            return np.asarray(score(weights, self.cfg, rows, self.hyper["temperature"]))

    def _base(self) -> Params | None:
        """What was frozen.

        Raises:
            RuntimeError: there are adapters, and ``freeze`` was not called.
        """
        if self.lora and self._frozen is None:
            raise RuntimeError("freeze comes before anything that adapters are used for")
        return self._frozen

    def weights(self, state: State) -> Params:
        """The state's weights whole, on a mesh in this process's memory, as engines and files want
        them; all processes of a mesh call it together."""
        params, base = state["params"], self._base()
        if self.lora and base is not None:
            params = merge(base, params, scale_of(self.lora))
        return params if self.mesh is None else sharding.local(params)

    def trained(self, state: State) -> Params:
        """What is trained, every weight or the adapters; otherwise as ``weights``."""
        params = state["params"]
        return params if self.mesh is None else sharding.local(params)

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
        with self._on_mesh():
            rows = self._spread(packed)
            state, sums = update(state, self.cfg, self.spec, self.hyper, rows, self._base())
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
