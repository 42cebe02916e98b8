"""Attention of one packed row: every token sees its ancestors in the prefix tree and itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from evojax.policy.attention import attend, grouped, merge, ungrouped
from evojax.policy.decoder import Attend


def tree_mask(subtree_end: jax.Array) -> jax.Array:
    """Who may attend to whom among the shared nodes: ``s <= t < subtree_end[s]``.

    Args:
        subtree_end: int32 ``[C]``, see ``evojax.grpo.layout``.

    Returns:
        bool ``[C, C]``, query t by key s.

    >>> tree_mask(jnp.array([3, 2, 3, 0])).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    """
    index = jnp.arange(subtree_end.shape[0])
    return (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])


def tail_mask(tail: jax.Array) -> jax.Array:
    """Who may attend to whom within a line: earlier places of the same tail.

    >>> tail_mask(jnp.array([[1, 1, 2, 0]])).astype(int).tolist()
    [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]]
    """
    width = tail.shape[1]
    same = (tail[:, :, None] == tail[:, None, :]) & (tail[:, :, None] > 0)
    return same & jnp.tril(jnp.ones((width, width), bool))[None]


def tree_attend(
    shared_end: jax.Array, parent: jax.Array, tail: jax.Array, kv_heads: int, dtype: str
) -> Attend:
    """The attention of a row laid out as ``evojax.grpo.layout.Placed``, for ``run_layers``.

    Args:
        shared_end: int32 ``[C]``. parent: int32 ``[U * W]``. tail: int32 ``[U, W]``.
        kv_heads: K. dtype: of the products' operands.
    """
    among_shared = tree_mask(shared_end)
    count, (lines, width) = shared_end.shape[0], tail.shape
    seen = among_shared[jnp.maximum(parent, 0)] & (parent >= 0)[:, None]
    among_tail = tail_mask(tail)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        q = grouped(q * q.shape[-1] ** -0.5, kv_heads)
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        keys, values = k[:, :, :count], v[:, :, :count]
        at_shared, _ = attend(q[..., :count, :], keys, values, among_shared[None], dtype)
        if not lines:
            return ungrouped(at_shared), None
        q = q[..., count:, :]
        over_shared = attend(q, keys, values, seen[None], dtype)

        def by_line(x: jax.Array) -> jax.Array:
            """``[1, ..., U*W, d] -> [U, ..., W, d]``."""
            x = x.reshape(*x.shape[:-2], lines, width, x.shape[-1])
            return jnp.moveaxis(x[0], -3, 0)

        own, norm = attend(
            by_line(q), by_line(k[:, :, count:]), by_line(v[:, :, count:]), among_tail, dtype
        )
        own = jnp.moveaxis(own, 0, -3).reshape(q.shape)
        norm = jnp.moveaxis(norm, 0, -2).reshape(q.shape[:-1])
        at_tail = merge(over_shared, (own, norm))
        return ungrouped(jnp.concatenate([at_shared, at_tail], axis=-2)), None

    return run
