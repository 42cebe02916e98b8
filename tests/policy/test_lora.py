from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evojax.config import LoraConf
from evojax.errors import InputError
from evojax.policy import decoder
from evojax.policy.adapted import Adapted, to_weight, whole
from evojax.policy.attention import gated_mlp, project
from evojax.policy.decoder import ModelConfig, init_params, param_shapes
from evojax.policy.lora import attach, check, init_adapters, linears, merge, scale_of

CFG = ModelConfig(11, 16, 24, 2, 4, 2, 4, 10000.0, 1e-5, 128, tie_embeddings=False)
ALL = LoraConf(rank=3, alpha=6.0, targets=["q", "k", "v", "o", "gate", "up", "down", "head"])


def nudged(adapters, seed=0):
    """Adapters whose second factor is not 0 any more."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda a: a + 0.1 * jnp.asarray(rng.normal(size=a.shape), a.dtype), adapters
    )


def logits(params, cfg=CFG, remat="none"):
    cfg = dataclasses.replace(cfg, remat=remat)
    tokens = jnp.asarray([[1, 5, 2, 9, 3]])
    mask = jnp.tril(jnp.ones((1, 5, 5), bool))
    hidden = decoder.hidden_states(params, cfg, tokens, jnp.arange(5)[None], mask)
    return decoder.lm_logits(params, cfg, hidden)


def test_fresh_adapters_change_nothing_at_all():
    params = init_params(CFG, 3)
    adapters = init_adapters(params, ALL, 0)
    same = merge(params, adapters, scale_of(ALL))
    jax.tree.map(np.testing.assert_array_equal, same, params)
    np.testing.assert_array_equal(logits(attach(params, adapters, 2.0)), logits(params))


def test_shapes_bounds_and_seeds_of_fresh_adapters():
    shapes = param_shapes(CFG)
    conf = LoraConf(rank=3, targets=["q", "down"])
    adapters = init_adapters(shapes, conf, 0)
    assert jax.tree.map(jnp.shape, adapters) == {
        "layers": {
            "q": {"a": (2, 16, 3), "b": (2, 3, 16)},
            "down": {"a": (2, 24, 3), "b": (2, 3, 16)},
        }
    }
    a = adapters["layers"]["q"]["a"]
    assert 0.2 < float(jnp.abs(a).max()) <= 0.25  # 1 / sqrt(16)
    assert not np.asarray(adapters["layers"]["q"]["b"]).any()
    alone = init_adapters(shapes, LoraConf(rank=3, targets=["q"]), 0)
    np.testing.assert_array_equal(alone["layers"]["q"]["a"], a)
    other = init_adapters(shapes, conf, 1)
    assert not np.array_equal(other["layers"]["q"]["a"], a)


def test_merging_adds_the_scaled_product_to_the_targets_only():
    params = init_params(CFG, 3)
    conf = LoraConf(rank=2, alpha=8.0, targets=["v", "head"])
    adapters = nudged(init_adapters(params, conf, 0))
    merged = merge(params, adapters, scale_of(conf))
    pair = jax.tree.map(lambda x: np.asarray(x, np.float64), adapters["layers"]["v"])
    wanted = np.asarray(params["layers"]["v"], np.float64) + 4.0 * pair["a"] @ pair["b"]
    np.testing.assert_allclose(merged["layers"]["v"], wanted, rtol=1e-6, atol=1e-7)
    pair = jax.tree.map(lambda x: np.asarray(x, np.float64), adapters["head"])
    wanted = np.asarray(params["head"], np.float64) + 4.0 * pair["a"] @ pair["b"]
    np.testing.assert_allclose(merged["head"], wanted, rtol=1e-6, atol=1e-7)
    for name in ("q", "k", "o", "gate", "up", "down", "attn_norm", "mlp_norm"):
        assert merged["layers"][name] is params["layers"][name]
    assert merged["embed"] is params["embed"]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_attached_weights_give_the_logits_and_gradients_of_merged_ones(remat):
    params = jax.tree.map(lambda p: p * 8, init_params(CFG, 3))
    adapters = nudged(init_adapters(params, ALL, 0))
    scale = scale_of(ALL)

    def loss(adapters, joined):
        return jnp.sum(jnp.sin(logits(joined(params, adapters, scale), remat=remat)))

    def plain(params, adapters, scale):
        """The same by automatic differentiation of whole weights."""
        tree = dict(params, layers=dict(params["layers"]))
        for name, pair in adapters["layers"].items():
            change = scale * jnp.einsum("ldr,lrf->ldf", pair["a"], pair["b"])
            tree["layers"][name] = params["layers"][name] + change
        head = adapters["head"]
        tree["head"] = params["head"] + scale * head["a"] @ head["b"]
        return tree

    ours, gradient = jax.jit(jax.value_and_grad(lambda a: loss(a, attach)))(adapters)
    theirs, wanted = jax.jit(jax.value_and_grad(lambda a: loss(a, plain)))(adapters)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)

    def close(found, right):
        np.testing.assert_allclose(found, right, rtol=0, atol=2e-5 * float(jnp.abs(right).max()))

    jax.tree.map(close, gradient, wanted)
    assert all(float(jnp.abs(leaf).max()) > 1e-4 for leaf in jax.tree.leaves(gradient))


def test_whole_matrices_of_all_layers_are_never_held_at_once():
    cfg = dataclasses.replace(CFG, hidden_size=64, intermediate_size=256, num_layers=12)
    params = init_params(cfg, 0)
    conf = LoraConf(rank=2, targets=["q", "k", "v", "o", "gate", "up", "down"])
    adapters = init_adapters(params, conf, 0)

    def loss(adapters, params):
        return jnp.sum(logits(attach(params, adapters, 1.0), cfg))

    memory = jax.jit(jax.grad(loss)).lower(adapters, params).compile().memory_analysis()
    matrices = sum(4 * params["layers"][name].size for name in conf.targets)
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.6 * matrices


@given(st.integers(0, 1000), st.sampled_from(["float32", "bfloat16"]))
def test_gradient_of_a_product_with_an_adapted_matrix(seed, dtype):
    rng = np.random.default_rng(seed)
    x, w, a, b, g = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((7, 6), (6, 5), (6, 2), (2, 5), (7, 5))
    )
    weight = Adapted(w, a, b, 0.7)
    found = to_weight(weight, x.astype(dtype), g.astype(dtype))
    x64, a64, b64, g64 = (np.asarray(v, np.float64) for v in (x, a, b, g))
    size = 3e-6 if dtype == "float32" else 3e-2
    for ours, wanted in ((found.a, x64.T @ g64 @ b64.T), (found.b, a64.T @ x64.T @ g64)):
        np.testing.assert_allclose(ours, 0.7 * wanted, atol=size * np.abs(wanted).max())
    assert found.base is None
    np.testing.assert_allclose(
        whole(weight), np.asarray(w) + 0.7 * np.asarray(a) @ np.asarray(b), atol=1e-5
    )


def test_inputs_get_the_gradient_of_the_whole_matrix():
    rng = np.random.default_rng(0)
    x, w, a, b, u, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((3, 6), (6, 5), (6, 2), (2, 5), (6, 5), (5, 6))
    )
    weight = Adapted(w, a, b, 0.3)

    def ours(x):
        return jnp.sum(project(x, (weight,), "float32")[0] ** 2) + jnp.sum(
            gated_mlp(x, weight, u, v, "float32")
        )

    def theirs(x):
        matrix = w + 0.3 * a @ b
        return jnp.sum((x @ matrix) ** 2) + jnp.sum((jax.nn.silu(x @ matrix) * (x @ u)) @ v)

    np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(theirs)(x), rtol=1e-4, atol=1e-4)


def test_every_wrong_target_and_rank_is_listed_at_once():
    tied = param_shapes(dataclasses.replace(CFG, tie_embeddings=True))
    with pytest.raises(InputError) as caught:
        check(tied, LoraConf(rank=2, targets=["q", "qkv", "head", "embed"]))
    assert [p.value for p in caught.value.problems] == ["qkv", "head", "embed"]
    assert "choose from: down, gate, k, o, q, up, v" in str(caught.value)
    with pytest.raises(InputError) as caught:
        check(tied, LoraConf(rank=9, targets=["q", "k", "v"]))
    assert [p.where for p in caught.value.problems] == ["policy.lora.rank"] * 2
    assert "k is 16 x 8: its rank is 8" in str(caught.value)


def test_matrices_of_both_stacks_of_a_hybrid_can_be_adapted():
    matrix, vector = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), jnp.zeros((3, 8))
    weights = {
        "embed": jnp.zeros((5, 8)),
        "layers": {"q": matrix, "gate": matrix, "attn_gate": matrix, "q_norm": vector},
        "linear_layers": {"qkv": matrix, "gate": matrix, "conv": matrix, "a_log": vector},
    }
    assert linears(weights) == {
        "q": ["layers"],
        "gate": ["layers", "linear_layers"],
        "attn_gate": ["layers"],
        "qkv": ["linear_layers"],
    }
    adapters = init_adapters(weights, LoraConf(rank=2, targets=["gate", "qkv"]), 0)
    assert {stack: sorted(parts) for stack, parts in adapters.items()} == {
        "layers": ["gate"],
        "linear_layers": ["gate", "qkv"],
    }
    one, two = adapters["layers"]["gate"]["a"], adapters["linear_layers"]["gate"]["a"]
    assert not np.array_equal(one, two)
