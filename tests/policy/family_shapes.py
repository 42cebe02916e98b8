"""A small decoder of every family, with weights that make each part of it matter."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from evojax.policy.decoder import init_params
from evojax.policy.shape import LinearConfig, ModelConfig, RopeScaling

_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 4,
    "num_kv_heads": 2,
    "rope_theta": 10000.0,
    "rms_eps": 1e-5,
    "max_position": 256,
}
SHAPES = {
    "llama": ModelConfig(
        **_SIZES, num_layers=3, head_dim=6, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)
    ),
    "qwen2": ModelConfig(
        **_SIZES, num_layers=2, head_dim=6, tie_embeddings=False, family="qwen2", qkv_bias=True
    ),
    "qwen3": ModelConfig(**_SIZES, num_layers=2, head_dim=8, family="qwen3", qk_norm=True),
    "qwen3_5": ModelConfig(
        **_SIZES,
        num_layers=6,
        head_dim=16,
        tie_embeddings=False,
        family="qwen3_5",
        qk_norm=True,
        rotary_share=0.25,
        attn_gate=True,
        linear=LinearConfig(3, 2, 4, 8, 6, 4),
    ),
}


def family_params(name: str, seed: int = 0) -> dict:
    """Weights far from their initial values: sharp attention, uneven norms, biases that count."""
    drawn = np.random.default_rng(seed)

    def moved(path, value):
        leaf = path[-1].key
        noise = drawn.normal(size=value.shape).astype(np.float32)
        if leaf in ("a_log", "dt_bias"):
            return np.asarray(value) + 0.3 * noise
        if leaf.endswith(("norm", "bias")):
            return np.asarray(value) + 0.2 * noise
        return (np.float32(6.0) * np.asarray(value)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(moved, init_params(SHAPES[name], seed))
