"""Small random models of every family by transformers, and what it says about token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("llama", "qwen2", "qwen3", "qwen3_5")
_SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


# The delta rule carries rounding on: with weights as large as those of the others, the chunked and
# the recurrent form of transformers itself differ by more than 1e-4.
_LARGER = {"qwen3_5": 3.0}


def _config(name: str) -> Any:
    import transformers as hf

    if name == "llama":
        return hf.LlamaConfig(**_SIZES, num_hidden_layers=3, rope_parameters=_LLAMA3)
    if name == "qwen2":
        return hf.Qwen2Config(**_SIZES, num_hidden_layers=3, tie_word_embeddings=False)
    if name == "qwen3":
        return hf.Qwen3Config(**_SIZES, num_hidden_layers=3, head_dim=16, tie_word_embeddings=True)
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**_SIZES, **_LINEAR, num_hidden_layers=8, head_dim=16)


def build(name: str, directory: str | Path) -> None:
    """Write a random model of a family as transformers writes it.

    Weights are large, and norms and biases uneven, so that no part of the model is negligible.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(name)).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(_LARGER.get(name, 8.0))
            else:
                weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(directory, max_shard_size="50KB")


def logits(directory: str | Path, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Logits float32 ``[n, V]`` of every sequence, each computed alone."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return [
            model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
            for ids in sequences
        ]
