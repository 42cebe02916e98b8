"""Norms, projections and attention with backward passes written out.

Automatic differentiation gives the same numbers, but leaves the order of operands to the compiler,
which then copies the largest arrays into transposed layouts. Here every product names its
contraction, and sums over rows are products too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from evojax.policy.adapted import Weight, to_weight, whole
from evojax.policy.products import across, as_bits, dot, from_bits, pair_dot, row_sums

MASKED = -1e30  # finite: a row that may attend to nothing must not turn into NaN


def with_backward(
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[..., Any],
    static: tuple[int, ...] = (),
) -> Any:
    """A function whose derivative is written out.

    Args:
        forward: gives the result and what the backward pass keeps.
        backward: (static arguments, what was kept, cotangent) -> cotangents of the others.
        static: places of arguments that are no arrays.
    """
    rule = jax.custom_vjp(lambda *inputs: forward(*inputs)[0], nondiff_argnums=static)

    def keep(*inputs: Any) -> tuple[Any, Any]:
        out, kept = forward(*inputs)
        return out, jax.tree.map(as_bits, kept)

    def back(*inputs: Any) -> Any:
        *settings, kept, given = inputs
        return backward(*settings, jax.tree.map(from_bits, kept), given)

    rule.defvjp(keep, back)
    return rule


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axis.

    Args:
        x: ``[..., D]``. scale: ``[D]``. eps: added to the mean square.
    """
    return _rms_norm_rule(x, scale, eps)


def _rms_norm(
    x: jax.Array, scale: jax.Array, eps: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    inverse = jax.lax.rsqrt(row_sums(x * x)[..., None] / x.shape[-1] + eps)
    wide = jnp.expand_dims(scale, tuple(range(x.ndim - 1)))
    return x * inverse * wide, (x, inverse, scale)


def _rms_norm_back(
    eps: float, kept: tuple[jax.Array, jax.Array, jax.Array], given: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, inverse, scale = kept
    width = x.shape[-1]
    normed = x * inverse
    scaled = given * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))
    along = row_sums(scaled * normed)[..., None] / width
    per_row = (given * normed).reshape(-1, width)
    to_scale = dot(jnp.ones((per_row.shape[0],), x.dtype), per_row, 0, 0)
    return inverse * (scaled - normed * along), to_scale


_rms_norm_rule = with_backward(_rms_norm, _rms_norm_back, static=(2,))


def project(x: jax.Array, weights: tuple[Weight, ...], dtype: str) -> tuple[jax.Array, ...]:
    """``x @ w`` for several weights; one copy of ``x`` is kept for the backward pass of all.

    Args:
        x: ``[..., D]``. weights: ``[D, F]`` each, plain or adapted.
        dtype: of the products' operands, forward and backward; sums and results are float32.

    >>> weights = jnp.ones((3, 4)), jnp.ones((3, 1))
    >>> [y.shape for y in project(jnp.ones((2, 3)), weights, "float32")]
    [(2, 4), (2, 1)]
    """
    return _project_rule(x, weights, dtype)


def _project(
    x: jax.Array, weights: tuple[Weight, ...], dtype: str
) -> tuple[tuple[jax.Array, ...], Any]:
    flat = x.reshape(-1, x.shape[-1]).astype(dtype)
    out = tuple(dot(flat, whole(w).astype(dtype), 1, 0) for w in weights)
    return tuple(y.reshape(*x.shape[:-1], -1) for y in out), (flat, weights)


def _project_back(dtype: str, kept: Any, given: tuple[jax.Array, ...]) -> Any:
    flat, weights = kept
    rows = [g.reshape(-1, g.shape[-1]).astype(dtype) for g in given]
    parts = [dot(g, whole(w).astype(dtype), 1, 1) for g, w in zip(rows, weights, strict=True)]
    to_weights = tuple(to_weight(w, flat, g) for g, w in zip(rows, weights, strict=True))
    return sum(parts[1:], parts[0]).reshape(*given[0].shape[:-1], -1), to_weights


_project_rule = with_backward(_project, _project_back, static=(2,))


def gated_mlp(x: jax.Array, gate: Weight, up: Weight, down: Weight, dtype: str) -> jax.Array:
    """``(silu(x @ gate) * (x @ up)) @ down``.

    In float32 the inner product is computed again going back. In bfloat16 it is kept: it is small,
    and XLA would compute it in the order of the transposed copy that its product needs.

    Args:
        x: ``[..., D]``. gate, up: ``[D, F]``. down: ``[F, D]``. The rest: see ``project``.
    """
    return _gated_rule(x, gate, up, down, dtype)


def _gated(
    x: jax.Array, gate: Weight, up: Weight, down: Weight, dtype: str
) -> tuple[jax.Array, Any]:
    flat = x.reshape(-1, x.shape[-1]).astype(dtype)
    a, b = (dot(flat, whole(w).astype(dtype), 1, 0) for w in (gate, up))
    inner = (jax.nn.silu(a) * b).astype(dtype)
    out = dot(inner, whole(down).astype(dtype), 1, 0).reshape(x.shape)
    again = inner if inner.dtype != out.dtype else None
    return out, (flat, a.astype(dtype), b.astype(dtype), again, gate, up, down)


def _gated_back(dtype: str, kept: Any, given: jax.Array) -> Any:
    flat, a, b, inner, gate, up, down = kept
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    g = given.reshape(-1, given.shape[-1]).astype(dtype)
    open_share = jax.nn.sigmoid(a)
    silu = a * open_share
    to_inner = dot(g, whole(down).astype(dtype), 1, 1)
    to_b = (to_inner * silu).astype(dtype)
    to_a = (to_inner * b * (open_share + silu * (1.0 - open_share))).astype(dtype)
    to_x = dot(to_a, whole(gate).astype(dtype), 1, 1) + dot(to_b, whole(up).astype(dtype), 1, 1)
    return (
        to_x.reshape(given.shape),
        to_weight(gate, flat, to_a),
        to_weight(up, flat, to_b),
        to_weight(down, silu * b if inner is None else inner, g),
    )


_gated_rule = with_backward(_gated, _gated_back, static=(4,))


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: str = "float32"
) -> tuple[jax.Array, jax.Array]:
    """``softmax(q k^T) v`` and the log of the softmax's normaliser.

    The normaliser lets attention over several sets of keys be put together, see ``merge``.

    Args:
        q: ``[A, K, G, T, d]``, scaled already; G query heads share a key-value head.
        k, v: ``[A, K, S, d]``. mask: bool ``[A, T, S]``, True = may attend.
        dtype: of the products' operands.

    Returns:
        ``[A, K, G, T, d]`` and the log-normaliser ``[A, K, G, T]``, both float32. A query without
        any key gives a finite value and a log-normaliser near ``MASKED``.
    """
    return _attend_rule(q, k, v, mask, dtype)


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: str
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    a, heads, groups, length, dim = q.shape
    merged = q.reshape(a, heads, groups * length, dim).astype(dtype)
    k, v = k.astype(dtype), v.astype(dtype)
    scores = pair_dot(merged, k, 3, 3).reshape(a, heads, groups, length, -1)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / total).reshape(a, heads, groups * length, -1).astype(dtype)
    out = pair_dot(weights, v, 3, 2).reshape(q.shape)
    return (out, (top + jnp.log(total))[..., 0]), (merged, k, v, weights, out)


def _attend_back(
    dtype: str, kept: tuple[jax.Array, ...], given: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    merged, k, v, weights, out = kept
    to_out, to_norm = given
    shape = merged.shape
    g = to_out.reshape(shape).astype(dtype)
    shift = (row_sums(to_out * out) - to_norm).reshape(*shape[:3], 1)
    to_v = across(weights, g)
    to_weights = pair_dot(g, v, 3, 3)
    to_scores = (weights * (to_weights - shift)).astype(dtype)
    to_q = pair_dot(to_scores, k, 3, 2).reshape(out.shape)
    to_k = across(to_scores, merged)
    return to_q, to_k, to_v, None


_attend_rule = with_backward(_attend, _attend_back, static=(4,))


def _shares(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``exp(first), exp(second)`` divided by their sum."""
    norm = jnp.logaddexp(first, second)
    return jnp.exp(first - norm), jnp.exp(second - norm)


def merge(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Attention over the union of two disjoint sets of keys, from ``attend`` over each.

    ``out = sum_i out_i exp(norm_i) / sum_i exp(norm_i)``
    """
    return _merge_rule(first, second)


def _merge(first: Any, second: Any) -> tuple[jax.Array, Any]:
    shares = _shares(first[1], second[1])
    out = first[0] * shares[0][..., None] + second[0] * shares[1][..., None]
    return out, (first[0], second[0], shares)


def _merge_back(kept: Any, given: jax.Array) -> Any:
    one, two, (share, other) = kept
    to_norm = share * other * row_sums(given * (one - two))
    return (given * share[..., None], to_norm), (given * other[..., None], -to_norm)


_merge_rule = with_backward(_merge, _merge_back)


def grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """Query heads by the key-value head they read: ``[A, T, H, d] -> [A, K, G, T, d]``."""
    a, length, heads, dim = x.shape
    return x.reshape(a, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)


def ungrouped(x: jax.Array) -> jax.Array:
    """Back again: ``[A, K, G, T, d] -> [A, T, H, d]``."""
    a, kv, groups, length, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(a, length, kv * groups, dim)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: str = "float32"
) -> jax.Array:
    """Grouped-query attention ``softmax(q k^T / sqrt(d)) v``.

    Args:
        q: ``[B, T, H, d]``. k, v: ``[B, S, K, d]``; query head h reads head h // (H/K).
        mask: bool ``[B, T, S]``, True = may attend. A row without any True gives finite values.
        dtype: of the products' operands.

    Returns:
        float32 ``[B, T, H, d]``.
    """
    scaled = grouped(q * q.shape[-1] ** -0.5, k.shape[2])
    out, _ = attend(scaled, k.swapaxes(1, 2), v.swapaxes(1, 2), mask, dtype)
    return ungrouped(out)
