"""Qwen2 and Qwen2.5: a bias on queries, keys and values."""

from __future__ import annotations

from evojax.policy.families.base import FAMILIES, Family, decoder_tensors

_BIASES = {f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"}

QWEN2 = FAMILIES.register("qwen2")(
    Family(
        architecture="Qwen2ForCausalLM",
        model_types=("qwen2",),
        fields=lambda raw, found: {},
        written=lambda cfg: {"use_sliding_window": False},
        tensors=lambda cfg: decoder_tensors(cfg, **_BIASES),
        options={"use_sliding_window": False},
    )
)
