"""Matrix products and attention with backward passes written out.

Automatic differentiation gives the same numbers, but leaves the order of operands to the compiler,
which then copies the largest arrays into transposed layouts. Here every product names its
contraction, so nothing but small arrays is ever transposed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # finite: a row that may attend to nothing must not turn into NaN
_PAIR = ((0, 1), (0, 1))  # batch dimensions: sequence and key-value head


def _dot(a: jax.Array, b: jax.Array, left: int, right: int, batch: bool = False) -> jax.Array:
    """Contract dimension ``left`` of a with ``right`` of b; sums are kept in float32."""
    dims = ((left,), (right,)), _PAIR if batch else ((), ())
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: jax.Array, weight: jax.Array, dtype: str = "float32") -> jax.Array:
    """``x @ weight``, float32 ``[..., F]``.

    Args:
        x: ``[..., D]``. weight: ``[D, F]``. dtype: of the products' operands, forward and
            backward; sums and results are float32.

    >>> project(jnp.ones((2, 3)), jnp.ones((3, 4))).tolist()[0]
    [3.0, 3.0, 3.0, 3.0]
    """
    return _project(x, weight, dtype)[0]


def _project(
    x: jax.Array, weight: jax.Array, dtype: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    flat = x.reshape(-1, x.shape[-1]).astype(dtype)
    out = _dot(flat, weight.astype(dtype), 1, 0)
    return out.reshape(*x.shape[:-1], -1), (flat, weight)


def _project_back(
    dtype: str, kept: tuple[jax.Array, jax.Array], given: jax.Array
) -> tuple[jax.Array, jax.Array]:
    flat, weight = kept
    g = given.reshape(-1, given.shape[-1]).astype(dtype)
    to_x = _dot(g, weight.astype(dtype), 1, 1).reshape(*given.shape[:-1], -1)
    return to_x, _dot(flat, g, 0, 0).astype(weight.dtype)


project.defvjp(_project, _project_back)


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
    found: Any = _attend_vjp(q, k, v, mask, dtype)
    return found[0], found[1]


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: str
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    a, heads, groups, length, dim = q.shape
    merged = q.reshape(a, heads, groups * length, dim).astype(dtype)
    k, v = k.astype(dtype), v.astype(dtype)
    scores = _dot(merged, k, 3, 3, batch=True).reshape(a, heads, groups, length, -1)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / total).reshape(a, heads, groups * length, -1).astype(dtype)
    out = _dot(weights, v, 3, 2, batch=True).reshape(q.shape)
    return (out, (top + jnp.log(total))[..., 0]), (merged, k, v, weights, out)


def _attend_back(
    dtype: str, kept: tuple[jax.Array, ...], given: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    merged, k, v, weights, out = kept
    to_out, to_norm = given
    shape = merged.shape
    g = to_out.reshape(shape).astype(dtype)
    shift = (jnp.sum(to_out * out, axis=-1) - to_norm).reshape(*shape[:3], 1)
    to_v = _dot(weights, g, 2, 2, batch=True)
    to_weights = _dot(g, v, 3, 3, batch=True)
    to_scores = (weights * (to_weights - shift)).astype(dtype)
    to_q = _dot(to_scores, k, 3, 2, batch=True).reshape(out.shape)
    to_k = _dot(to_scores, merged, 2, 2, batch=True)
    return to_q, to_k, to_v, None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_vjp(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: str) -> Any:
    return _attend(q, k, v, mask, dtype)[0]


_attend_vjp.defvjp(_attend, _attend_back)


def merge(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Attention over the union of two disjoint sets of keys, from ``attend`` over each.

    ``out = sum_i out_i exp(norm_i - norm)`` with ``norm = log(exp(norm_1) + exp(norm_2))``.
    """
    norm = jnp.logaddexp(first[1], second[1])
    parts = [out * jnp.exp(log_norm - norm)[..., None] for out, log_norm in (first, second)]
    return parts[0] + parts[1]


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
