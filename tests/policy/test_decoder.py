from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evojax.policy import decoder
from evojax.policy.decoder import ModelConfig

CFG = ModelConfig(16, 24, 40, 3, 4, 2, 6, 10000.0, 1e-5, 128)
PARAMS = decoder.init_params(CFG, 0)


def causal(length: int) -> np.ndarray:
    return np.tril(np.ones((length, length), bool))[None]


@partial(jax.jit, static_argnames=("cfg", "remat"))
def _logits(params, cfg, tokens, positions, mask, remat=False):
    hidden = decoder.hidden_states(params, cfg, tokens, positions, mask, remat=remat)
    return decoder.lm_logits(params, cfg, hidden)


def logits(tokens, positions, mask, params=PARAMS, cfg=CFG, **kw) -> np.ndarray:
    return np.asarray(_logits(params, cfg, tokens, positions, mask, **kw))


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


def test_remat_gives_the_same_values_and_gradients():
    def loss(params, remat):
        got = _logits(params, CFG, SEQ[None], np.arange(11)[None], causal(11), remat=remat)
        return (got**2).mean()

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    plain, again = jax.tree.leaves(grad(PARAMS, False)), jax.tree.leaves(grad(PARAMS, True))
    for a, b in zip(plain, again, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def numpy_forward(params, cfg: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Straight reading of the Llama equations, one head and one position at a time."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_eps) * scale

    def rotate(vec, pos):
        half = cfg.head_dim // 2
        out = vec.copy()
        for i in range(half):
            a = pos * cfg.rope_theta ** (-2 * i / cfg.head_dim)
            out[i] = vec[i] * np.cos(a) - vec[i + half] * np.sin(a)
            out[i + half] = vec[i + half] * np.cos(a) + vec[i] * np.sin(a)
        return out

    x = p["embed"][tokens]
    d, share = cfg.head_dim, cfg.num_heads // cfg.num_kv_heads
    for layer in range(cfg.num_layers):
        w = {name: value[layer] for name, value in p["layers"].items()}
        h = norm(x, w["attn_norm"])
        q, k, v = h @ w["q"], h @ w["k"], h @ w["v"]
        mixed = np.zeros_like(q)
        for head in range(cfg.num_heads):
            kv = slice((head // share) * d, (head // share + 1) * d)
            own = slice(head * d, (head + 1) * d)
            keys = [rotate(k[s, kv], s) for s in range(len(tokens))]
            for t in range(len(tokens)):
                score = np.array([rotate(q[t, own], t) @ keys[s] for s in range(t + 1)]) / d**0.5
                weight = np.exp(score - score.max())
                mixed[t, own] = weight / weight.sum() @ v[: t + 1, kv]
        x = x + mixed @ w["o"]
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    h = norm(x, p["final_norm"])
    return h @ (p["embed"].T if cfg.tie_embeddings else p["head"])


@pytest.mark.parametrize("tied", [True, False])
def test_matches_a_plain_numpy_reading_of_the_equations(tied):
    cfg = ModelConfig(16, 24, 40, 3, 4, 2, 6, 10000.0, 1e-5, 128, tied)
    params = jax.tree.map(lambda a: a * 8, decoder.init_params(cfg, 3))  # far from linear
    got = logits(SEQ[None], np.arange(11)[None], causal(11), params, cfg)[0]
    want = numpy_forward(params, cfg, SEQ)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


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
