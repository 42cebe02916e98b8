from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evojax.policy import decoder
from evojax.policy.decoder import ModelConfig
from evojax.policy.shape import RopeScaling

CFG = ModelConfig(16, 24, 40, 3, 4, 2, 6, 10000.0, 1e-5, 128)
PARAMS = decoder.init_params(CFG, 0)


def causal(length: int) -> np.ndarray:
    return np.tril(np.ones((length, length), bool))[None]


@partial(jax.jit, static_argnames=("cfg",))
def _logits(params, cfg, tokens, positions, mask):
    hidden = decoder.hidden_states(params, cfg, tokens, positions, mask)
    return decoder.lm_logits(params, cfg, hidden)


def logits(tokens, positions, mask, params=PARAMS, cfg=CFG) -> np.ndarray:
    return np.asarray(_logits(params, cfg, tokens, positions, mask))


def alone(seq: np.ndarray) -> np.ndarray:
    n = len(seq)
    return logits(seq[None], np.arange(n)[None], causal(n))[0]


SEQ = np.random.default_rng(0).integers(0, 16, 11).astype(np.int32)


def test_case_G10_same_logits_alone_padded_and_packed():
    n, pad = len(SEQ), 7
    want = alone(SEQ)
    other = np.random.default_rng(1).integers(0, 16, 5).astype(np.int32)

    tokens = np.concatenate([np.zeros(pad, np.int32), SEQ])[None]
    positions = np.concatenate([np.zeros(pad, np.int32), np.arange(n)])[None]
    mask = causal(n + pad).copy()
    mask[:, :, :pad] = False
    np.testing.assert_allclose(logits(tokens, positions, mask)[0, pad:], want, atol=2e-6)

    tokens = np.concatenate([SEQ, np.zeros(pad, np.int32)])[None]
    got = logits(tokens, np.arange(n + pad)[None], causal(n + pad))
    np.testing.assert_allclose(got[0, :n], want, atol=2e-6)

    tokens = np.concatenate([other, SEQ])[None]
    positions = np.concatenate([np.arange(5), np.arange(n)])[None]
    mask = causal(n + 5).copy()
    mask[:, 5:, :5] = False
    got = logits(tokens, positions, mask)[0]
    np.testing.assert_allclose(got[5:], want, atol=2e-6)
    np.testing.assert_allclose(got[:5], alone(other), atol=2e-6)


def test_fully_masked_rows_give_finite_values_and_gradients():
    mask = np.zeros((1, 11, 11), bool)

    def loss(params):
        return _logits(params, CFG, SEQ[None], np.arange(11)[None], mask).sum()

    value, grads = jax.jit(jax.value_and_grad(loss))(PARAMS)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_future_tokens_change_nothing():
    changed = SEQ.copy()
    changed[-1] = (changed[-1] + 1) % 16
    np.testing.assert_array_equal(alone(SEQ)[:-1], alone(changed)[:-1])


@pytest.mark.parametrize("policy", ["full", "dots", "names"])
def test_remat_gives_the_same_values_and_gradients(policy):
    def loss(params, cfg):
        got = _logits(params, cfg, SEQ[None], np.arange(11)[None], causal(11))
        return (got**2).mean()

    grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    plain = jax.tree.leaves(grad(PARAMS, CFG))
    again = jax.tree.leaves(grad(PARAMS, dataclasses.replace(CFG, remat=policy)))
    for a, b in zip(plain, again, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def numpy_forward(params, cfg: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Straight reading of the equations, one head and one position at a time."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_eps) * scale

    def frequency(pair):
        plain = cfg.rope_theta ** (-2 * pair / cfg.rotary_dim)
        scaling = cfg.rope_scaling
        if scaling is None:
            return plain
        wave = 2 * math.pi / plain
        longest = scaling.original_max_position
        if wave < longest / scaling.high_freq_factor:
            return plain
        if wave > longest / scaling.low_freq_factor:
            return plain / scaling.factor
        share = longest / wave - scaling.low_freq_factor
        share /= scaling.high_freq_factor - scaling.low_freq_factor
        return (1 - share) * plain / scaling.factor + share * plain

    def rotate(vec, pos):
        half = cfg.rotary_dim // 2
        out = vec.copy()
        for i in range(half):
            a = pos * frequency(i)
            out[i] = vec[i] * np.cos(a) - vec[i + half] * np.sin(a)
            out[i + half] = vec[i + half] * np.cos(a) + vec[i] * np.sin(a)
        return out

    def head_norm(vec, scale):
        return norm(vec, scale) if cfg.qk_norm else vec

    x = p["embed"][tokens]
    d, share = cfg.head_dim, cfg.num_heads // cfg.num_kv_heads
    for layer in range(cfg.num_layers):
        w = {name: value[layer] for name, value in p["layers"].items()}
        h = norm(x, w["attn_norm"])
        q, k, v = h @ w["q"], h @ w["k"], h @ w["v"]
        if cfg.qkv_bias:
            q, k, v = q + w["q_bias"], k + w["k_bias"], v + w["v_bias"]
        mixed = np.zeros_like(q)
        for head in range(cfg.num_heads):
            kv = slice((head // share) * d, (head // share + 1) * d)
            own = slice(head * d, (head + 1) * d)
            keys = [rotate(head_norm(k[s, kv], w.get("k_norm")), s) for s in range(len(tokens))]
            for t in range(len(tokens)):
                query = rotate(head_norm(q[t, own], w.get("q_norm")), t)
                score = np.array([query @ keys[s] for s in range(t + 1)]) / d**0.5
                weight = np.exp(score - score.max())
                mixed[t, own] = weight / weight.sum() @ v[: t + 1, kv]
        if cfg.attn_gate:
            mixed = mixed / (1 + np.exp(-(h @ w["attn_gate"])))
        x = x + mixed @ w["o"]
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    h = norm(x, p["final_norm"])
    return h @ (p["embed"].T if cfg.tie_embeddings else p["head"])


PARTS = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "bias": {"qkv_bias": True},
    "head norms": {"qk_norm": True},
    "stretched waves": {"rope_scaling": RopeScaling(4.0, 1.0, 4.0, 24)},
    "half turned": {"head_dim": 8, "rotary_share": 0.5},
    "gated attention": {"attn_gate": True},
}


@pytest.mark.parametrize("part", PARTS)
def test_matches_a_plain_numpy_reading_of_the_equations(part):
    cfg = dataclasses.replace(CFG, **PARTS[part])
    drawn = np.random.default_rng(3)
    params = jax.tree.map(  # far from linear, norms and biases that count
        lambda a: a * 8 if a.std() else a + 0.5 * drawn.normal(size=a.shape).astype(np.float32),
        decoder.init_params(cfg, 3),
    )
    got = logits(SEQ[None], np.arange(11)[None], causal(11), params, cfg)[0]
    want = numpy_forward(params, cfg, SEQ)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    if part != "tied":
        plain = dataclasses.replace(cfg, qkv_bias=False, qk_norm=False, rope_scaling=None)
        plain = dataclasses.replace(plain, attn_gate=False, rotary_share=1.0, tie_embeddings=True)
        other = logits(SEQ[None], np.arange(11)[None], causal(11), params, plain)[0]
        assert np.abs(other - want).max() > 0.01 * np.abs(want).max()


def test_params_are_a_plain_stacked_dict_and_the_module_agrees():
    assert PARAMS["layers"]["q"].shape == (3, 24, 24)
    assert PARAMS["layers"]["k"].shape == (3, 24, 12)
    assert "head" not in PARAMS and type(PARAMS["layers"]) is dict
    module = decoder.Decoder(CFG, decoder.nnx.Rngs(params=0))
    got = module(jnp.array(SEQ[None]), jnp.arange(11)[None], jnp.array(causal(11)))
    np.testing.assert_allclose(np.asarray(got)[0], alone(SEQ), atol=1e-6)
    shapes = decoder.param_shapes(CFG)
    assert jax.tree.map(lambda a: a.shape, shapes) == jax.tree.map(lambda a: a.shape, PARAMS)


def test_same_seed_same_weights_other_seed_other_weights():
    again, other = decoder.init_params(CFG, 0), decoder.init_params(CFG, 1)
    np.testing.assert_array_equal(PARAMS["embed"], again["embed"])
    assert not np.array_equal(PARAMS["embed"], other["embed"])


def test_faults_lists_everything_and_config_is_hashable():
    bad = ModelConfig(0, -1, 8, 1, 4, 2, 5, 1e4, 1e-5, 16)
    assert len(bad.faults()) == 3
    assert CFG.faults() == [] and hash(CFG) == hash(ModelConfig(**vars(CFG)))
