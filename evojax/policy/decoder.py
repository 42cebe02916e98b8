"""The decoder (Llama family) as pure functions on a nested dict of arrays.

Weights of all layers are stacked on a leading axis ``[L, ...]``. The Flax NNX module owns the
shapes and the initial values; every step of training and sampling uses the pure dictionary, which
any JAX transformation, checkpoint and exporter can walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from evojax.policy.attention import attention, gated_mlp, project, rms_norm
from evojax.policy.products import dot

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

DTYPES = ("float32", "bfloat16")
_INIT_STD = 0.02


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder; hashable, so that it can be a static argument of ``jax.jit``.

    Args:
        vocab_size: V. hidden_size: D. intermediate_size: F. num_layers: L.
        num_heads: query heads H. num_kv_heads: key and value heads K; H is a multiple of K.
        head_dim: d, even (rotary embedding turns pairs).
        rope_theta: base of the rotary frequencies. rms_eps: epsilon of the norms.
        max_position: longest sequence, tokens.
        tie_embeddings: the output matrix is the embedding.
        compute_dtype: float32 or bfloat16; every matrix, the embedding too, and what it is
            multiplied with is rounded to it first. Stored weights, sums, norms, softmax and the
            stream between the layers stay float32.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    max_position: int
    tie_embeddings: bool = True
    compute_dtype: str = "float32"

    def faults(self) -> list[str]:
        """Everything that makes this shape impossible, one sentence each; empty when sound.

        >>> ModelConfig(8, 8, 8, 1, 3, 2, 5, 1e4, 1e-5, 16).faults()
        ['num_heads 3 is not a multiple of num_kv_heads 2', 'head_dim 5 is odd']
        """
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        sizes += ("num_kv_heads", "head_dim", "max_position", "rope_theta", "rms_eps")
        found = [f"{n} {getattr(self, n)} is not above 0" for n in sizes if getattr(self, n) <= 0]
        if not found and self.num_heads % self.num_kv_heads:
            found.append(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            found.append(f"head_dim {self.head_dim} is odd")
        if self.compute_dtype not in DTYPES:
            found.append(f"compute_dtype {self.compute_dtype} is not one of {', '.join(DTYPES)}")
        return found


class Decoder(nnx.Module):
    """Owner of the weights: shapes, names and initial values.

    Names and shapes: ``embed [V, D]``, ``final_norm [D]``, ``head [D, V]`` (untied only) and
    ``layers``: ``attn_norm, mlp_norm [L, D]``, ``q [L, D, H*d]``, ``k, v [L, D, K*d]``,
    ``o [L, H*d, D]``, ``gate, up [L, D, F]``, ``down [L, F, D]``.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        depth, width, inner = cfg.num_layers, cfg.hidden_size, cfg.intermediate_size
        heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        normal = nnx.initializers.normal(_INIT_STD)

        def drawn(*shape: int) -> nnx.Param:
            return nnx.Param(normal(rngs.params(), shape, jnp.float32))

        def ones(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.ones(shape, jnp.float32))

        self.cfg = cfg
        self.embed = drawn(cfg.vocab_size, width)
        self.final_norm = ones(width)
        if not cfg.tie_embeddings:
            self.head = drawn(width, cfg.vocab_size)
        self.layers = nnx.Dict(
            attn_norm=ones(depth, width),
            q=drawn(depth, width, heads),
            k=drawn(depth, width, kv),
            v=drawn(depth, width, kv),
            o=drawn(depth, heads, width),
            mlp_norm=ones(depth, width),
            gate=drawn(depth, width, inner),
            up=drawn(depth, width, inner),
            down=drawn(depth, inner, width),
        )

    def pure_params(self) -> Params:
        """The weights as a nested dict of arrays."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def __call__(self, tokens: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        """Logits ``[B, T, V]``; see ``hidden_states`` for the arguments."""
        params = self.pure_params()
        return lm_logits(params, self.cfg, hidden_states(params, self.cfg, tokens, positions, mask))


def init_params(cfg: ModelConfig, seed: int) -> Params:
    """Random float32 weights: normal with standard deviation 0.02, norms at 1."""
    return Decoder(cfg, nnx.Rngs(params=seed)).pure_params()


def param_shapes(cfg: ModelConfig) -> dict[str, Any]:
    """The tree of ``init_params`` as ``jax.ShapeDtypeStruct``; nothing is allocated."""
    return jax.eval_shape(lambda: init_params(cfg, 0))


def rope_tables(cfg: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine ``[B, T, 1, d/2]`` of ``position * theta^(-2i/d)``."""
    exponent = jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim
    frequency = (cfg.rope_theta**-exponent)[None, None, None]
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding in the half-rotation order: pair i is (x[i], x[i + d/2])."""
    cos, sin = rope
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def block(
    layer: Params,
    cfg: ModelConfig,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Attend,
) -> tuple[jax.Array, Any]:
    """One layer; ``attend`` decides what the queries see, so full and cached forms share it.

    Args:
        layer: this layer's weights (no leading L). x: ``[B, T, D]``.
        rope: from ``rope_tables``. attend: (q, k, v) -> (mixed ``[B, T, H, d]``, extra).

    Returns:
        New ``x`` and what ``attend`` gave as extra (e.g. its keys and values).
    """
    batch, length, _ = x.shape
    dtype = cfg.compute_dtype
    h = rms_norm(x, layer["attn_norm"], cfg.rms_eps)
    q, k, v = project(h, (layer["q"], layer["k"], layer["v"]), dtype)
    q = q.reshape(batch, length, cfg.num_heads, cfg.head_dim)
    k = k.reshape(batch, length, cfg.num_kv_heads, cfg.head_dim)
    v = v.reshape(batch, length, cfg.num_kv_heads, cfg.head_dim)
    mixed, extra = attend(_rotate(q, rope), _rotate(k, rope), v)
    (mixed,) = project(mixed.reshape(batch, length, -1), (layer["o"],), dtype)
    x = x + mixed
    h = rms_norm(x, layer["mlp_norm"], cfg.rms_eps)
    return x + gated_mlp(h, layer["gate"], layer["up"], layer["down"], dtype), extra


def run_layers(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    *,
    remat: bool = False,
) -> jax.Array:
    """Hidden states after the final norm, with attention as the caller lays it out.

    Args:
        params: from ``init_params`` or a loader.
        cfg: shape of the model.
        tokens: int32 ``[B, T]``.
        positions: int32 ``[B, T]``, position of each token within its own sequence.
        attend: see ``block``; what it gives besides is dropped.
        remat: recompute each layer in the backward pass instead of keeping its activations.

    Returns:
        float32 ``[B, T, D]``.
    """
    rope = rope_tables(cfg, positions)

    def step(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return block(layer, cfg, x, rope, attend)[0], None

    x = embed(params, cfg, tokens)
    x, _ = jax.lax.scan(jax.checkpoint(step) if remat else step, x, params["layers"])
    return rms_norm(x, params["final_norm"], cfg.rms_eps)


def hidden_states(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    *,
    remat: bool = False,
) -> jax.Array:
    """``run_layers`` with attention under one mask.

    Args:
        mask: bool ``[B, T, T]``, True where query t may attend to key s; the result is finite
            also where a row of it is empty.
    """
    return run_layers(
        params,
        cfg,
        tokens,
        positions,
        lambda q, k, v: (attention(q, k, v, mask, cfg.compute_dtype), None),
        remat=remat,
    )


def embed(params: Params, cfg: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Input vectors float32 ``[..., D]`` of token ids ``[...]``."""
    return params["embed"][tokens].astype(cfg.compute_dtype).astype(jnp.float32)


def lm_logits(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Next-token logits, float32 ``[..., V]``, of hidden states ``[..., D]``."""
    matrix = params["embed"] if cfg.tie_embeddings else params["head"]
    flat = hidden.reshape(-1, hidden.shape[-1]).astype(cfg.compute_dtype)
    out = dot(flat, matrix.astype(cfg.compute_dtype), 1, int(cfg.tie_embeddings))
    return out.reshape(*hidden.shape[:-1], -1)
