"""Written-out backward passes against automatic differentiation of the plain form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evojax.policy.attention import (
    attend,
    attention,
    gated_mlp,
    grouped,
    merge,
    project,
    rms_norm,
    ungrouped,
)


def plain(q, k, v, mask):
    """Attention as it is usually written; every query has a key."""
    batch, length, heads, dim = q.shape
    groups = heads // k.shape[2]
    k, v = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * dim**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def inputs(seed=0, batch=2, length=5, keys=7, heads=6, kv=2, dim=4):
    draws = jax.random.split(jax.random.key(seed), 4)
    q = jax.random.normal(draws[0], (batch, length, heads, dim))
    k = jax.random.normal(draws[1], (batch, keys, kv, dim))
    v = jax.random.normal(draws[2], (batch, keys, kv, dim))
    mask = jax.random.bernoulli(draws[3], 0.5, (batch, length, keys)).at[..., 0].set(True)
    return q, k, v, mask


def test_value_and_gradient_equal_the_plain_form():
    q, k, v, mask = inputs()
    weights = jax.random.normal(jax.random.key(9), q.shape)

    def total(form):
        return lambda *qkv: jnp.sum(form(*qkv, mask) * weights)

    np.testing.assert_allclose(attention(q, k, v, mask), plain(q, k, v, mask), atol=1e-5)
    found = jax.grad(total(attention), argnums=(0, 1, 2))(q, k, v)
    expected = jax.grad(total(plain), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_two_sets_of_keys_merge_into_one_attention():
    q, k, v, mask = inputs()
    mask = mask.at[0, 1, :3].set(False).at[0, 1, 4].set(True)  # one query has no key in part one
    q5 = grouped(q * q.shape[-1] ** -0.5, 2)
    weights = jax.random.normal(jax.random.key(9), q.shape)

    def in_parts(q5, k, v):
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        first, second = (
            attend(q5, k[:, :, here], v[:, :, here], mask[..., here])
            for here in (slice(0, 3), slice(3, None))
        )
        return jnp.sum(ungrouped(merge(first, second)) * weights)

    def whole(q5, k, v):
        return jnp.sum(plain(ungrouped(q5) * q.shape[-1] ** 0.5, k, v, mask) * weights)

    value, found = jax.value_and_grad(in_parts, argnums=(0, 1, 2))(q5, k, v)
    expected_value, expected = jax.value_and_grad(whole, argnums=(0, 1, 2))(q5, k, v)
    assert float(value) == pytest.approx(float(expected_value), abs=1e-4)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_query_without_keys_is_finite_in_both_directions():
    q, k, v, mask = inputs()
    mask = mask.at[1, 2].set(False)

    def total(q, k, v):
        return jnp.sum(attention(q, k, v, mask))

    out, grads = jax.value_and_grad(total, argnums=(0, 1, 2))(q, k, v)
    assert np.isfinite(out)
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 4e-2)])
def test_products_and_their_gradients(dtype, tolerance):
    draws = jax.random.split(jax.random.key(0), 5)
    x, target = (jax.random.normal(d, (2, 3, 8)) for d in draws[:2])
    gate, up = (jax.random.normal(d, (8, 6)) * 8**-0.5 for d in draws[2:4])
    down = jax.random.normal(draws[4], (6, 8)) * 6**-0.5

    def written_out(x, gate, up, down):
        first, second = project(x, (gate, up), dtype)
        assert first.dtype == second.dtype == jnp.float32
        (back,) = project(first - second, (down,), dtype)
        return jnp.mean((gated_mlp(x, gate, up, down, dtype) + back - target) ** 2)

    def plain_form(x, gate, up, down):
        first, second = x @ gate, x @ up
        out = (jax.nn.silu(first) * second) @ down + (first - second) @ down
        return jnp.mean((out - target) ** 2)

    inputs = (x, gate, up, down)
    found = jax.value_and_grad(written_out, argnums=(0, 1, 2, 3))(*inputs)
    expected = jax.value_and_grad(plain_form, argnums=(0, 1, 2, 3))(*inputs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=tolerance)


def test_norm_and_its_gradient():
    x = 3.0 * jax.random.normal(jax.random.key(0), (2, 3, 8))
    scale = 1.0 + jax.random.normal(jax.random.key(1), (8,))
    target = jax.random.normal(jax.random.key(2), x.shape)

    def plain_norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale[None, None]

    def loss(form):
        return lambda x, scale: jnp.sum(form(x, scale) * target)

    found = jax.value_and_grad(loss(lambda x, s: rms_norm(x, s, 1e-5)), argnums=(0, 1))(x, scale)
    expected = jax.value_and_grad(loss(plain_norm), argnums=(0, 1))(x, scale)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
