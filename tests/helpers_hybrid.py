"""A tiny hybrid for tests, with weights under which a wrong neighbour would show."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np

from evojax.policy.decoder import init_params
from evojax.policy.shape import LinearConfig, ModelConfig

HYBRID = ModelConfig(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rms_eps=1e-6,
    max_position=256,
    family="qwen3_5",
    qk_norm=True,
    rotary_share=0.5,
    attn_gate=True,
    linear=LinearConfig(interval=2, key_heads=2, value_heads=4, key_dim=4, value_dim=6, conv=4),
)


@cache
def hybrid_params():
    """Never donated."""
    rng = np.random.default_rng(0)

    def sharper(path, weight):
        name = path[-1].key
        if name.endswith("norm") or name == "dt_bias":
            return weight + rng.normal(0, 0.2, weight.shape).astype(np.float32)
        return weight if name == "a_log" else weight * 8

    return jax.tree_util.tree_map_with_path(sharper, init_params(HYBRID, 0))
