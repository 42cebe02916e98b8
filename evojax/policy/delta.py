"""The gated delta rule: a memory of one matrix a head, which each token decays and corrects.

For one value head, with decay ``a = exp(log_decay)`` and writing strength ``b = beta``:

``u_t = b_t (v_t - a_t S_{t-1}^T k_t)``, ``S_t = a_t S_{t-1} + k_t u_t^T``, ``o_t = S_t^T q_t``

A row may hold several sequences: ``segment`` numbers them, the memory is emptied where the number
changes, and padding (0) leaves it as it was. Everything is float32, at full precision.

Source: Gated Delta Networks (arXiv 2412.06464); the form in chunks, Parallelizing Linear
Transformers with the Delta Rule (arXiv 2406.06484).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision

from evojax.policy.attention import with_backward

_CHUNK = 64  # tokens that are solved together
_SMALL = 4  # and those among them that are solved without halving


class _Chunk(NamedTuple):
    """What the scan over chunks needs of each; c tokens, K key heads, R value heads to each.

    Args:
        q, k: ``[B, K, c, dk]``. v: ``[B, K, R, c, dv]``. beta: ``[B, K, R, c]``.
        mix: ``[B, K, R, c, c]``, decayed ``q_i . k_j`` for j <= i of the same sequence.
        solve: ``[B, K, R, c, c]``, inverse of 1 + beta_i times decayed ``k_i . k_j``, j < i.
        enters: ``[B, K, R, c]``, what is left at each token of the memory that came in.
        leaves: ``[B, K, R, c]``, what is left at the end of what each token wrote.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    mix: jax.Array
    solve: jax.Array
    enters: jax.Array
    leaves: jax.Array


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    segment: jax.Array,
    state: jax.Array | None = None,
    chunk: int = _CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Whole rows at once, by chunks: products of matrices within, a scan from chunk to chunk.

    With ``A_ij = b_i (k_i . k_j) exp(g_i - g_j)`` for j < i (g: running sum of ``log_decay``),
    the corrections of a chunk that starts at memory S solve ``(1 + A) u = b (v - exp(g) S^T k)``.

    Args:
        q, k: ``[B, T, K, dk]``, normalised and scaled already.
        v: ``[B, T, V, dv]``; value head h reads key head ``h // (V / K)``.
        log_decay: ``[B, T, V]``, nats, at most 0. beta: ``[B, T, V]``, 0 to 1.
        segment: int32 ``[B, T]``, number of the sequence of each token; 0 = padding.
        state: ``[B, V, dk, dv]``, memory in which each row's first sequence goes on; empty when
            None.
        chunk: tokens in a chunk, a power of two; changes no result.

    Returns:
        ``[B, T, V, dv]``, 0 at padding, and the memory ``[B, V, dk, dv]`` after each row's last
        token.
    """
    batch, length, heads, width = k.shape
    values, depth = v.shape[2:]
    share = values // heads
    size = min(chunk, 1 << (length - 1).bit_length())
    real = (segment > 0)[..., None]
    run = _cut(_runs(segment), size, mode="edge")
    by_head = (batch, length, heads, share)
    beta = jnp.where(real, beta, 0.0).reshape(by_head)
    log_decay = jnp.where(real, log_decay, 0.0).reshape(by_head)
    parts = _within(
        jnp.moveaxis(_cut(q, size), 2, 3),
        jnp.moveaxis(_cut(k, size), 2, 3),
        jnp.moveaxis(_cut(v.reshape(*by_head, depth), size), 2, 4),
        jnp.moveaxis(_cut(log_decay, size), 2, 4),
        jnp.moveaxis(_cut(beta, size), 2, 4),
        run,
    )
    if state is None:
        state = jnp.zeros((batch, values, width, depth), jnp.float32)
    state, out = jax.lax.scan(_advance, state.reshape(batch, heads, share, width, depth), parts)
    out = jnp.moveaxis(out, 4, 2)  # [chunks, B, c, K, R, dv]
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, values, depth)[:, :length]
    return jnp.where(real[..., None], out, 0.0), state.reshape(batch, values, width, depth)


def delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token of every row; see ``gated_delta_rule``.

    Args:
        q, k: ``[B, K, dk]``. v: ``[B, V, dv]``. log_decay, beta: ``[B, V]``.
        state: ``[B, V, dk, dv]``.

    Returns:
        ``[B, V, dv]`` and the new state.
    """
    heads, share = k.shape[1], v.shape[1] // k.shape[1]

    def by_head(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], heads, share, *x.shape[2:])

    memory = by_head(state) * jnp.exp(by_head(log_decay))[..., None, None]
    known = _einsum("bkd,bkrde->bkre", k, memory)
    memory = memory + _einsum("bkd,bkre->bkrde", k, by_head(beta)[..., None] * (by_head(v) - known))
    out = _einsum("bkd,bkrde->bkre", q, memory)
    return out.reshape(v.shape), memory.reshape(state.shape)


def causal_conv(
    x: jax.Array, weight: jax.Array, segment: jax.Array, history: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Each channel's own convolution over the last tokens of the same sequence.

    ``y_t = sum_j weight[:, j] x_{t - (k - 1) + j}``, with 0 before a sequence begins.

    Args:
        x: ``[B, T, C]``. weight: ``[C, k]``.
        segment: int32 ``[B, T]``; 0 = padding, which stands between sequences or around them.
        history: ``[B, k - 1, C]``, inputs before the row's first sequence, which then begins the
            row; nothing when None.

    Returns:
        ``[B, T, C]``, 0 at padding, and the history after each row's last token.
    """
    batch, length, channels = x.shape
    before = weight.shape[1] - 1
    if history is None:
        history = jnp.zeros((batch, before, channels), x.dtype)
    joined = jnp.concatenate([history, x], axis=1)
    first = jnp.broadcast_to(segment[:, :1], (batch, before))
    owner = jnp.concatenate([first, segment], axis=1)
    out = jnp.zeros_like(x)
    for tap in range(before + 1):
        here = slice(tap, tap + length)
        same = (owner[:, here] == segment)[..., None]
        out = out + jnp.where(same, joined[:, here], 0.0) * weight[:, tap][None, None]
    real = segment > 0
    end = jnp.max(jnp.where(real, jnp.arange(1, length + 1)[None], 0), axis=1)[:, None]
    place = end + jnp.arange(before)[None]  # of the tokens end - before .. end - 1
    same = jnp.take_along_axis(owner, place, 1) == jnp.take_along_axis(owner, end + before - 1, 1)
    kept = jnp.take_along_axis(joined, place[..., None], 1)
    return jnp.where(real[..., None], out, 0.0), jnp.where(same[..., None], kept, 0.0)


def conv_step(x: jax.Array, weight: jax.Array, history: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of every row; see ``causal_conv``.

    Args:
        x: ``[B, C]``. weight: ``[C, k]``. history: ``[B, k - 1, C]``.

    Returns:
        ``[B, C]`` and the new history.
    """
    window = jnp.concatenate([history, x[:, None]], axis=1)
    return jnp.sum(window * weight.T[None], axis=1), window[:, 1:]


def _runs(segment: jax.Array) -> jax.Array:
    """Number of the sequence of each place counted from 0; padding belongs to the one before it.

    >>> _runs(jnp.array([[0, 3, 3, 0, 3, 1, 0]])).tolist()
    [[0, 0, 0, 0, 0, 1, 1]]
    """
    place = jnp.broadcast_to(jnp.arange(segment.shape[1])[None], segment.shape)
    last = jax.lax.cummax(jnp.where(segment > 0, place, -1), axis=1)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    there = jnp.take_along_axis(segment, jnp.maximum(before, 0), axis=1)
    begins = (segment > 0) & (before >= 0) & (segment != there)
    return jnp.cumsum(begins.astype(jnp.int32), axis=1)


def _cut(x: jax.Array, size: int, mode: str = "constant") -> jax.Array:
    """``[B, T, ...] -> [chunks, B, size, ...]``, zeros (or the last element) at the end."""
    batch, length = x.shape[:2]
    spare = [(0, 0), (0, -length % size)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, spare, mode=mode)
    return jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0)


def _within(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    run: jax.Array,
) -> _Chunk:
    """Everything that the tokens of a chunk do among themselves; arrays lead with the chunks."""
    size = run.shape[-1]
    lower = jnp.tril(jnp.ones((size, size), jnp.float32))
    came = jnp.pad(run[:-1, :, -1], ((1, 0), (0, 0)))[..., None]
    # Sums from j + 1 to i rather than differences of running sums: nothing large cancels.
    steps = jnp.tril(jnp.broadcast_to(log_decay[..., None], (*log_decay.shape, size)), -1)
    total = _einsum("il,...lj->...ij", lower, steps)
    same = jnp.tril(run[..., :, None] == run[..., None, :])[:, :, None, None]
    decay = jnp.exp(jnp.where(same, total, -jnp.inf))
    since = _einsum("il,...l->...i", lower, log_decay)
    enters = jnp.exp(jnp.where((run == came)[:, :, None, None], since, -jnp.inf))
    alike = _einsum("...id,...jd->...ij", k, k)[:, :, :, None] * decay
    mix = _einsum("...id,...jd->...ij", q, k)[:, :, :, None] * decay
    solve = _inverse_rule(jnp.tril(beta[..., None] * alike, -1))
    return _Chunk(q, k, v, beta, mix, solve, enters, decay[..., -1, :])


def _advance(memory: jax.Array, part: _Chunk) -> tuple[jax.Array, jax.Array]:
    """One chunk: ``memory [B, K, R, dk, dv]`` before and after, and ``[B, K, R, c, dv]``."""
    enters = part.enters[..., None]
    known = _einsum("bkcd,bkrde->bkrce", part.k, memory) * enters
    wrote = _matmul(part.solve, part.beta[..., None] * (part.v - known))
    out = _einsum("bkcd,bkrde->bkrce", part.q, memory) * enters + _matmul(part.mix, wrote)
    kept = memory * enters[..., -1:, :]
    return kept + _einsum("bkcd,bkrce->bkrde", part.k, wrote * part.leaves[..., None]), out


def _inverse(a: jax.Array) -> jax.Array:
    """``(1 + a)^-1`` of strictly lower triangular ``[..., c, c]``, from the halves' inverses.

    Products only: they are fast wherever matrices are, and any partitioner cuts them.
    """
    if a.shape[-1] <= _SMALL:  # a to the power of its size is 0
        square = _matmul(a, a)
        one = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
        return one - a + square - _matmul(a, square)
    half = a.shape[-1] // 2
    halves = _inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    corner = -_matmul(halves[1], _matmul(a[..., half:, :half], halves[0]))
    top = jnp.concatenate([halves[0], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, halves[1]], axis=-1)], axis=-2)


def _inverse_back(kept: jax.Array, given: jax.Array) -> tuple[jax.Array]:
    turned = jnp.swapaxes(kept, -1, -2)
    return (-_matmul(turned, _matmul(given, turned)),)


def _inverse_forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = _inverse(a)
    return found, found


_inverse_rule = with_backward(_inverse_forward, _inverse_back)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=Precision.HIGHEST)


def _einsum(subscripts: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *arrays, precision=Precision.HIGHEST)
