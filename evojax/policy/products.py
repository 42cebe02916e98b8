"""Matrix products whose operands keep the order they have in memory.

Operands may be rounded to bfloat16; sums are float32 always. A CPU multiplies bfloat16 in hardware
only where the contracted dimensions come as they lie in memory, and is slower than in float32
otherwise; see ``across``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

_PAIR = ((0, 1), (0, 1))  # batch dimensions: sequence and key-value head


def dot(a: jax.Array, b: jax.Array, left: int, right: int) -> jax.Array:
    """Contract dimension ``left`` of matrix a with ``right`` of matrix b, summed in float32."""
    dims = ((left,), (right,)), ((), ())
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def pair_dot(a: jax.Array, b: jax.Array, left: int, right: int) -> jax.Array:
    """``dot`` of ``[A, K, ., .]`` arrays for each of the first two dimensions."""
    dims = ((left,), (right,)), _PAIR
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def across(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a^T b``: the gradient of a weight matrix from its inputs and its outputs' cotangents.

    Args:
        a: ``[R, D]`` or ``[A, K, R, D]``. b: the same with its own last dimension.

    Returns:
        float32 ``[D, F]`` or ``[A, K, D, F]``.

    >>> across(jnp.array([[1.0], [2.0]]), jnp.array([[3.0, 1.0], [1.0, 1.0]])).tolist()
    [[5.0, 3.0]]
    """
    first = a.ndim - 2
    product = dot if first == 0 else pair_dot
    if a.dtype != jnp.bfloat16:
        return product(a, b, first, first)
    return product(_turned(a), b, first + 1, first)


def _turned(x: jax.Array) -> jax.Array:
    """The last two dimensions swapped; on a CPU also in memory.

    Without the constraint XLA folds the swap into the product, finds no bfloat16 kernel for it
    and converts both operands to float32 (a third of the speed).
    """

    def in_memory(x: jax.Array) -> jax.Array:
        return with_layout_constraint(jnp.swapaxes(x, -1, -2), Layout(tuple(range(x.ndim))))

    return lax.platform_dependent(x, cpu=in_memory, default=lambda x: jnp.swapaxes(x, -1, -2))


def row_sums(x: jax.Array) -> jax.Array:
    """Sum over the last axis as a product with ones: faster than a reduction on a CPU.

    >>> row_sums(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [3.0, 7.0]
    """
    width = x.shape[-1]
    return dot(x.reshape(-1, width), jnp.ones((width,), x.dtype), 1, 0).reshape(x.shape[:-1])


def as_bits(x: jax.Array) -> jax.Array:
    """bfloat16 as the integers with the same bits; other arrays as they are.

    On a CPU a loop that writes a part of a bfloat16 array converts all of it to float32 and back
    at every turn; a part of an array of integers is written in place.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
    """What ``as_bits`` was given.

    >>> from_bits(as_bits(jnp.ones(1, jnp.bfloat16))).tolist()
    [1.0]
    """
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
