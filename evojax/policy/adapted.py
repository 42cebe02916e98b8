"""A weight matrix with a low-rank change, and the gradients of products with it.

``W' = W + scale * a b`` (LoRA, arXiv 2106.09685) with a frozen ``W``. Products use ``W'`` itself,
so that rounding to the products' type is the sampler's, who has nothing else. ``W'`` is never kept
for the backward pass: it is made again, and the gradients of ``a`` and ``b`` come from the inputs
and the outputs' cotangents directly, without a gradient of ``W'``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from evojax.policy.products import across, dot


@partial(jax.tree_util.register_dataclass, data_fields=("base", "a", "b"), meta_fields=("scale",))
@dataclass(frozen=True)
class Adapted:
    """A matrix and its change; stacked over layers or one of them.

    Args:
        base: ``[..., D, F]``, frozen. a: ``[..., D, r]``. b: ``[..., r, F]``.
        scale: of the change.
    """

    base: jax.Array
    a: jax.Array
    b: jax.Array
    scale: float


Weight = jax.Array | Adapted


def whole(weight: Weight) -> jax.Array:
    """The matrix that products are made with.

    >>> one = Adapted(jnp.zeros((2, 2)), jnp.ones((2, 1)), jnp.array([[1.0, 2.0]]), 0.5)
    >>> whole(one).tolist()
    [[0.5, 1.0], [0.5, 1.0]]
    """
    if not isinstance(weight, Adapted):
        return weight
    change = jnp.matmul(weight.a, weight.b, precision="highest")
    return weight.base + weight.scale * change


def to_weight(weight: Weight, inputs: jax.Array, given: jax.Array) -> Any:
    """Cotangent of a weight ``[D, F]`` in ``y = inputs @ weight``.

    ``inputs^T given`` for a matrix; for an adapted one ``a`` gets ``scale * inputs^T (given b^T)``
    and ``b`` gets ``scale * (inputs a)^T given``; its base gets none.

    Args:
        inputs: ``[R, D]``. given: cotangents of the outputs ``[R, F]``. Both in the products' type.
    """
    if not isinstance(weight, Adapted):
        return across(inputs, given).astype(weight.dtype)
    kind = inputs.dtype
    back = dot(given, weight.b.astype(kind), 1, 1).astype(kind)
    low = dot(inputs, weight.a.astype(kind), 1, 0).astype(kind)
    to_a, to_b = across(inputs, back), across(low, given)
    nothing: Any = None
    return Adapted(nothing, weight.scale * to_a, weight.scale * to_b, weight.scale)
