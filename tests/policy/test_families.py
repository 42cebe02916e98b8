"""Every family as it is stored: config.json, tensor names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_shapes import SHAPES, family_params
from safetensors.numpy import load_file, save_file

from evojax.errors import InputError
from evojax.policy.families import FAMILIES, family_of
from evojax.policy.families.base import read_shape, written_config
from evojax.policy.hf import load_hf, save_hf
from evojax.policy.shape import TRAITS, ModelConfig, leaf_shapes
from evojax.policy.tokenizer import CharTokenizer


def saved(directory: Path, name: str, **options) -> tuple[ModelConfig, dict]:
    cfg, params = SHAPES[name], family_params(name)
    save_hf(directory, cfg, params, CharTokenizer(32), **options)
    return cfg, params


def edit_config(directory: Path, change) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def tensors(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model.safetensors")


def same_tree(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_every_family_of_the_decoder_can_be_stored():
    assert set(FAMILIES) == set(TRAITS) == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_config_json_says_the_shape_and_nothing_is_lost(name: str):
    raw = json.loads(json.dumps(written_config(SHAPES[name])))
    assert read_shape(raw) == (SHAPES[name], [])


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_saved_loads_back(tmp_path: Path, name: str):
    cfg, params = saved(tmp_path, name)
    loaded_cfg, loaded = load_hf(tmp_path)
    assert loaded_cfg == cfg
    if name != "qwen3_5":
        same_tree(loaded, params)
    else:  # norms are stored as their distance from 1, which rounds where they are far from it
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), loaded, params)
    save_hf(tmp_path / "again", cfg, loaded, CharTokenizer(32))
    same_tree(load_hf(tmp_path / "again")[1], loaded)


@pytest.mark.parametrize("name", SHAPES)
def test_every_weight_has_exactly_one_place_in_the_files(name: str):
    cfg = SHAPES[name]
    leaves = [leaf for tensor in family_of(cfg).tensors(cfg) for leaf in tensor.leaves]
    assert len(set(leaves)) == len(leaves)
    wanted = set()
    for group, shape in leaf_shapes(cfg).items():
        if isinstance(shape, dict):
            wanted |= {(group, n, i) for n, of in shape.items() for i in range(of[0])}
        else:
            wanted.add(("", group, None))
    assert {(leaf.group, leaf.name, leaf.layer) for leaf in leaves} == wanted


def test_biases_and_head_norms_are_stored_under_their_names(tmp_path: Path):
    _, params = saved(tmp_path / "a", "qwen2")
    stored = tensors(tmp_path / "a")
    np.testing.assert_array_equal(
        stored["model.layers.1.self_attn.k_proj.bias"], params["layers"]["k_bias"][1]
    )
    _, params = saved(tmp_path / "b", "qwen3")
    stored = tensors(tmp_path / "b")
    np.testing.assert_array_equal(
        stored["model.layers.0.self_attn.q_norm.weight"], params["layers"]["q_norm"][0]
    )


def test_queries_and_gate_of_a_head_follow_each_other_in_the_file(tmp_path: Path):
    cfg, params = saved(tmp_path, "qwen3_5")
    stored = tensors(tmp_path)["model.layers.5.self_attn.q_proj.weight"]  # the second full layer
    assert stored.shape == (4 * 2 * 16, 24)
    for head in range(4):
        own = slice(head * 16, (head + 1) * 16)
        rows = stored[head * 32 : (head + 1) * 32]
        np.testing.assert_array_equal(rows[:16], params["layers"]["q"][1][:, own].T)
        np.testing.assert_array_equal(rows[16:], params["layers"]["attn_gate"][1][:, own].T)


def test_hybrid_layers_are_numbered_as_they_run(tmp_path: Path):
    _, params = saved(tmp_path, "qwen3_5")
    stored = tensors(tmp_path)
    norm = stored["model.layers.3.linear_attn.norm.weight"]  # linear: 0, 1, 3, 4; full: 2, 5
    np.testing.assert_array_equal(norm, params["linear_layers"]["gated_norm"][2])
    conv = stored["model.layers.1.linear_attn.conv1d.weight"]
    assert conv.shape == (56, 1, 4)
    np.testing.assert_array_equal(conv[:, 0], params["linear_layers"]["conv"][1])
    centred = stored["model.layers.2.input_layernorm.weight"]
    np.testing.assert_allclose(centred, params["layers"]["attn_norm"][0] - 1, atol=1e-7)


def test_a_model_with_a_vision_tower_gives_its_text_decoder(tmp_path: Path, capsys):
    cfg, _ = saved(tmp_path, "qwen3_5")
    _, alone = load_hf(tmp_path)
    assert capsys.readouterr().err == ""
    stored = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in tensors(tmp_path).items()
    }
    stored["model.visual.blocks.0.attn.qkv.weight"] = np.ones((3, 3), np.float32)
    stored["mtp.fc.weight"] = np.ones((2, 2), np.int8)
    save_file(stored, tmp_path / "model.safetensors")

    def nested(raw: dict) -> dict:
        tied = raw.pop("tie_word_embeddings")
        outer = {"model_type": "qwen3_5", "vision_config": {}, "tie_word_embeddings": tied}
        return outer | {"text_config": raw}

    edit_config(tmp_path, nested)
    found, params = load_hf(tmp_path)
    assert found == cfg
    same_tree(params, alone)
    assert "2 tensors that do not belong to the text decoder" in capsys.readouterr().err


def test_irregular_hybrids_are_refused_with_all_their_faults(tmp_path: Path):
    raw = written_config(SHAPES["qwen3_5"])
    raw["layer_types"] = ["full_attention", *raw["layer_types"][1:]]
    raw |= {"linear_num_key_heads": None, "attn_output_gate": False, "hidden_size": 0}
    cfg, found = read_shape(raw)
    assert cfg is None
    for part in ("layer_types", "linear_num_key_heads", "attn_output_gate", "hidden_size"):
        assert sum(part in what for what in found) == 1
    raw = written_config(SHAPES["qwen3_5"])
    del raw["layer_types"]
    cfg, found = read_shape(raw | {"full_attention_interval": 4})
    assert found == ["num_layers 6 is not a multiple of interval 4"]


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen3", {"attention_bias": True}, "attention_bias True"),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("llama", {"partial_rotary_factor": 0.5}, "rotary_share 0.5"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "needs a number factor"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("qwen3", {"model_type": "qwen3_moe"}, "only 'llama', 'qwen2', 'qwen3', 'qwen3_5'"),
    ],
)
def test_what_the_decoder_does_not_implement_is_named(name: str, change: dict, part: str):
    _, found = read_shape(written_config(SHAPES[name]) | change)
    assert any(part in what for what in found), found


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path):
    cfg, params = saved(tmp_path, "qwen2", shard_bytes=9_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 3 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    sizes = [sum(a.nbytes for a in load_file(tmp_path / n).values()) for n in names]
    assert max(sizes) <= 9_000 and sum(sizes) == index["metadata"]["total_size"]
    same_tree(load_hf(tmp_path)[1], params)
    save_hf(tmp_path, cfg, params, CharTokenizer(32))  # one file again: no shard of before stays
    assert [f.name for f in tmp_path.glob("model*")] == ["model.safetensors"]
    same_tree(load_hf(tmp_path)[1], params)


def test_weights_can_be_stored_in_bfloat16(tmp_path: Path):
    _, params = saved(tmp_path, "qwen3", dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {str(a.dtype) for a in tensors(tmp_path).values()} == {"bfloat16"}
    loaded = load_hf(tmp_path)[1]
    rounded = jax.tree.map(lambda a: np.asarray(a).astype(jnp.bfloat16).astype(np.float32), params)
    same_tree(loaded, rounded)


def test_a_save_that_is_cut_short_leaves_the_old_model_or_none(tmp_path: Path, monkeypatch):
    _, params = saved(tmp_path, "qwen3")
    before = tensors(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", refuse)
        with pytest.raises(OSError, match="no space left"):
            saved(tmp_path, "qwen2")
    same_tree(tensors(tmp_path), before)
    assert load_hf(tmp_path)[0] == SHAPES["qwen3"] and not (tmp_path / ".saving").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match="no space left"):
            saved(tmp_path, "qwen2")
    with pytest.raises(InputError, match="config.json is missing"):
        load_hf(tmp_path)
