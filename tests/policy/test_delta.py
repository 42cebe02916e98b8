from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.policy.delta import (
    _inverse_rule,
    causal_conv,
    conv_step,
    delta_step,
    gated_delta_rule,
)

HEADS, VALUES, KEY, DEPTH = 2, 4, 3, 5  # two value heads read each key head
CHANNELS, TAPS = 3, 4
LENGTH = 24  # one shape for all examples: one compilation a chunk size

rule: Any = jax.jit(gated_delta_rule, static_argnames="chunk")
step: Any = jax.jit(delta_step)
conv: Any = jax.jit(causal_conv)
conv_one: Any = jax.jit(conv_step)


def inputs(seed: int, batch: int = 1, length: int = LENGTH) -> list[np.ndarray]:
    """q, k, v, log_decay, beta as a layer makes them: keys of length 1, decays of many sizes."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, batch, length, HEADS, KEY))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(batch, length, VALUES, DEPTH))
    log_decay = -np.exp(rng.normal(-1.5, 1.5, (batch, length, VALUES)))
    beta = rng.uniform(0.0, 1.0, (batch, length, VALUES))
    return [x.astype(np.float32) for x in (q, k, v, log_decay, beta)]


def recurrence(arrays, segment, state):
    """The equations one token after the other, one row and one head at a time, in float64."""
    q, k, v, log_decay, beta = arrays
    batch, length, _, _ = q.shape
    out = np.zeros((batch, length, VALUES, DEPTH))
    final = np.zeros((batch, VALUES, KEY, DEPTH))
    for b in range(batch):
        for h in range(VALUES):
            memory = np.array(state[b, h], float)
            last = None
            for t in range(length):
                if segment[b, t] == 0:
                    continue
                if last is not None and segment[b, t] != last:
                    memory = np.zeros((KEY, DEPTH))
                last = segment[b, t]
                key, query = (x[b, t, h // (VALUES // HEADS)].astype(float) for x in (k, q))
                memory = memory * np.exp(float(log_decay[b, t, h]))
                wrote = beta[b, t, h] * (v[b, t, h] - memory.T @ key)
                memory = memory + np.outer(key, wrote)
                out[b, t, h] = memory.T @ query
            final[b, h] = memory
    return out, final


def alone(arrays, segment=None, state=None, chunk=8):
    """Output and memory of rows, all one sequence unless told otherwise."""
    length = arrays[0].shape[1]
    segment = np.ones((len(arrays[0]), length), np.int32) if segment is None else segment
    return [np.asarray(x) for x in rule(*arrays, segment, state, chunk=chunk)]


@st.composite
def segments(draw, length=LENGTH):
    """Numbers of neighbouring sequences, with padding anywhere between them."""
    ids, out = draw(st.permutations(range(1, 7))), []
    for number in ids:
        out += [0] * draw(st.integers(0, 3)) + [number] * draw(st.integers(1, 9))
    return np.array((out + [0] * length)[:length], np.int32)


@given(st.integers(0, 9), segments(), st.sampled_from([1, 8, 64]), st.integers(0, 1))
@settings(max_examples=40)
def test_chunks_of_any_size_equal_the_recurrence(seed, segment, chunk, carried):
    arrays, rng = inputs(seed), np.random.default_rng(seed)
    state = carried * rng.normal(size=(1, VALUES, KEY, DEPTH)).astype(np.float32)
    want, memory = recurrence(arrays, segment[None], state)
    got, found = alone(arrays, segment[None], state, chunk)
    np.testing.assert_allclose(got, want, atol=3e-6)
    np.testing.assert_allclose(found, memory, atol=3e-6)
    assert not got[0, segment == 0].any()


@given(st.integers(0, 9), st.permutations(range(3)), st.lists(st.integers(0, 2), min_size=4))
@settings(max_examples=25)
def test_a_packed_sequence_gives_what_it_gives_alone(seed, order, gaps):
    lengths = [5, 9, 3]
    parts = [inputs(seed + i, length=n) for i, n in enumerate(lengths)]
    rows = [np.zeros((1, LENGTH, *x.shape[2:]), np.float32) + 7.0 for x in parts[0]]
    segment, where, at = np.zeros((1, LENGTH), np.int32), {}, 0
    for i, gap in zip(order, gaps, strict=False):
        at += gap
        where[i] = slice(at, at + lengths[i])
        segment[0, where[i]] = i + 1
        for row, x in zip(rows, parts[i], strict=True):
            row[:, where[i]] = x
        at += lengths[i]
    rows[3] = -np.abs(rows[3])
    got, memory = alone(rows, segment)
    for i, part in enumerate(parts):
        behind = (0, LENGTH - lengths[i])
        padded = [np.pad(x, [(0, 0), behind] + [(0, 0)] * (x.ndim - 2)) for x in part]
        mask = (np.arange(LENGTH) < lengths[i]).astype(np.int32)[None]
        want, after = alone(padded, mask)
        np.testing.assert_allclose(got[0, where[i]], want[0, : lengths[i]], atol=2e-6)
        if i == order[-1]:
            np.testing.assert_allclose(memory, after, atol=2e-6)


def test_two_halves_with_the_memory_carried_equal_the_whole():
    arrays = inputs(3, batch=2)
    whole, memory = alone(arrays)
    first, between = alone([x[:, :12] for x in arrays])
    last, end = alone([x[:, 12:] for x in arrays], state=between)
    np.testing.assert_allclose(np.concatenate([first, last], 1), whole, atol=2e-6)
    np.testing.assert_allclose(end, memory, atol=2e-6)


def test_single_steps_equal_whole_rows():
    arrays = inputs(4, batch=3)
    whole, memory = alone(arrays)
    state, got = jnp.zeros((3, VALUES, KEY, DEPTH)), []
    for t in range(LENGTH):
        out, state = step(*(x[:, t] for x in arrays), state)
        got.append(np.asarray(out))
    np.testing.assert_allclose(np.stack(got, 1), whole, atol=2e-6)
    np.testing.assert_allclose(state, memory, atol=2e-6)


def test_a_row_of_padding_leaves_its_memory_and_history_untouched():
    nothing = np.zeros((2, LENGTH), np.int32)
    state = np.random.default_rng(0).normal(size=(2, VALUES, KEY, DEPTH)).astype(np.float32)
    out, after = alone(inputs(5, batch=2), nothing, state)
    assert not out.any()
    np.testing.assert_array_equal(after, state)
    history = np.random.default_rng(1).normal(size=(2, TAPS - 1, CHANNELS)).astype(np.float32)
    x = np.ones((2, LENGTH, CHANNELS), np.float32)
    y, kept = conv(x, np.ones((CHANNELS, TAPS), np.float32), nothing, history)
    assert not np.asarray(y).any()
    np.testing.assert_array_equal(kept, history)


def test_one_token_by_hand():
    """Memory 2 decays to 1; key 1 reads 1, value 3 corrects it by half of 2; query 4 reads 2."""
    one = np.ones((1, 1, 1, 1), np.float32)
    halved = np.log(np.full((1, 1, 1), 0.5, np.float32))
    out, state = rule(
        4 * one, one, 3 * one, halved, 0.5 * one[..., 0], np.ones((1, 1), np.int32), 2 * one
    )
    assert float(out[0, 0, 0, 0]) == pytest.approx(8.0)
    assert float(state[0, 0, 0, 0]) == pytest.approx(2.0)


def by_steps(q, k, v, log_decay, beta, segment, state):
    """``gated_delta_rule`` from ``delta_step``, for automatic differentiation."""
    fresh = jnp.pad(segment[:, 1:] != segment[:, :-1], ((0, 0), (1, 0))) & (segment > 0)

    def advance(memory, token):
        parts, new, number = token
        memory = jnp.where(new[:, None, None, None], 0.0, memory)
        out, after = step(*parts, memory)
        real = number[:, None, None] > 0
        return jnp.where(real[..., None], after, memory), jnp.where(real, out, 0.0)

    rows = (q, k, v, log_decay, beta), fresh, segment
    memory, out = jax.lax.scan(advance, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), rows))
    return jnp.moveaxis(out, 0, 1), memory


def test_gradients_equal_those_of_the_recurrence():
    """Three sequences, one across chunks, padding behind; a decay that forgets everything; the
    carried memory has a gradient too."""
    arrays, rng = inputs(6, batch=2), np.random.default_rng(6)
    arrays[3][:, 5] = -200.0
    segment = np.array([[1] * 13 + [2] * 8 + [0] * 3, [1] * 3 + [2] * 3 + [3] * 18], np.int32)
    state = rng.normal(size=(2, VALUES, KEY, DEPTH)).astype(np.float32)
    seen = rng.normal(size=(2, LENGTH, VALUES, DEPTH)).astype(np.float32)
    kept = rng.normal(size=state.shape).astype(np.float32)

    def loss(form, arrays, state):
        out, memory = form(*arrays, segment, state)
        return jnp.sum(out * seen) + jnp.sum(memory * kept)

    gradient = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
    want = gradient(by_steps, arrays, state)
    got = gradient(partial(gated_delta_rule, chunk=8), arrays, state)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 1e-3 and np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()) + 1e-6)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_inverse_of_unit_lower_triangular_matrices(size):
    a = np.tril(np.random.default_rng(0).normal(size=(2, 3, size, size)), -1).astype(np.float32) / 2
    want = np.linalg.inv(np.eye(size) + a)
    np.testing.assert_allclose(_inverse_rule(a), want, atol=1e-4)


def convolved(x, weight, segment):
    """Each token from its own sequence's last ones, in float64."""
    out = np.zeros(x.shape)
    for b, t in np.ndindex(segment.shape):
        for back in range(TAPS):
            if segment[b, t] and t >= back and segment[b, t - back] == segment[b, t]:
                out[b, t] += weight[:, TAPS - 1 - back] * x[b, t - back]
    return out


@given(st.integers(0, 9), segments())
@settings(max_examples=25)
def test_convolution_sees_its_own_sequence_only(seed, segment):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1, LENGTH, CHANNELS)).astype(np.float32)
    weight = rng.normal(size=(CHANNELS, TAPS)).astype(np.float32)
    got, kept = conv(x, weight, segment[None])
    np.testing.assert_allclose(got, convolved(x, weight, segment[None]), atol=2e-6)
    own = np.zeros((TAPS - 1, CHANNELS))
    if segment.any():
        mine = np.flatnonzero(segment == segment[segment > 0][-1])[-(TAPS - 1) :]
        own[TAPS - 1 - len(mine) :] = x[0, mine]
    np.testing.assert_array_equal(kept[0], own.astype(np.float32))


@pytest.mark.parametrize("first", [0, 1, 2, 7])
def test_convolution_in_parts_and_by_steps_equals_the_whole(first):
    rng = np.random.default_rng(8)
    x = rng.normal(size=(2, LENGTH, CHANNELS)).astype(np.float32)
    weight = rng.normal(size=(CHANNELS, TAPS)).astype(np.float32)
    whole, _ = conv(x, weight, np.ones((2, LENGTH), np.int32))
    part = np.zeros_like(x)
    part[:, :first] = x[:, :first]
    got, history = conv(part, weight, np.tile((np.arange(LENGTH) < first).astype(np.int32), (2, 1)))
    out = [np.asarray(got)[:, :first]]
    for t in range(first, LENGTH):
        y, history = conv_one(x[:, t], weight, history)
        out.append(np.asarray(y)[:, None])
    np.testing.assert_allclose(np.concatenate(out, 1), whole, atol=2e-6)
