"""Attention of packed rows: every token sees its ancestors in the prefix tree and itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from evojax.policy.attention import attend, grouped, merge, ungrouped
from evojax.policy.decoder import Attend


def tree_mask(subtree_end: jax.Array) -> jax.Array:
    """Who may attend to whom among the shared nodes: ``s <= t < subtree_end[s]``.

    Args:
        subtree_end: int32 ``[A, C]``, see ``evojax.grpo.layout``.

    Returns:
        bool ``[A, C, C]``, query t by key s.

    >>> tree_mask(jnp.array([[3, 2, 3, 0]])).astype(int).tolist()
    [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]]
    """
    index = jnp.arange(subtree_end.shape[1])
    after = index[None, :, None] >= index[None, None, :]
    return after & (index[None, :, None] < subtree_end[:, None, :])


def tail_mask(tail: jax.Array) -> jax.Array:
    """Who may attend to whom within a line: earlier places of the same tail.

    >>> tail_mask(jnp.array([[1, 1, 2, 0]])).astype(int).tolist()
    [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]]
    """
    width = tail.shape[1]
    same = (tail[:, :, None] == tail[:, None, :]) & (tail[:, :, None] > 0)
    return same & jnp.tril(jnp.ones((width, width), bool))[None]


def _seen(among_shared: jax.Array, parent: jax.Array) -> jax.Array:
    """Which shared nodes each place of the lines sees, ``[A, U*W, C]``: those its parent sees."""
    above = jax.vmap(lambda mask, places: mask[places])(among_shared, jnp.maximum(parent, 0))
    return above & (parent >= 0)[..., None]


def _by_line(x: jax.Array, lines: int) -> jax.Array:
    """``[A, ..., U*W, d] -> [A*U, ..., W, d]``."""
    x = x.reshape(*x.shape[:-2], lines, -1, x.shape[-1])
    x = jnp.moveaxis(x, -3, 1)
    return x.reshape(-1, *x.shape[2:])


def _by_row(x: jax.Array, lines: int) -> jax.Array:
    """Back again, for ``[A*U, K, G, W, d]``."""
    x = x.reshape(-1, lines, *x.shape[1:])
    x = jnp.moveaxis(x, 1, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def tree_attend(
    shared_end: jax.Array, parent: jax.Array, tail: jax.Array, kv_heads: int, dtype: str
) -> Attend:
    """The attention of rows laid out as ``evojax.grpo.layout.Placed``, for ``run_layers``.

    Args:
        shared_end: int32 ``[A, C]``. parent: int32 ``[A, U * W]``. tail: int32 ``[A, U, W]``.
        kv_heads: K. dtype: of the products' operands.
    """
    among_shared = tree_mask(shared_end)
    count, (_, lines, width) = shared_end.shape[1], tail.shape
    among_tail = tail_mask(tail.reshape(tail.shape[0] * lines, width))
    seen = _seen(among_shared, parent) if count else among_shared

    def within_lines(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v = _by_line(q, lines), _by_line(k, lines), _by_line(v, lines)
        out, norm = attend(q, k, v, among_tail, dtype)
        return _by_row(out, lines), _by_row(norm[..., None], lines)[..., 0]

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        q = grouped(q * q.shape[-1] ** -0.5, kv_heads)
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        if not count:
            return ungrouped(within_lines(q, k, v)[0]), None
        keys, values = k[:, :, :count], v[:, :, :count]
        at_shared, _ = attend(q[..., :count, :], keys, values, among_shared, dtype)
        if not lines:
            return ungrouped(at_shared), None
        q = q[..., count:, :]
        over_shared = attend(q, keys, values, seen, dtype)
        at_tail = merge(over_shared, within_lines(q, k[:, :, count:], v[:, :, count:]))
        return ungrouped(jnp.concatenate([at_shared, at_tail], axis=-2)), None

    return run
