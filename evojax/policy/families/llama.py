"""Llama 2 and 3, SmolLM2, and whatever else says ``model_type: llama``."""

from __future__ import annotations

from evojax.policy.families.base import FAMILIES, Family, decoder_tensors

LLAMA = FAMILIES.register("llama")(
    Family(
        architecture="LlamaForCausalLM",
        model_types=("llama",),
        fields=lambda raw, found: {},
        written=lambda cfg: {"attention_bias": False, "mlp_bias": False},
        tensors=decoder_tensors,
        options={"attention_bias": False, "mlp_bias": False},
    )
)
