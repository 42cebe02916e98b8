"""Small GGUF files in llama.cpp's order, from our own weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from evojax.policy.decoder import ModelConfig
from evojax.policy.tokenizer import ALPHABET

_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
}
WORDS = ["<|end|>", "<|start|>", "1", "2", "a", "1a"]


def interleaved(matrix: np.ndarray, dim: int) -> np.ndarray:
    """The order in which llama.cpp stores query and key rows of Llama: pairs side by side."""
    rows, width = matrix.shape
    return matrix.reshape(rows // dim, 2, dim // 2, width).swapaxes(1, 2).reshape(rows, width)


def word_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Two special tokens, four words and one merge."""
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["1 a"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def symbol_vocabulary(writer: gguf.GGUFWriter) -> None:
    """The symbols of the tiny problems in byte-level spelling, and a merge they never need."""
    spelled = {" ": "\u0120", "\n": "\u010a"}
    symbols = [spelled.get(symbol, symbol) for symbol in ALPHABET]
    writer.add_token_list([*symbols, "??"])
    writer.add_token_types([1] * (len(symbols) + 1))
    writer.add_token_merges(["? ?"])
    writer.add_eos_token_id(ALPHABET.index("\n"))


def write_gguf(
    file: Path,
    cfg: ModelConfig,
    params,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "smollm",
    vocabulary=word_vocabulary,
    leave_out: str = "",
    extra=None,
) -> None:
    """Write a file of ``cfg.family``.

    Args:
        kind: type that the matrices are stored in. pre: name of the splitting rule.
        leave_out: name of a tensor that is not written. extra: called with the writer.
    """
    writer = gguf.GGUFWriter(str(file), cfg.family)
    writer.add_context_length(cfg.max_position)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_block_count(cfg.num_layers)
    writer.add_head_count(cfg.num_heads)
    writer.add_head_count_kv(cfg.num_kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_layer_norm_rms_eps(cfg.rms_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    vocabulary(writer)

    def tensor(name: str, value: np.ndarray) -> None:
        value = np.ascontiguousarray(value, np.float32)
        if name == leave_out:
            return
        if value.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)

    tensor("token_embd.weight", np.asarray(params["embed"]))
    tensor("output_norm.weight", np.asarray(params["final_norm"]))
    if not cfg.tie_embeddings:
        tensor("output.weight", np.asarray(params["head"]).T)
    for name, stacked in params["layers"].items():
        for i, value in enumerate(np.asarray(stacked)):
            stored = value.T
            if name in ("q", "k") and cfg.family == "llama":
                stored = interleaved(stored, cfg.head_dim)
            tensor(f"blk.{i}.{_NAMES[name]}", stored)
    if extra is not None:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
