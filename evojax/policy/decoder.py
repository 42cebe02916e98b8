"""The decoder as pure functions on a nested dict of arrays.

Weights of all layers are stacked on a leading axis ``[L, ...]``. The Flax NNX module owns the
initial values; every step of training and sampling uses the pure dictionary, which any JAX
transformation, checkpoint and exporter can walk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from evojax.policy.attention import attention, gated_mlp, project, rms_norm
from evojax.policy.hybrid import Recur, delta_mix, over_rows, segments_of
from evojax.policy.products import dot
from evojax.policy.remat import kept, rematerialised
from evojax.policy.shape import ModelConfig, RopeScaling, leaf_shapes
from evojax.policy.sharding import for_use, lookup, side_by_side

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
Step = Callable[[jax.Array, Any], tuple[jax.Array, None]]

_INIT_STD = 0.02
_DECAY = (0.01, 16.0)  # range of a delta-net head's initial decay rate


class Decoder(nnx.Module):
    """Owner of the weights: initial values, under the names and shapes of ``leaf_shapes``."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        for name, shape in leaf_shapes(cfg).items():
            if isinstance(shape, dict):
                group = {inner: _initial(inner, of, rngs) for inner, of in shape.items()}
                setattr(self, name, nnx.Dict(group))
            else:
                setattr(self, name, _initial(name, shape, rngs))

    def pure_params(self) -> Params:
        """The weights as a nested dict of arrays."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def __call__(self, tokens: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        """Logits ``[B, T, V]``; see ``hidden_states`` for the arguments."""
        params = self.pure_params()
        return lm_logits(params, self.cfg, hidden_states(params, self.cfg, tokens, positions, mask))


def _initial(name: str, shape: tuple[int, ...], rngs: nnx.Rngs) -> nnx.Param:
    """Norms at 1, biases at 0, decay rates spread evenly, everything else normal."""
    if name.endswith("norm") or name == "dt_bias":
        return nnx.Param(jnp.ones(shape, jnp.float32))
    if name.endswith("bias"):
        return nnx.Param(jnp.zeros(shape, jnp.float32))
    if name == "a_log":
        low, high = _DECAY
        rate = jax.random.uniform(rngs.params(), shape, jnp.float32, low, high)
        return nnx.Param(jnp.log(rate))
    return nnx.Param(nnx.initializers.normal(_INIT_STD)(rngs.params(), shape, jnp.float32))


def init_params(cfg: ModelConfig, seed: int) -> Params:
    """Random float32 weights: matrices normal with standard deviation 0.02, see ``_initial``."""
    return Decoder(cfg, nnx.Rngs(params=seed)).pure_params()


def param_shapes(cfg: ModelConfig) -> dict[str, Any]:
    """The tree of ``init_params`` as ``jax.ShapeDtypeStruct``; nothing is allocated."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        leaf_shapes(cfg),
        is_leaf=lambda node: isinstance(node, tuple),
    )


def rope_tables(cfg: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine ``[B, T, 1, r/2]`` of ``position * theta^(-2i/r)``, r dimensions turned.

    With ``rope_scaling`` the frequencies of long waves are divided by its factor, see
    ``stretched``.
    """
    exponent = jnp.arange(0, cfg.rotary_dim, 2, dtype=jnp.float32) / cfg.rotary_dim
    frequency = cfg.rope_theta**-exponent
    if cfg.rope_scaling:
        frequency = stretched(frequency, cfg.rope_scaling)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency[None, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def stretched(frequency: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Frequencies ``f * (s + (1 - s) / factor)``.

    ``s = (n - low) / (high - low)``, cut to [0, 1], with n waves in the original context.
    """
    waves = scaling.original_max_position * frequency / (2 * jnp.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    stays = jnp.clip((waves - low) / (high - low), 0.0, 1.0)
    return frequency * (stays + (1.0 - stays) / scaling.factor)


def _rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding in the half-rotation order: pair i is (x[i], x[i + r/2]), r turned."""
    cos, sin = rope
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(turned + ([rest] if rest.shape[-1] else []), axis=-1)


def block(
    layer: Params,
    cfg: ModelConfig,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Attend,
) -> tuple[jax.Array, Any]:
    """One layer with attention; ``attend`` decides what the queries see, cached or not.

    Args:
        layer: this layer's weights (no leading L). x: ``[B, T, D]``.
        rope: from ``rope_tables``. attend: (q, k, v) -> (mixed ``[B, T, H, d]``, extra).

    Returns:
        New ``x`` and what ``attend`` gave as extra (e.g. its keys and values).
    """
    h = rms_norm(x, layer["attn_norm"], cfg.rms_eps)
    q, k, v, gate = _heads(layer, cfg, h)
    mixed, extra = attend(kept(_rotate(q, rope)), kept(_rotate(k, rope)), kept(v))
    mixed = kept(mixed.reshape(*x.shape[:2], -1))
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate)
    (mixed,) = project(mixed, (layer["o"],), cfg.compute_dtype)
    return feed_forward(layer, cfg, x + mixed), extra


def _heads(
    layer: Params, cfg: ModelConfig, h: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Queries ``[B, T, H, d]``, keys and values ``[B, T, K, d]``, and the gate ``[B, T, H*d]``."""
    names: tuple[str, ...] = ("q", "k", "v")
    if cfg.attn_gate:
        names += ("attn_gate",)
    made = project(h, tuple(layer[name] for name in names), cfg.compute_dtype)
    flat: dict[str, jax.Array] = dict(zip(names, made, strict=True))

    def heads(name: str) -> jax.Array:
        x = flat[name]
        if cfg.qkv_bias:
            x = x + layer[f"{name}_bias"][None, None]
        x = x.reshape(*h.shape[:2], -1, cfg.head_dim)
        if cfg.qk_norm and name != "v":
            x = rms_norm(x, layer[f"{name}_norm"], cfg.rms_eps)
        return x

    return heads("q"), heads("k"), heads("v"), flat.get("attn_gate")


def feed_forward(layer: Params, cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """The second half of every layer: ``x`` plus the gated MLP of its norm, ``[B, T, D]``."""
    h = rms_norm(x, layer["mlp_norm"], cfg.rms_eps)
    return x + gated_mlp(h, layer["gate"], layer["up"], layer["down"], cfg.compute_dtype)


def linear_block(
    layer: Params, cfg: ModelConfig, x: jax.Array, recur: Recur
) -> tuple[jax.Array, Any]:
    """One layer of a hybrid without attention; ``recur`` decides what each token follows.

    Args:
        layer: this layer's weights. x: ``[B, T, D]``. recur: see ``hybrid.delta_mix``.

    Returns:
        New ``x`` and what ``recur`` gave as extra (e.g. the memory after the last token).
    """
    h = rms_norm(x, layer["attn_norm"], cfg.rms_eps)
    mixed, extra = delta_mix(layer, cfg, h, recur)
    return feed_forward(layer, cfg, x + mixed), extra


def _after_linear(linear: Step, full: Step) -> Step:
    """A step over some layers without attention and the one with attention that follows."""

    def step(x: jax.Array, layers: tuple[Params, Params]) -> tuple[jax.Array, None]:
        x, _ = jax.lax.scan(linear, x, layers[0])
        return full(x, layers[1])

    return step


def run_layers(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    recur: Recur | None = None,
) -> jax.Array:
    """Hidden states after the final norm, with tokens meeting as the caller lays them out.

    Args:
        params: from ``init_params`` or a loader.
        cfg: shape of the model.
        tokens: int32 ``[B, T]``.
        positions: int32 ``[B, T]``, position of each token within its own sequence.
        attend: see ``block``; what it gives besides is dropped.
        recur: the same for the layers of a hybrid without attention, see ``linear_block``.

    Returns:
        float32 ``[B, T, D]``.

    Raises:
        ValueError: a hybrid, and no ``recur``.
    """
    rope = rope_tables(cfg, positions)

    def full(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return block(for_use(layer), cfg, x, rope, attend)[0], None

    step, layers = rematerialised(full, cfg.remat), params["layers"]
    if cfg.linear:
        if recur is None:
            raise ValueError("a hybrid needs recur, for its layers without attention")

        def linear(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
            return linear_block(for_use(layer), cfg, x, recur)[0], None

        before = jax.tree.map(
            lambda w: w.reshape(cfg.full_layers, -1, *w.shape[1:]), params["linear_layers"]
        )
        step, layers = _after_linear(rematerialised(linear, cfg.remat), step), (before, layers)
    x, _ = jax.lax.scan(step, side_by_side(embed(params, cfg, tokens)), layers)
    return rms_norm(x, params["final_norm"], cfg.rms_eps)


def hidden_states(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """``run_layers`` with attention under one mask.

    Args:
        mask: bool ``[B, T, T]``, True where query t may attend to key s; the result is finite
            also where a row of it is empty. That of a hybrid is causal and keeps whole sequences
            apart, see ``hybrid.segments_of``.
    """
    recur = over_rows(cfg, segments_of(mask)) if cfg.linear else None
    return run_layers(
        params,
        cfg,
        tokens,
        positions,
        lambda q, k, v: (attention(q, k, v, mask, cfg.compute_dtype), None),
        recur,
    )


def embed(params: Params, cfg: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Input vectors float32 ``[..., D]`` of token ids ``[...]``."""
    return lookup(params["embed"], tokens).astype(cfg.compute_dtype).astype(jnp.float32)


def lm_logits(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Next-token logits, float32 ``[..., V]``, of hidden states ``[..., D]``."""
    matrix = params["embed"] if cfg.tie_embeddings else params["head"]
    flat = hidden.reshape(-1, hidden.shape[-1]).astype(cfg.compute_dtype)
    out = dot(flat, matrix.astype(cfg.compute_dtype), 1, int(cfg.tie_embeddings))
    return out.reshape(*hidden.shape[:-1], -1)
