"""Drawing one token per row, and what that draw is worth under the distribution it came from."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from evojax.policy.attention import MASKED

_BLOCK = 256


class Draw(NamedTuple):
    """One sampled token per row.

    Args:
        token: int32 ``[R]``. logprob: nats, float32 ``[R]``. entropy: nats, float32 ``[R]``.
    """

    token: jax.Array
    logprob: jax.Array
    entropy: jax.Array


def seed_words(seed: int) -> np.ndarray:
    """A seed of any size as the two uint32 words of a threefry key (modulo 2^64).

    >>> seed_words(2**32 + 5).tolist()
    [1, 5]
    """
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def stream_keys(words: jax.Array, samples: jax.Array) -> jax.Array:
    """Threefry keys ``[P, n]``: one stream per prompt seed and sample index.

    Args:
        words: uint32 ``[P, 2]`` from ``seed_words``. samples: int32 ``[n]``, sample indices.
    """
    seeds = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.vmap(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(samples))(seeds)


def draw(logits: jax.Array, keys: jax.Array, index: jax.Array, temperature: jax.Array) -> Draw:
    """Sample from ``p = softmax(logits / temperature)`` by the Gumbel-max rule in two stages.

    With ``z = logits / temperature`` and the vocabulary cut into blocks: first
    ``block = argmax(logsumexp_block(z) + g)``, then ``token = argmax(z within block + g')``.
    That has exactly the law of ``argmax(z + g)`` over the vocabulary for a hundredth of the noise.
    ``logprob = z[token] - logsumexp(z)`` and ``entropy = logsumexp(z) - sum(p z)``.

    Args:
        logits: float32 ``[R, V]``. keys: one stream per row ``[R]``.
        index: scalar int32, position within the completion; folded into the keys.
        temperature: scalar, > 0.
    """
    rows, size = logits.shape
    spare = -size % _BLOCK
    scaled = jnp.pad(logits / temperature, ((0, 0), (0, spare)), constant_values=MASKED)
    scaled = scaled.reshape(rows, -1, _BLOCK)
    top = jnp.max(scaled, axis=(1, 2))
    mass = jnp.exp(scaled - top[:, None, None])
    block_mass = jnp.sum(mass, axis=2)
    total = jnp.sum(block_mass, axis=1)
    mean = jnp.sum(mass * scaled, axis=(1, 2)) / total
    log_total = top + jnp.log(total)

    noise = jax.vmap(
        lambda key: jax.random.gumbel(
            jax.random.fold_in(key, index),
            (block_mass.shape[1] + _BLOCK,),
            jnp.float32,
            mode="high",
        )
    )(keys)
    block_noise, inner_noise = jnp.split(noise, [block_mass.shape[1]], axis=1)
    block = jnp.argmax(jnp.log(block_mass) + block_noise, axis=1)
    inside = jnp.take_along_axis(scaled, block[:, None, None], axis=1)[:, 0]
    place = jnp.argmax(inside + inner_noise, axis=1)
    picked = jnp.take_along_axis(inside, place[:, None], axis=1)[:, 0]
    token = (block * _BLOCK + place).astype(jnp.int32)
    return Draw(token, jnp.minimum(picked - log_total, 0.0), jnp.maximum(log_total - mean, 0.0))
