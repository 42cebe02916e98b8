"""Qwen3.5, the text decoder: gated delta-net layers, and gated full attention at every fourth.

In the files the norms hold their distance from 1, and ``q_proj`` holds queries and gate of each
head one after the other. A model with a vision tower keeps the decoder under ``text_config``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from evojax.policy.families.base import (
    ATTENTION,
    FAMILIES,
    MLP,
    Family,
    Leaf,
    Raw,
    Tensor,
    layer_tensors,
    rope_settings,
    top_tensors,
)
from evojax.policy.families.qwen3 import QK_NORMS
from evojax.policy.shape import LinearConfig, ModelConfig, leaf_shapes

_LINEAR = {
    "attn_norm": "input_layernorm.weight",
    "qkv": "linear_attn.in_proj_qkv.weight",
    "z": "linear_attn.in_proj_z.weight",
    "b": "linear_attn.in_proj_b.weight",
    "a": "linear_attn.in_proj_a.weight",
    "dt_bias": "linear_attn.dt_bias",
    "a_log": "linear_attn.A_log",
    "gated_norm": "linear_attn.norm.weight",
    "out": "linear_attn.out_proj.weight",
}
_CENTRED = ("attn_norm", "mlp_norm", "final_norm", "q_norm", "k_norm")
_KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv": "linear_conv_kernel_dim",
}
_FULL, _DELTA = "full_attention", "linear_attention"


def _kinds(layers: int, interval: int) -> list[str]:
    """Kind of every layer, in order.

    >>> _kinds(4, 2)
    ['linear_attention', 'full_attention', 'linear_attention', 'full_attention']
    """
    return [_DELTA if (i + 1) % interval else _FULL for i in range(layers)]


def _interval(raw: Raw, found: list[str]) -> int:
    """Every how many layers one attends fully."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return int(raw.get("full_attention_interval", 4))
    interval = kinds.index(_FULL) + 1 if _FULL in kinds else 0
    if not interval or kinds != _kinds(len(kinds), interval):
        found.append("layer_types has no regular pattern that ends in full_attention")
        return 0
    return interval


def _fields(raw: Raw, found: list[str]) -> dict[str, Any]:
    for key in _KEYS.values():
        if not (isinstance(raw.get(key), int) and raw[key] > 0):
            found.append(f"config.json gives no valid {key} (found {raw.get(key)!r})")
    interval = _interval(raw, found)
    if found:
        return {}
    return {
        "linear": LinearConfig(interval, **{ours: raw[theirs] for ours, theirs in _KEYS.items()}),
        "rotary_share": float(rope_settings(raw).get("partial_rotary_factor", 0.25)),
    }


def _written(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.linear is not None
    rope = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    return {
        **{theirs: getattr(cfg.linear, ours) for ours, theirs in _KEYS.items()},
        "layer_types": _kinds(cfg.num_layers, cfg.linear.interval),
        "rope_parameters": rope | {"partial_rotary_factor": cfg.rotary_share},
        "attention_bias": False,
    }


def _tensors(cfg: ModelConfig) -> list[Tensor]:
    assert cfg.linear is not None
    kinds = _kinds(cfg.num_layers, cfg.linear.interval)
    full = [i for i, kind in enumerate(kinds) if kind == _FULL]
    delta = [i for i, kind in enumerate(kinds) if kind == _DELTA]
    attention = {name: stored for name, stored in ATTENTION.items() if name != "q"}
    found = top_tensors(cfg)
    found += layer_tensors(cfg, "layers", full, {**attention, **QK_NORMS, **MLP})
    found += [_query(cfg, place, number) for place, number in enumerate(full)]
    found += layer_tensors(cfg, "linear_layers", delta, {**_LINEAR, **MLP})
    found += [_conv(cfg, place, number) for place, number in enumerate(delta)]
    return [_centred(t) if t.leaves[0].name in _CENTRED else t for t in found]


def _centred(tensor: Tensor) -> Tensor:
    """A norm that is stored as its distance from 1."""
    one = np.float32(1.0)
    return dataclasses.replace(tensor, split=lambda x: (x + one,), join=lambda x: x - one)


def _query(cfg: ModelConfig, place: int, number: int) -> Tensor:
    """``q_proj``: for each head its queries, then its gate, ``[H * 2 * d, D]``."""
    heads, dim, width = cfg.num_heads, cfg.head_dim, cfg.hidden_size

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        both = x.reshape(heads, 2, dim, -1)
        return tuple(both[:, i].reshape(heads * dim, -1).T for i in range(2))

    def join(query: np.ndarray, gate: np.ndarray) -> np.ndarray:
        parts = [x.T.reshape(heads, dim, -1) for x in (query, gate)]
        return np.stack(parts, axis=1).reshape(heads * 2 * dim, -1)

    name = f"model.layers.{number}.{ATTENTION['q']}"
    leaves = (Leaf("layers", "q", place), Leaf("layers", "attn_gate", place))
    return Tensor(name, (heads * 2 * dim, width), leaves, split, join)


def _conv(cfg: ModelConfig, place: int, number: int) -> Tensor:
    """The depthwise convolution, with the one input channel that torch gives each output."""
    channels, size = leaf_shapes(cfg)["linear_layers"]["conv"][1:]
    return Tensor(
        f"model.layers.{number}.linear_attn.conv1d.weight",
        (channels, 1, size),
        (Leaf("linear_layers", "conv", place),),
        lambda x: (x[:, 0],),
        lambda x: x[:, None],
    )


QWEN3_5 = FAMILIES.register("qwen3_5")(
    Family(
        architecture="Qwen3_5ForCausalLM",
        model_types=("qwen3_5_text", "qwen3_5"),
        fields=_fields,
        written=_written,
        tensors=_tensors,
        options={"attention_bias": False, "attn_output_gate": True},
        body=lambda raw: raw.get("text_config", raw),
        skipped=("model.visual.", "visual.", "mtp."),
    )
)
