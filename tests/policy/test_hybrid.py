from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_hybrid import HYBRID, hybrid_params

from evojax.policy import cache
from evojax.policy.decoder import hidden_states, run_layers
from evojax.policy.hybrid import delta_mix, is_linear, over_lines, over_rows, shape_of

LINEAR = shape_of(HYBRID)
SEQ = np.random.default_rng(0).integers(0, 20, 11).astype(np.int32)
OTHER = np.random.default_rng(1).integers(0, 20, 5).astype(np.int32)

mix = jax.jit(lambda layer, h, segment: delta_mix(layer, HYBRID, h, over_rows(HYBRID, segment))[0])


@partial(jax.jit, static_argnames="cfg")
def hidden(tokens, positions, mask, cfg=HYBRID):
    return hidden_states(hybrid_params(), cfg, tokens, positions, mask)


def causal(length: int) -> np.ndarray:
    return np.tril(np.ones((1, length, length), bool))


def alone(seq, cfg=HYBRID) -> np.ndarray:
    n = len(seq)
    return np.asarray(hidden(seq[None], np.arange(n)[None], causal(n), cfg))[0]


def layer(index=1):
    return {name: value[index] for name, value in hybrid_params()["linear_layers"].items()}


def silu(x):
    return x / (1 + np.exp(-x))


def written_out(weights, h):
    """One sequence ``[T, D]`` through a delta-net layer, token by token and head by head."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    kd, vd, taps = LINEAR.key_dim, LINEAR.value_dim, LINEAR.conv
    memory = np.zeros((LINEAR.value_heads, kd, vd))
    qkv, out = h @ w["qkv"], []
    for t in range(len(h)):
        y = np.zeros(LINEAR.channels)
        for back in range(min(t + 1, taps)):
            y += w["conv"][:, taps - 1 - back] * qkv[t - back]
        y = silu(y)
        z = (h[t] @ w["z"]).reshape(-1, vd)
        beta = 1 / (1 + np.exp(-(h[t] @ w["b"])))
        decay = np.exp(-np.exp(w["a_log"]) * np.log1p(np.exp(h[t] @ w["a"] + w["dt_bias"])))
        heads = []
        for head in range(LINEAR.value_heads):
            of = head // (LINEAR.value_heads // LINEAR.key_heads)
            q, k = (y[at + of * kd : at + of * kd + kd] for at in (0, LINEAR.keys))
            q, k = (x / np.sqrt(x @ x + 1e-6) for x in (q, k))
            v = y[2 * LINEAR.keys + head * vd :][:vd]
            s = memory[head] * decay[head]
            memory[head] = s + beta[head] * np.outer(k, v - s.T @ k)
            read = memory[head].T @ q / np.sqrt(kd)
            read = read / np.sqrt(np.mean(read * read) + 1e-6) * w["gated_norm"]
            heads.append(read * silu(z[head]))
        out.append(np.concatenate(heads) @ w["out"])
    return np.array(out)


def test_a_layer_equals_its_equations_written_out():
    h = np.random.default_rng(2).normal(size=(1, 9, 16)).astype(np.float32)
    got = mix(layer(), h, np.ones((1, 9), np.int32))[0]
    want = written_out(layer(), h[0].astype(np.float64))
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_every_interval_th_layer_has_attention():
    assert [is_linear(HYBRID, i) for i in range(4)] == [True, False, True, False]
    unstacked = cache.unstack(hybrid_params(), HYBRID)["layers"]
    assert ["conv" in weights for weights in unstacked] == [True, False, True, False]
    np.testing.assert_array_equal(unstacked[2]["qkv"], layer(1)["qkv"])
    np.testing.assert_array_equal(unstacked[3]["q"], hybrid_params()["layers"]["q"][1])


def among(*layout) -> list[np.ndarray]:
    """Each sequence's hidden states in one row of 18 places: sequences, and widths of padding."""
    parts = [np.full(part, 3, np.int32) if isinstance(part, int) else part for part in layout]
    positions = np.concatenate([np.arange(len(part)) for part in parts])[None]
    ends = np.cumsum([len(part) for part in parts])
    mask, places = np.zeros((1, 18, 18), bool), []
    for part, end in zip(layout, ends, strict=True):
        if not isinstance(part, int):
            here = slice(end - len(part), end)
            mask[:, here, here] = causal(len(part))
            places.append(here)
    out = np.asarray(hidden(np.concatenate(parts)[None], positions, mask))[0]
    return [out[here] for here in places]


def test_case_G10_a_hybrid_gives_the_same_alone_padded_and_packed():
    (other,) = among(OTHER, 13)
    want = alone(SEQ)
    np.testing.assert_allclose(among(7, SEQ)[0], want, atol=2e-5)
    np.testing.assert_allclose(among(SEQ, 7)[0], want, atol=2e-5)
    for layout in ((OTHER, SEQ, 2), (1, SEQ, 1, OTHER), (OTHER, 2, SEQ)):
        for part, got in zip(
            [p for p in layout if not isinstance(p, int)], among(*layout), strict=True
        ):
            np.testing.assert_allclose(got, want if part is SEQ else other, atol=2e-5)


def test_tokens_depend_on_earlier_ones_of_their_sequence_only():
    changed = SEQ.copy()
    changed[6] = (changed[6] + 1) % 20
    before, after = alone(SEQ), alone(changed)
    np.testing.assert_array_equal(before[:6], after[:6])
    assert (np.abs(before[6:] - after[6:]).max(axis=1) > 1e-4).all()


def test_remat_changes_no_gradient():
    row = jnp.asarray(SEQ[None, :4]), jnp.arange(4)[None], jnp.asarray(causal(4))

    def gradient(cfg):
        def loss(params):
            return jnp.sum(jnp.sin(hidden_states(params, cfg, *row)))

        return jax.jit(jax.grad(loss))(hybrid_params())

    want = jax.tree.leaves(gradient(HYBRID))
    got = jax.tree.leaves(gradient(dataclasses.replace(HYBRID, remat="names")))
    for a, b in zip(got, want, strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()) + 1e-7)


@partial(jax.jit, static_argnums=0)
def recur_in_lines(shared, tail, *parts):
    return over_lines(HYBRID, shared, tail)(*parts)[0]


@jax.jit
def recur_in_rows(segment, *parts):
    return over_rows(HYBRID, segment)(*parts)[0]


@pytest.mark.parametrize("shared", [0, 3])
def test_lines_equal_rows(shared):
    """Two rows of two lines of four places, behind places that hold nothing."""
    tail = np.array([[[1, 1, 2, 2], [3, 3, 3, 0]], [[1, 0, 0, 0], [0, 0, 0, 0]]], np.int32)
    rng = np.random.default_rng(3)
    conv = rng.normal(size=(LINEAR.channels, LINEAR.conv)).astype(np.float32)
    sizes = LINEAR.channels, LINEAR.value_heads, LINEAR.value_heads
    qkv, decay, beta = (rng.uniform(-1, 0, (2, shared + 8, n)).astype(np.float32) for n in sizes)
    parts = qkv, decay, -beta
    got = recur_in_lines(shared, tail, conv, *parts)
    by_line = (x[:, shared:].reshape(4, 4, -1) for x in parts)
    want = recur_in_rows(tail.reshape(4, 4), conv, *by_line)
    np.testing.assert_allclose(got[:, shared:], want.reshape(2, 8, *want.shape[2:]), atol=1e-6)
    assert not np.asarray(got[:, :shared]).any()


def test_layers_without_attention_need_to_know_how_tokens_meet():
    with pytest.raises(ValueError, match="recur"):
        row = jnp.asarray(SEQ[None]), jnp.arange(11)[None]
        run_layers(hybrid_params(), HYBRID, *row, lambda q, k, v: (q, None))
