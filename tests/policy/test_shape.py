"""Shapes of every family: what is possible, which arrays follow, and the published sizes."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from family_shapes import SHAPES
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from evojax import cli  # registers the schema  # noqa: F401
from evojax.config import ArchConf, LinearConf, PolicyConf, RopeScalingConf
from evojax.paths import conf_dir
from evojax.policy.conf import arch_problems, arch_shape, policy_problems
from evojax.policy.decoder import init_params, param_shapes
from evojax.policy.shape import (
    SMOLLM2_135M,
    LinearConfig,
    ModelConfig,
    RopeScaling,
    leaf_shapes,
    num_params,
)
from evojax.preflight import recipe_problems

# Weights in the published files, without vision towers, extra heads and tied copies.
PUBLISHED = {
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_5_4b": 4_210_000_000,
    "qwen3_5_9b": 8_950_000_000,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
}
ROUNDED = ("qwen3_5_4b", "qwen3_5_9b")  # known to three digits only


def policy(preset: str) -> PolicyConf:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config", ["+experiment=math", f"policy={preset}"])
    assert recipe_problems(cfg) == []
    found = OmegaConf.to_object(cfg.policy)
    assert isinstance(found, PolicyConf)
    return found


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_weights(preset: str):
    shape = arch_shape(policy(preset))
    assert shape.faults() == [] and shape.remat == "full"
    allowed = 0.01 if preset in ROUNDED else 0
    assert num_params(shape) == pytest.approx(PUBLISHED[preset], rel=allowed, abs=0)


def test_presets_say_what_sets_their_family_apart():
    hybrid = arch_shape(policy("qwen3_5_4b"))
    assert hybrid.linear == LinearConfig(4, 16, 32, 128, 128, 4)
    assert (hybrid.full_layers, hybrid.linear_layers, hybrid.rotary_dim) == (8, 24, 64)
    assert hybrid.attn_gate and hybrid.qk_norm and not hybrid.qkv_bias
    assert arch_shape(policy("llama3_1b")).rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert arch_shape(policy("qwen2_5_7b")).qkv_bias
    qwen3 = arch_shape(policy("qwen3_0_6b"))
    assert qwen3.qk_norm and qwen3.num_heads * qwen3.head_dim == 2 * qwen3.hidden_size
    assert num_params(SMOLLM2_135M) == 134_515_008


@pytest.mark.parametrize("name", SHAPES)
def test_arrays_have_the_shapes_that_are_foretold(name: str):
    cfg = SHAPES[name]
    assert cfg.faults() == []
    made = jax.tree.map(lambda a: (a.shape, a.dtype), init_params(cfg, 0))
    told = jax.tree.map(lambda a: (a.shape, a.dtype), param_shapes(cfg))
    assert made == told
    assert num_params(cfg) == sum(a.size for a in jax.tree.leaves(param_shapes(cfg)))


def test_a_hybrid_keeps_its_two_kinds_of_layers_apart():
    tree = leaf_shapes(SHAPES["qwen3_5"])
    assert tree["layers"]["attn_gate"] == (2, 24, 64) and tree["layers"]["k_norm"] == (2, 16)
    linear = tree["linear_layers"]
    assert linear["qkv"] == (4, 24, 2 * 2 * 8 + 4 * 6) and linear["conv"] == (4, 56, 4)
    assert linear["z"] == (4, 24, 24) and linear["a_log"] == (4, 4)
    assert linear["gated_norm"] == (4, 6) and linear["out"] == (4, 24, 24)
    assert linear["down"] == (4, 40, 24)


def test_faults_name_every_field():
    bad = ModelConfig(0, -1, 8, 1, 4, 2, 5, 1e4, 1e-5, 16, remat="some")
    assert [fault.split()[0] for fault in bad.faults()] == [
        *("vocab_size", "hidden_size", "head_dim", "remat")
    ]
    odd = dataclasses.replace(
        SHAPES["qwen3_5"],
        num_layers=7,
        linear=LinearConfig(3, 2, 5, 8, 0, 4),
        rotary_share=0.32,
        qkv_bias=True,
        rope_scaling=RopeScaling(0.5, 4.0, 1.0, 0),
    )
    assert [fault.split()[0] for fault in odd.faults()] == [
        *("rotary_share", "qkv_bias", "linear.value_dim", "num_layers", "linear.value_heads"),
        *("rope_scaling.factor", "rope_scaling", "rope_scaling.original_max_position"),
    ]
    plain = dataclasses.replace(SHAPES["qwen3"], family="llama", rotary_share=0.5)
    assert [fault.split()[0] for fault in plain.faults()] == ["qk_norm", "rotary_share"]
    assert dataclasses.replace(plain, family="gpt").faults()[0].startswith("family gpt is not one")


def test_the_stated_shape_follows_the_section():
    arch = ArchConf(
        family="qwen3_5",
        num_layers=4,
        head_dim=16,
        rotary_share=0.5,
        linear=LinearConf(interval=2),
        rope_scaling=RopeScalingConf(factor=4.0),
    )
    shape = arch_shape(PolicyConf(source="random", arch=arch, remat="dots"))
    assert shape.faults() == [] and (shape.head_dim, shape.remat) == (16, "dots")
    assert shape.linear == LinearConfig(2, 2, 4, 8, 8, 4)
    assert shape.rope_scaling == RopeScaling(4.0, 1.0, 4.0, 8192)
    plain = arch_shape(PolicyConf(source="random"))
    assert plain.head_dim == 8 and plain.rope_scaling is None and plain.linear is None


def test_problems_of_the_section_name_their_keys():
    arch = ArchConf(family="qwen4", hidden_size=30, num_kv_heads=3, rms_eps=float("nan"))
    found = arch_problems(PolicyConf(source="random", arch=arch))
    assert {p.where for p in found} == {
        *("policy.arch.family", "policy.arch.head_dim", "policy.arch.hidden_size"),
        "policy.arch.rms_eps",
    }
    hub = PolicyConf(source="hub", repo="Qwen3-0.6B", revision=" ")
    assert [p.where for p in policy_problems(hub)] == ["policy.repo", "policy.revision"]
    assert not list(policy_problems(dataclasses.replace(hub, source="path")))
