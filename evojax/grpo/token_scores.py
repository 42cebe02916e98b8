"""Log-probabilities of tokens from hidden states; nothing is scattered into the logits.

``logp = z[target] - log sum_v exp(z_v)``. The first term is a product of two vectors a token, the
second is a statistic of each row of logits whose backward pass is written out: one pass over the
logits gives the cotangent of all of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from evojax.policy.attention import with_backward
from evojax.policy.decoder import ModelConfig, Params
from evojax.policy.products import across, dot, row_sums
from evojax.policy.sharding import lookup, matrix_for_use

_KEEP = 512 * 1024 * 1024  # bytes of a row's logits kept for the backward pass; above, made again
_CHUNK = 128 * 1024 * 1024  # bytes of a row's logits computed at once where they are not kept

Statistics = tuple[jax.Array, jax.Array]


def pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """``values[a, index[a, ...]]``: entries of each of the A rows by itself.

    >>> pick(jnp.array([[5, 6], [7, 8]]), jnp.array([[1, 1], [0, 1]])).tolist()
    [[6, 6], [7, 8]]
    """
    return jax.vmap(lambda x, i: x[i])(values, index)


def _measure(
    hidden: jax.Array, matrix: jax.Array, temperature: jax.Array, tied: bool
) -> tuple[Statistics, jax.Array]:
    """Log-normaliser and entropy of every vector of ``[A, S, D]``, and the logits ``[A*S, V]``."""
    shape = hidden.shape[:-1]
    logits = dot(hidden.reshape(-1, hidden.shape[-1]), matrix, 1, int(tied)) / temperature
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = row_sums(weights)
    mean = row_sums(weights * logits) / total
    norm = top[:, 0] + jnp.log(total)
    return (norm.reshape(shape), (norm - mean).reshape(shape)), logits


def _chunks(rows: int, vocabulary: int) -> tuple[int, int]:
    """How many chunks, and vectors of a row in each; one where all logits may be kept."""
    if rows * vocabulary * 4 <= _KEEP:
        return 1, rows
    count = -(-rows * vocabulary * 4 // _CHUNK)
    return count, -(-rows // count)


def _cut(values: jax.Array, count: int, width: int) -> jax.Array:
    """``[A, S, ...] -> [count, A, width, ...]``, zeros at the end of every row."""
    spare = [(0, 0), (0, count * width - values.shape[1])] + [(0, 0)] * (values.ndim - 2)
    padded = jnp.pad(values, spare)
    return jnp.moveaxis(padded.reshape(-1, count, width, *values.shape[2:]), 1, 0)


def _joined(values: jax.Array, rows: int) -> jax.Array:
    """What was cut: ``[count, A, width, ...] -> [A, rows, ...]``."""
    whole = jnp.moveaxis(values, 0, 1)
    return whole.reshape(whole.shape[0], -1, *values.shape[3:])[:, :rows]


def softmax_statistics(
    hidden: jax.Array,
    matrix: jax.Array,
    temperature: jax.Array,
    tied: bool,
    entropy_grad: bool,
    dtype: str,
) -> Statistics:
    """``log sum_v exp(z_v)`` and the entropy of ``softmax(z)``.

    ``z = hidden . matrix / temperature``.

    Args:
        hidden: float32 ``[A, S, D]``. matrix: ``[V, D]`` when ``tied``, else ``[D, V]``.
        temperature: scalar, not differentiated.
        entropy_grad: the entropy takes part in the backward pass.
        dtype: of the products' operands; logits and results are float32.

    Returns:
        Two float32 ``[A, S]``, nats.
    """
    return _rule(hidden, matrix, temperature, tied, entropy_grad, dtype)


def _forward(
    hidden: jax.Array,
    matrix: jax.Array,
    temperature: jax.Array,
    tied: bool,
    entropy_grad: bool,
    dtype: str,
) -> tuple[Statistics, tuple[jax.Array | None, ...]]:
    rows, vocabulary = hidden.shape[1], matrix.shape[1 - int(tied)]
    count, width = _chunks(rows, vocabulary)
    logits = None
    hidden, rounded = hidden.astype(dtype), matrix.astype(dtype)
    if count == 1:
        (norm, entropy), logits = _measure(hidden, rounded, temperature, tied)
    else:
        measured = lax.map(
            lambda part: _measure(part, rounded, temperature, tied)[0], _cut(hidden, count, width)
        )
        norm, entropy = (_joined(value, rows) for value in measured)
    return (norm, entropy), (hidden, matrix, temperature, norm, entropy, logits)


def _backward(
    tied: bool, entropy_grad: bool, dtype: str, kept: tuple[jax.Array, ...], given: Statistics
) -> tuple[jax.Array, jax.Array, None]:
    hidden, matrix, temperature, norm, entropy, logits = kept
    rows, vocabulary = hidden.shape[1], matrix.shape[1 - int(tied)]
    rounded = matrix.astype(dtype)

    def one(part: tuple[jax.Array, ...], z: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        shape = part[0].shape
        vectors = part[0].reshape(-1, shape[-1])
        log_norm, spread, to_norm, to_entropy = (x.reshape(-1, 1) for x in part[1:])
        if z is None:
            z = dot(vectors, rounded, 1, int(tied)) / temperature
        log_p = z - log_norm
        factor = to_norm
        if entropy_grad:
            factor = factor - to_entropy * (log_p + spread)
        g = (jnp.exp(log_p) * (factor / temperature)).astype(dtype)
        to_matrix = across(g, vectors) if tied else across(vectors, g)
        return dot(g, rounded, 1, 1 - int(tied)).reshape(shape), to_matrix

    parts = (hidden, norm, entropy, *given)
    if logits is not None:
        return *one(parts, logits), None
    count, width = _chunks(rows, vocabulary)

    def step(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        to_hidden, to_matrix = one(part, None)
        return total + to_matrix, to_hidden

    cut = tuple(_cut(value, count, width) for value in parts)
    to_matrix, to_hidden = lax.scan(step, jnp.zeros_like(matrix), cut)
    return _joined(to_hidden, rows), to_matrix, None


_rule = with_backward(_forward, _backward, static=(3, 4, 5))


def token_scores(
    params: Params,
    cfg: ModelConfig,
    hidden: jax.Array,
    slot: jax.Array,
    target: jax.Array,
    temperature: jax.Array,
    entropy_grad: bool,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of its distribution, nats, ``[A, B, T]``.

    Args:
        hidden: float32 ``[A, S, D]``, after the final norm. slot: int32 ``[A, B, T]``, which of a
            row's S vectors predicts the token. target: int32 ``[A, B, T]``, the token.
        temperature: logits are divided by it.
        entropy_grad: the entropy is differentiated too; otherwise it costs no backward pass.
    """
    tied = cfg.tie_embeddings
    name = "embed" if tied else "head"
    matrix = matrix_for_use(params, name)
    dtype = cfg.compute_dtype
    norm, entropy = softmax_statistics(hidden, matrix, temperature, tied, entropy_grad, dtype)
    if not entropy_grad:
        entropy = lax.stop_gradient(entropy)
    columns = lookup(params[name], target, 1 - int(tied))
    one, two = (x.astype(dtype).astype(jnp.float32) for x in (pick(hidden, slot), columns))
    picked = jnp.sum(one * two, axis=-1) / temperature
    return picked - pick(norm, slot), pick(entropy, slot)
