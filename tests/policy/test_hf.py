from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from evojax.errors import InputError
from evojax.policy.decoder import ModelConfig, init_params
from evojax.policy.hf import load_hf, read_config, save_hf
from evojax.policy.tokenizer import CharTokenizer

CFG = ModelConfig(32, 24, 40, 2, 4, 2, 6, 5000.0, 1e-5, 128)


def saved(directory: Path, tied: bool = True) -> tuple[ModelConfig, dict]:
    cfg = ModelConfig(**{**vars(CFG), "tie_embeddings": tied})
    params = init_params(cfg, 1)
    save_hf(directory, cfg, params, CharTokenizer(32))
    return cfg, params


def edit_config(directory: Path, **changes) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def same_tree(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_loads_back_bit_for_bit(tmp_path, tied):
    cfg, params = saved(tmp_path, tied)
    loaded_cfg, loaded = load_hf(tmp_path)
    assert loaded_cfg == cfg
    same_tree(loaded, params)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_sharded_half_precision_weights_become_float32(tmp_path, dtype):
    saved(tmp_path)
    tensors = {k: v.astype(dtype) for k, v in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for shard, members in shards.items():
        save_file({n: tensors[n] for n in members}, tmp_path / shard)
    weight_map = {n: shard for shard, members in shards.items() for n in members}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    _, loaded = load_hf(tmp_path)
    assert {a.dtype for a in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    embed = tensors["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(loaded["embed"], embed)


def test_unsupported_family_is_named(tmp_path):
    saved(tmp_path)
    edit_config(tmp_path, model_type="gpt2")
    with pytest.raises(InputError, match="model_type 'gpt2' is not supported") as caught:
        load_hf(tmp_path)
    assert {p.where for p in caught.value.problems} == {"policy.path"}


def test_every_unsupported_option_is_listed_at_once(tmp_path):
    saved(tmp_path)
    edit_config(
        tmp_path,
        hidden_act="gelu",
        attention_bias=True,
        rope_scaling={"rope_type": "yarn", "factor": 8.0},
        num_hidden_layers=0,
    )
    with pytest.raises(InputError) as caught:
        load_hf(tmp_path)
    text = str(caught.value)
    for part in ("hidden_act 'gelu'", "attention_bias True", "'yarn'", "num_hidden_layers"):
        assert part in text
    assert len(caught.value.problems) == 4


def test_every_bad_tensor_is_listed_at_once(tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = np.ones(5, np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(24, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((40, 24), np.int8)
    save_file(tensors, file)
    with pytest.raises(InputError) as caught:
        load_hf(tmp_path)
    assert len(caught.value.problems) == 3
    del tensors["model.layers.0.self_attn.q_proj.bias"], tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((40, 24), np.float32)
    save_file(tensors, file)
    with pytest.raises(InputError, match="tensor model.norm.weight is missing"):
        load_hf(tmp_path)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        load_hf(tmp_path / "absent")
    with pytest.raises(InputError, match="config.json is missing"):
        load_hf(tmp_path)
    saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(InputError, match="model.safetensors cannot be read"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="neither model.safetensors nor"):
        load_hf(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors", "b": "gone.safetensors"}}))
    with pytest.raises(InputError, match="not a plain file name") as caught:
        load_hf(tmp_path)
    assert "gone.safetensors is missing" in str(caught.value)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="config.json cannot be read"):
        load_hf(tmp_path)


def test_older_and_newer_places_of_the_rotary_base(tmp_path):
    saved(tmp_path)
    edit_config(tmp_path, rope_parameters={"rope_theta": 77.0, "rope_type": "default"})
    assert read_config(tmp_path).rope_theta == 77.0


def test_transformers_reads_the_exported_configuration(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    saved(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert config.architectures == ["LlamaForCausalLM"] and config.tie_word_embeddings
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (15, 15, None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert tokenizer("3+4=\n").input_ids == [3, 10, 4, 12, 15]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_model_gives_the_same_logits(tmp_path, tied):
    pytest.importorskip("torch")
    from torch_reference import reference_logits

    from evojax.policy import decoder

    cfg, params = saved(tmp_path, tied)
    ids = np.random.default_rng(0).integers(0, 32, 40).astype(np.int32)
    mask = jnp.tril(jnp.ones((1, 40, 40), bool))
    hidden = decoder.hidden_states(params, cfg, jnp.asarray(ids[None]), jnp.arange(40)[None], mask)
    ours = np.asarray(decoder.lm_logits(params, cfg, hidden))[0]
    np.testing.assert_allclose(ours, reference_logits(tmp_path, ids), atol=1e-5)
