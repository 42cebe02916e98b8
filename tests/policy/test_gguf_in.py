from __future__ import annotations

import dataclasses

import gguf
import jax
import numpy as np
import pytest
from gguf_files import symbol_vocabulary, write_gguf

from evojax.errors import InputError
from evojax.policy.decoder import ModelConfig, init_params
from evojax.policy.gguf_in import count_weights, llama3_factors, load_gguf
from evojax.policy.hf import load_hf, save_hf
from evojax.policy.shape import RopeScaling, num_params
from evojax.policy.tokenizer import ALPHABET, HFTokenizer

LLAMA = ModelConfig(6, 32, 64, 2, 2, 1, 16, 100.0, 1e-5, 64)
SHAPES = {
    "llama": LLAMA,
    "untied": dataclasses.replace(LLAMA, tie_embeddings=False),
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, head_dim=32),
}


def params_of(cfg: ModelConfig):
    """Weights in which biases and norms are no constants either."""
    rng = np.random.default_rng(4)
    return jax.tree.map(
        lambda p: p + rng.normal(size=p.shape).astype(np.float32), init_params(cfg, 4)
    )


@pytest.mark.parametrize("name", SHAPES)
def test_weights_shape_and_tokenizer_come_back_and_go_out_as_safetensors(name, tmp_path):
    cfg = SHAPES[name]
    params = params_of(cfg)
    write_gguf(tmp_path / "m.gguf", cfg, params)
    found, loaded, tokenizer = load_gguf(tmp_path / "m.gguf")
    assert found == cfg
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert count_weights(tmp_path / "m.gguf") == num_params(cfg)
    assert tokenizer.encode("<|start|>1a2").tolist() == [1, 2, 4, 3]  # digits stand alone
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) == ((0,), 1, 0)
    assert tokenizer.chat([{"role": "user", "content": "a"}]).tolist() == [4]
    save_hf(tmp_path / "out", found, loaded, tokenizer)
    again, stored = load_hf(tmp_path / "out")
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, stored, params)
    assert HFTokenizer.load(tmp_path / "out").encode("1a2").tolist() == [2, 4, 3]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_quantized_weights_are_expanded_exactly(kind, tmp_path):
    form = gguf.GGMLQuantizationType[kind]
    params = params_of(LLAMA)
    write_gguf(tmp_path / "m.gguf", LLAMA, params, kind=form)
    _, loaded, _ = load_gguf(tmp_path / "m.gguf")
    matrix = np.ascontiguousarray(np.asarray(params["layers"]["down"][1]).T)
    wanted = gguf.dequantize(gguf.quantize(matrix, form), form).T
    np.testing.assert_array_equal(loaded["layers"]["down"][1], wanted)
    error = np.abs(np.asarray(loaded["layers"]["q"]) - np.asarray(params["layers"]["q"]))
    assert 0 < error.max() < 0.4


def test_only_llama_files_have_their_query_and_key_rows_in_another_order(tmp_path):
    for cfg in (LLAMA, SHAPES["qwen3"]):
        params = params_of(cfg)
        write_gguf(tmp_path / f"{cfg.family}.gguf", cfg, params)
        reader = gguf.GGUFReader(str(tmp_path / f"{cfg.family}.gguf"))
        raw = {t.name: t.data for t in reader.tensors}["blk.0.attn_q.weight"]
        same = np.array_equal(raw, np.asarray(params["layers"]["q"][0]).T)
        assert same == (cfg.family != "llama")


def test_the_rotary_factors_of_llama_3_become_its_scaling(tmp_path):
    cfg = dataclasses.replace(
        LLAMA, head_dim=16, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192)
    )
    assert cfg.rope_scaling is not None
    factors = llama3_factors(cfg.rope_scaling, 5e5, 16).astype(np.float32)
    # wavelength 2 pi theta^(2i/d): 6.28 .. 6.3e5; above 8192 stretched in full, below 2048 not
    assert factors[0] == 1 and factors[-1] == 8 and 1 < factors[4] < 8
    params = params_of(cfg)
    write_gguf(
        tmp_path / "m.gguf",
        cfg,
        params,
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    assert load_gguf(tmp_path / "m.gguf")[0] == cfg
    write_gguf(
        tmp_path / "odd.gguf",
        cfg,
        params,
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors**0.5),
    )
    with pytest.raises(InputError, match="are not those of Llama 3"):
        load_gguf(tmp_path / "odd.gguf")


def test_every_problem_of_a_file_is_listed_at_once(tmp_path):
    params = params_of(LLAMA)

    def foreign(writer):
        writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 2), np.float32))
        writer.add_tensor("output.weight", np.zeros((6, 16), np.float32))

    write_gguf(tmp_path / "m.gguf", LLAMA, params, leave_out="blk.1.attn_k.weight", extra=foreign)
    with pytest.raises(InputError) as caught:
        load_gguf(tmp_path / "m.gguf")
    text = [p.what for p in caught.value.problems]
    assert text == [
        "tensor blk.1.attn_k.weight is missing",
        "tensor blk.0.ffn_gate_exps.weight has no place in a llama decoder",
        "tensor output.weight has shape (6, 16), the fields ask for (6, 32)",
    ]
    assert {p.where for p in caught.value.problems} == {"policy.path"}


def test_options_that_the_decoder_lacks_are_refused(tmp_path):
    def options(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_value_length(8)

    write_gguf(tmp_path / "m.gguf", LLAMA, params_of(LLAMA), extra=options)
    with pytest.raises(InputError) as caught:
        load_gguf(tmp_path / "m.gguf")
    assert [p.what for p in caught.value.problems] == [
        "rope.scaling.type 'yarn' is not supported, only 'none' is",
        "attention.value_length 8 is not supported, only 16 is",
    ]


def test_what_is_no_gguf_file_or_no_known_architecture(tmp_path):
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(InputError, match="cannot be read"):
        load_gguf(tmp_path / "text.gguf")
    with pytest.raises(InputError, match="cannot be read"):
        load_gguf(tmp_path / "absent.gguf")
    write_gguf(tmp_path / "m.gguf", LLAMA, params_of(LLAMA))
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be read"):
        load_gguf(tmp_path / "cut.gguf")
    other = dataclasses.replace(LLAMA, family="gemma3")
    write_gguf(tmp_path / "other.gguf", other, params_of(LLAMA))
    with pytest.raises(InputError, match="architecture 'gemma3' is not supported"):
        load_gguf(tmp_path / "other.gguf")


def test_splitting_rules_and_a_tokenizer_beside_the_file(tmp_path):
    params = params_of(dataclasses.replace(LLAMA, vocab_size=len(ALPHABET) + 1))
    cfg = dataclasses.replace(LLAMA, vocab_size=len(ALPHABET) + 1)
    write_gguf(tmp_path / "m.gguf", cfg, params, pre="qwen2", vocabulary=symbol_vocabulary)
    _, _, tokenizer = load_gguf(tmp_path / "m.gguf")
    assert tokenizer.encode("3+4= ??\n").tolist() == [3, 10, 4, 12, 14, 16, 15]
    assert tokenizer.decode([3, 14, 15]) == "3 \n" and tokenizer.bos_id is None
    write_gguf(tmp_path / "n.gguf", cfg, params, pre="mystery", vocabulary=symbol_vocabulary)
    with pytest.raises(InputError, match="splits texts by 'mystery'"):
        load_gguf(tmp_path / "n.gguf")
    tokenizer.save(tmp_path)
    _, _, beside = load_gguf(tmp_path / "n.gguf")
    assert beside.encode("3+4=").tolist() == [3, 10, 4, 12]


def test_words_of_the_vocabulary_and_a_first_token_in_the_style_of_llama_3(tmp_path):
    write_gguf(
        tmp_path / "m.gguf",
        LLAMA,
        params_of(LLAMA),
        pre="llama-bpe",
        extra=lambda writer: writer.add_add_bos_token(True),
    )
    _, _, tokenizer = load_gguf(tmp_path / "m.gguf")
    assert tokenizer.encode("12 a").tolist()[0] == 1
    assert tokenizer.chat([{"role": "user", "content": "12"}]).tolist() == [2, 3]
