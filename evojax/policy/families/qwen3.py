"""Qwen3 (dense): queries and keys are normalised head by head."""

from __future__ import annotations

from evojax.policy.families.base import FAMILIES, Family, decoder_tensors

QK_NORMS = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}

QWEN3 = FAMILIES.register("qwen3")(
    Family(
        architecture="Qwen3ForCausalLM",
        model_types=("qwen3",),
        fields=lambda raw, found: {},
        written=lambda cfg: {"attention_bias": False, "use_sliding_window": False},
        tensors=lambda cfg: decoder_tensors(cfg, **QK_NORMS),
        options={"attention_bias": False, "use_sliding_window": False},
    )
)
