"""What hybrids have in place of attention in most layers: a memory of constant size.

``delta_mix`` is the part of a gated delta-net layer that mixes tokens. How the tokens of a sequence
meet is the caller's (``Recur``), so whole rows, packed lines and single tokens share the rest.
Source: Gated Delta Networks (arXiv 2412.06464), in the form of Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from evojax.policy.attention import project, rms_norm
from evojax.policy.delta import causal_conv, conv_step, delta_step, gated_delta_rule
from evojax.policy.remat import kept
from evojax.policy.shape import LinearConfig, ModelConfig

# Of one layer, float32: the convolution's last inputs [B, kernel - 1, C], the delta rule's state
# [B, V, dk, dv].
Memory = tuple[jax.Array, jax.Array]
Recur = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

_UNIT_EPS = 1e-6  # under the root of the queries' and keys' squared length


def delta_mix(
    layer: dict[str, Any], cfg: ModelConfig, h: jax.Array, recur: Recur
) -> tuple[jax.Array, Any]:
    """What a gated delta-net layer adds to each token from those before it.

    Args:
        layer: this layer's weights. h: its normalised input ``[B, T, D]``.
        recur: (conv, qkv, log_decay, beta) -> (read ``[B, T, V, dv]``, extra), with the weights
            ``conv [C, kernel]``, their inputs ``qkv [B, T, C]`` and ``log_decay``, ``beta``
            ``[B, T, V]``; see ``over_rows`` and ``over_token``.

    Returns:
        ``[B, T, D]`` and what ``recur`` gave as extra.
    """
    dtype, linear = cfg.compute_dtype, shape_of(cfg)
    qkv, z, b, a = project(h, (layer["qkv"], layer["z"], layer["b"], layer["a"]), dtype)
    step = jax.nn.softplus(a + layer["dt_bias"][None, None])
    log_decay = -jnp.exp(layer["a_log"])[None, None] * step
    conv = layer["conv"].astype(dtype).astype(jnp.float32)
    read, extra = recur(conv, kept(qkv), log_decay, jax.nn.sigmoid(b))
    gate = jax.nn.silu(z.reshape(*z.shape[:2], linear.value_heads, linear.value_dim))
    read = rms_norm(kept(read), layer["gated_norm"], cfg.rms_eps) * gate
    return project(read.reshape(z.shape), (layer["out"],), dtype)[0], extra


def over_rows(cfg: ModelConfig, segment: jax.Array, memory: Memory | None = None) -> Recur:
    """Whole rows at once.

    Args:
        segment: int32 ``[B, T]``, number of the sequence of each token; 0 = padding.
        memory: what each row's first sequence goes on from; nothing when None.

    Returns:
        Gives the memory after each row's last token as extra.
    """
    history, state = memory if memory else (None, None)

    def run(
        conv: jax.Array, qkv: jax.Array, log_decay: jax.Array, beta: jax.Array
    ) -> tuple[jax.Array, Memory]:
        mixed, last = causal_conv(qkv, conv, segment, history)
        q, k, v = _heads(mixed, shape_of(cfg))
        read, after = gated_delta_rule(q, k, v, log_decay, beta, segment, state)
        return read, (last, after)

    return run


def over_token(cfg: ModelConfig, memory: Memory) -> Recur:
    """One token (T = 1) of every row; gives the new memory as extra."""

    def run(
        conv: jax.Array, qkv: jax.Array, log_decay: jax.Array, beta: jax.Array
    ) -> tuple[jax.Array, Memory]:
        mixed, history = conv_step(qkv[:, 0], conv, memory[0])
        q, k, v = _heads(mixed, shape_of(cfg))
        read, state = delta_step(q, k, v, log_decay[:, 0], beta[:, 0], memory[1])
        return read[:, None], (history, state)

    return run


def over_lines(cfg: ModelConfig, shared: int, tail: jax.Array) -> Recur:
    """Packed rows laid out as ``evojax.grpo.layout.Placed``, of which no node is shared.

    Args:
        shared: C, places before the lines, all padding.
        tail: int32 ``[A, U, W]``, number of the sequence in each place; 0 = padding.

    Returns:
        For arrays ``[A, C + U W, ...]``; gives None as extra.
    """
    rows, lines, width = tail.shape
    whole = over_rows(cfg, tail.reshape(rows * lines, width))

    def run(
        conv: jax.Array, qkv: jax.Array, log_decay: jax.Array, beta: jax.Array
    ) -> tuple[jax.Array, None]:
        def by_line(x: jax.Array) -> jax.Array:
            return x[:, shared:].reshape(rows * lines, width, x.shape[-1])

        read, _ = whole(conv, by_line(qkv), by_line(log_decay), by_line(beta))
        read = read.reshape(rows, lines * width, *read.shape[2:])
        return jnp.pad(read, ((0, 0), (shared, 0), (0, 0), (0, 0))), None

    return run


def segments_of(mask: jax.Array) -> jax.Array:
    """Numbers of the sequences ``[B, T]`` that a mask keeps apart; 0 where it has padding.

    Args:
        mask: bool ``[B, T, T]``, query t by key s, causal: a token sees its own sequence's earlier
            tokens and itself.

    >>> mask = jnp.array([[[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]], bool)
    >>> segments_of(mask).tolist()
    [[0, 2, 2, 4]]
    """
    itself = jnp.diagonal(mask, axis1=1, axis2=2)
    return jnp.where(itself, jnp.argmax(mask, axis=2).astype(jnp.int32) + 1, 0)


def is_linear(cfg: ModelConfig, index: int) -> bool:
    """Whether layer ``index`` is without attention: in a hybrid all but every interval-th.

    >>> linear = LinearConfig(4, 1, 1, 2, 2, 4)
    >>> cfg = ModelConfig(8, 8, 8, 8, 1, 1, 2, 1e4, 1e-6, 16, family="qwen3_5", linear=linear)
    >>> [is_linear(cfg, i) for i in range(5)]
    [True, True, True, False, True]
    """
    return cfg.linear is not None and (index + 1) % cfg.linear.interval != 0


def shape_of(cfg: ModelConfig) -> LinearConfig:
    """Shape of the layers without attention.

    Raises:
        ValueError: the model has none.
    """
    if cfg.linear is None:
        raise ValueError(f"a {cfg.family} model has no layers without attention")
    return cfg.linear


def _heads(mixed: jax.Array, linear: LinearConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``[..., C]`` after the convolution -> q, k ``[..., K, dk]`` and v ``[..., V, dv]``."""
    q, k, v = jnp.split(jax.nn.silu(mixed), (linear.keys, 2 * linear.keys), axis=-1)
    q = _unit(q.reshape(*q.shape[:-1], linear.key_heads, linear.key_dim))
    k = _unit(k.reshape(*k.shape[:-1], linear.key_heads, linear.key_dim))
    v = v.reshape(*v.shape[:-1], linear.value_heads, linear.value_dim)
    return q * linear.key_dim**-0.5, k, v


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _UNIT_EPS)
