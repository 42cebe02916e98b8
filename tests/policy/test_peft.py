from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from evojax.config import LoraConf
from evojax.errors import InputError
from evojax.policy.decoder import ModelConfig, init_params, param_shapes
from evojax.policy.hf import save_hf
from evojax.policy.lora import init_adapters, merge, scale_of
from evojax.policy.peft import load_peft, save_peft
from evojax.policy.shape import LinearConfig
from evojax.policy.tokenizer import CharTokenizer

CFG = ModelConfig(11, 16, 24, 2, 4, 2, 4, 10000.0, 1e-5, 128)
CONF = LoraConf(rank=3, alpha=6.0, targets=["q", "v", "down"])
HYBRID = dataclasses.replace(
    CFG,
    num_layers=8,
    family="qwen3_5",
    qk_norm=True,
    rotary_share=0.5,
    attn_gate=True,
    linear=LinearConfig(4, 2, 4, 4, 4, 3),
)


def made(cfg=CFG, conf=CONF):
    rng = np.random.default_rng(2)
    fresh = init_adapters(param_shapes(cfg), conf, 0)
    return jax.tree.map(lambda a: a + jnp.asarray(rng.normal(size=a.shape), a.dtype), fresh)


def test_names_shapes_and_settings_are_those_of_peft(tmp_path):
    adapters = made()
    save_peft(tmp_path, CFG, adapters, CONF, "org/base")
    stored = load_file(str(tmp_path / "adapter_model.safetensors"))
    prefix = "base_model.model.model.layers.1."
    assert len(stored) == 2 * 2 * 3
    assert stored[f"{prefix}self_attn.q_proj.lora_A.weight"].shape == (3, 16)
    assert stored[f"{prefix}mlp.down_proj.lora_B.weight"].shape == (16, 3)
    np.testing.assert_array_equal(
        stored[f"{prefix}self_attn.v_proj.lora_B.weight"],
        np.asarray(adapters["layers"]["v"]["b"][1]).T,
    )
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA" and settings["task_type"] == "CAUSAL_LM"
    assert (settings["r"], settings["lora_alpha"]) == (3, 6.0)
    assert settings["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert settings["base_model_name_or_path"] == "org/base" and settings["rank_pattern"] == {}


@pytest.mark.parametrize(
    ("cfg", "targets"),
    [
        (CFG, ["q", "v", "down"]),
        (dataclasses.replace(CFG, tie_embeddings=False), ["head", "gate"]),
        (HYBRID, ["q", "attn_gate", "qkv", "a", "b", "z", "out", "up"]),
        (HYBRID, ["q"]),
        (HYBRID, ["attn_gate", "k"]),
    ],
)
def test_adapters_come_back_bit_for_bit(cfg, targets, tmp_path):
    conf = LoraConf(rank=2, alpha=1.5, targets=targets)
    adapters = made(cfg, conf)
    save_peft(tmp_path, cfg, adapters, conf, None)
    again = load_peft(tmp_path, cfg, param_shapes(cfg), conf)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)


def test_queries_and_gates_share_one_module_in_a_hybrid(tmp_path):
    """q_proj holds for each head its queries' rows and then its gates'."""
    conf = LoraConf(rank=2, alpha=4.0, targets=["q", "attn_gate"])
    adapters = made(HYBRID, conf)
    save_peft(tmp_path, HYBRID, adapters, conf, None)
    stored = load_file(str(tmp_path / "adapter_model.safetensors"))
    name = "base_model.model.model.layers.7.self_attn.q_proj.lora_"  # the second that attends
    change = (stored[f"{name}B.weight"] @ stored[f"{name}A.weight"]).reshape(4, 2, 4, 16)
    layers = adapters["layers"]
    for place, ours in enumerate(("q", "attn_gate")):
        wanted = np.asarray(layers[ours]["a"][1] @ layers[ours]["b"][1]).T
        np.testing.assert_allclose(change[:, place].reshape(16, 16), wanted, atol=1e-5)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q_proj"]
    assert (settings["rank_pattern"], settings["alpha_pattern"]) == ({"q_proj": 4}, {"q_proj": 8.0})


def test_every_problem_of_a_directory_is_listed_at_once(tmp_path):
    save_peft(tmp_path, CFG, made(), CONF, None)
    shapes = param_shapes(CFG)
    other = LoraConf(rank=2, alpha=5.0, targets=["q", "k"])
    with pytest.raises(InputError) as caught:
        load_peft(tmp_path, CFG, shapes, other)
    text = str(caught.value)
    assert "r 3, 2 is needed" in text and "lora_alpha 6.0, 5.0 is needed" in text
    assert text.count("is missing") == 4 and text.count("belongs to no target") == 8
    assert "layers.0.self_attn.q_proj.lora_A.weight has shape (3, 16), not (2, 16)" in text
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(InputError, match="use_dora True, False is needed"):
        load_peft(tmp_path, CFG, shapes, CONF)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(InputError, match="cannot be read"):
        load_peft(tmp_path, CFG, shapes, CONF)
    with pytest.raises(InputError, match="there is no adapter_config.json"):
        load_peft(tmp_path / "absent", CFG, shapes, CONF)


def test_adapters_that_peft_stored_in_half_precision_are_read_as_float32(tmp_path):
    save_peft(tmp_path, CFG, made(), CONF, None)
    file = str(tmp_path / "adapter_model.safetensors")
    save_file({k: v.astype(np.float16) for k, v in load_file(file).items()}, file)
    again = load_peft(tmp_path, CFG, param_shapes(CFG), CONF)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(again)} == {"float32"}


NAMES = ["q", "k", "v", "o", "gate", "up", "down"]
EXPORTED = {
    "llama": (CFG, NAMES),
    "untied": (dataclasses.replace(CFG, tie_embeddings=False), [*NAMES, "head"]),
    "qwen2": (dataclasses.replace(CFG, family="qwen2", qkv_bias=True), NAMES),
    "qwen3": (dataclasses.replace(CFG, family="qwen3", qk_norm=True), NAMES),
    "qwen3_5": (HYBRID, [*NAMES, "attn_gate", "qkv", "z", "a", "b", "out"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_peft_gives_the_logits_of_the_merged_weights(name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    from peft_reference import adapted_logits
    from torch_reference import reference_logits

    cfg, targets = EXPORTED[name]
    cfg = dataclasses.replace(cfg, vocab_size=16)
    conf = LoraConf(rank=3, alpha=6.0, targets=targets)
    params = jax.tree.map(lambda p: p * 5 if p.ndim == 3 else p, init_params(cfg, 1))
    adapters = jax.tree.map(lambda a: 0.3 * a, made(cfg, conf))
    tokenizer = CharTokenizer(16)
    save_hf(tmp_path / "base", cfg, params, tokenizer)
    save_hf(tmp_path / "merged", cfg, merge(params, adapters, scale_of(conf)), tokenizer)
    save_peft(tmp_path / "adapter", cfg, adapters, conf, str(tmp_path / "base"))
    ids = np.array([1, 5, 2, 9, 3, 14], np.int32)
    merged = reference_logits(tmp_path / "merged", ids)
    found = adapted_logits(tmp_path / "base", tmp_path / "adapter", ids)
    assert np.abs(merged - reference_logits(tmp_path / "base", ids)).max() > 0.05
    assert np.abs(found - merged).max() < 1e-4
