"""What is not kept is not in memory: chunked log-probabilities and remat, by XLA's own figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evojax.grpo import token_scores as scores
from evojax.policy import decoder
from evojax.policy.decoder import ModelConfig, param_shapes
from evojax.policy.shape import REMAT

TOKENS, WIDTH, VOCABULARY = 512, 16, 4096


def temporary_bytes(function: Callable[..., Any], *inputs: Any) -> int:
    """Bytes that a compiled function needs besides its inputs and outputs."""
    figures = jax.jit(function).lower(*inputs).compile().memory_analysis()
    assert figures is not None
    return figures.temp_size_in_bytes


def naive(hidden: jax.Array, matrix: jax.Array, target: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(hidden[0] @ matrix.T)
    return -jnp.take_along_axis(logp, target[:, None], axis=1).sum()


def chunked(hidden: jax.Array, matrix: jax.Array, target: jax.Array) -> jax.Array:
    norm, _ = scores.softmax_statistics(hidden, matrix, jnp.float32(1.0), True, False, "float32")
    return (norm[0] - (hidden[0] * matrix[target]).sum(axis=-1)).sum()


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(scores, "_KEEP", 1024 * 1024)
    monkeypatch.setattr(scores, "_CHUNK", 1024 * 1024)


def test_chunked_log_probabilities_need_a_fraction_of_the_memory(small_chunks):
    drawn = np.random.default_rng(0)
    hidden = drawn.normal(size=(1, TOKENS, WIDTH)).astype(np.float32)
    matrix = drawn.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
    target = drawn.integers(0, VOCABULARY, TOKENS)
    whole, cut = (jax.value_and_grad(f, argnums=(0, 1)) for f in (naive, chunked))
    want, got = jax.jit(whole)(hidden, matrix, target), jax.jit(cut)(hidden, matrix, target)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    logits = TOKENS * VOCABULARY * 4
    assert temporary_bytes(whole, hidden, matrix, target) >= logits
    assert temporary_bytes(cut, hidden, matrix, target) < 0.5 * logits


def test_each_remat_policy_keeps_less_than_the_one_before():
    cfg = ModelConfig(16, 32, 256, 8, 4, 2, 8, 10000.0, 1e-5, 512)
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, 128, 128), bool)

    def needed(policy: str) -> int:
        shape = dataclasses.replace(cfg, remat=policy)

        def loss(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
            return decoder.hidden_states(params, shape, tokens, tokens, mask).sum()

        return temporary_bytes(jax.grad(loss), param_shapes(cfg), tokens, mask)

    found = {policy: needed(policy) for policy in REMAT}
    assert found["full"] < found["names"] < found["dots"] < found["none"]
    assert found["full"] < 0.4 * found["none"]
