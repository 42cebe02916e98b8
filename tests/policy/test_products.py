"""Products: the values by NumPy, and what XLA makes of them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evojax.policy.products import across, as_bits, dot, from_bits, pair_dot

DTYPES = [("float32", 1e-5), ("bfloat16", 2e-2)]


def draws(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_values_by_numpy(dtype, tolerance):
    a, b, w = draws((9, 5), (9, 7), (5, 7))
    left, right, weights = (jnp.asarray(x, dtype) for x in (a, b, w))
    scale = np.abs(a).max() * np.abs(b).max() * 9
    for found, expected in (
        (dot(left, weights, 1, 0), a @ w),
        (dot(right, weights, 1, 1), b @ w.T),
        (across(left, right), a.T @ b),
    ):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, atol=tolerance * scale)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_values_for_each_sequence_and_head(dtype, tolerance):
    a, b, k = draws((2, 3, 9, 5), (2, 3, 9, 7), (2, 3, 4, 5))
    left, right, keys = (jnp.asarray(x, dtype) for x in (a, b, k))
    scores = pair_dot(left, keys, 3, 3)
    np.testing.assert_allclose(scores, a @ np.swapaxes(k, 2, 3), atol=tolerance * 20)
    turned = across(left, right)
    np.testing.assert_allclose(turned, np.swapaxes(a, 2, 3) @ b, atol=tolerance * 40)
    assert scores.dtype == turned.dtype == jnp.float32


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the layout is a CPU's")
def test_a_bfloat16_weight_gradient_is_multiplied_as_such():
    a, b = (jnp.asarray(x, jnp.bfloat16) for x in draws((64, 32), (64, 48)))
    text = jax.jit(across).lower(a, b).compile().as_text() or ""
    (operands,) = re.findall(r" dot\(%(\S+), %(\S+)\)", text)
    for name in operands:
        assert re.search(rf"%{re.escape(name)} = bf16\[", text), name


def test_bits_come_back_and_other_types_pass():
    (x,) = draws((3, 4))
    half = jnp.asarray(x, jnp.bfloat16)
    assert as_bits(half).dtype == jnp.uint16
    np.testing.assert_array_equal(from_bits(as_bits(half)), half)
    for kept in (jnp.asarray(x), jnp.arange(3)):
        assert as_bits(kept) is kept and from_bits(kept) is kept
