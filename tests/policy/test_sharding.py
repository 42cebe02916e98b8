from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from evojax.config import AlgorithmConf, MeshConf
from evojax.errors import InputError
from evojax.grpo.optimizer import OPTIMIZERS
from evojax.grpo.update import Updater
from evojax.policy import sharding
from evojax.policy.decoder import ModelConfig, param_shapes
from evojax.policy.shape import TRAITS, LinearConfig

TINY = ModelConfig(
    vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=4, rope_theta=1e4, rms_eps=1e-5, max_position=64, tie_embeddings=False,
)  # fmt: skip


def family(name):
    traits = TRAITS[name]
    linear = LinearConfig(2, 1, 2, 4, 4, 4) if "linear" in traits else None
    flags = {trait: True for trait in traits - {"linear"}}
    return dataclasses.replace(TINY, family=name, linear=linear, **flags)


def mesh(data=1, fsdp=1, tp=1):
    return AbstractMesh((data, fsdp, tp), sharding.AXES)


@pytest.mark.parametrize("name", list(TRAITS))
def test_every_weight_of_every_family_has_a_rule_of_its_rank(name):
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(family(name))):
        weight = path[-1].key
        assert weight in sharding.RULES, f"{weight} has no rule"
        assert len(sharding.RULES[weight]) in (0, len(leaf.shape))


def test_specs_by_hand():
    specs = sharding.param_specs(param_shapes(TINY), mesh(2, 2, 2), sharding.head_units(TINY))
    assert specs["embed"] == P("tp", "fsdp") and specs["head"] == P("fsdp", "tp")
    layers = specs["layers"]
    assert layers["q"] == layers["gate"] == P(None, "fsdp", "tp")
    assert layers["o"] == layers["down"] == P(None, "tp", "fsdp")
    assert layers["attn_norm"] == specs["final_norm"] == P()


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_moments_lie_where_their_weights_do(name):
    shapes = Updater(TINY, AlgorithmConf(optimizer=name), 1.0).abstract_state()
    specs = sharding.param_specs(shapes, mesh(2, 2, 2))
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(shapes),
        jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
        strict=True,
    )
    cut = 0
    for (path, leaf), spec in pairs:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        expected = P(*sharding.RULES.get(names[-1], ()))
        assert spec == (expected if len(expected) == leaf.ndim else P())
        cut += "opt_state" in names and spec != P()
    assert cut > 0


def test_adapters_follow_their_matrix():
    def pair(inputs, outputs):
        shapes = {"a": (4, inputs, 2), "b": (4, 2, outputs)}
        return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    specs = sharding.param_specs({"q": pair(8, 16), "o": pair(16, 8)}, mesh(1, 2, 2))
    assert specs["q"] == {"a": P(None, "fsdp", None), "b": P(None, None, "tp")}
    assert specs["o"] == {"a": P(None, "tp", None), "b": P(None, None, "fsdp")}


def test_everything_that_cannot_be_cut_is_named_at_once():
    with pytest.raises(InputError) as caught:
        sharding.param_specs(param_shapes(TINY), mesh(1, 3, 4), sharding.head_units(TINY))
    texts = [str(problem) for problem in caught.value.problems]
    found = {(text.split(" of ")[1].split(" ")[0], text.split(" = ")[0]) for text in texts}
    assert ("embed", "hardware.mesh.fsdp") in found and ("head", "hardware.mesh.fsdp") in found
    assert ("layers.k", "hardware.mesh.tp") in found, "two key heads over four"
    assert ("layers.q", "hardware.mesh.tp") not in found
    assert any(
        "dimension 2 of layers.k (4, 8, 8), 2 heads, cannot be cut into 4" in t for t in texts
    )
    assert all("divisor of" in text for text in texts)


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(InputError, match="the mesh has 64 devices, and"):
        sharding.make_mesh(MeshConf(4, 4, 4))
    assert sharding.make_mesh(MeshConf()).shape == {"data": 1, "fsdp": 1, "tp": 1}


def test_placed_arrays_are_copies_and_come_back_whole():
    one = sharding.make_mesh(MeshConf())
    tree = {"embed": jnp.arange(128.0).reshape(16, 8), "step": jnp.int32(3)}
    there = sharding.place(tree, sharding.shardings(tree, one))
    back = sharding.local(there)
    assert jax.tree.all(jax.tree.map(np.array_equal, back, tree))
    jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(there)
    np.testing.assert_array_equal(tree["embed"], np.arange(128.0).reshape(16, 8))


def test_without_a_mesh_nothing_is_constrained():
    tree = {"q": jnp.ones((2, 3))}
    assert sharding.for_use(tree) is tree and sharding.laid_out(tree) is tree
    assert sharding.replicated(tree) is tree and sharding.batch_shards(None) == 1
