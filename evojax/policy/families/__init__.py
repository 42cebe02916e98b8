"""Model families by name; importing the package registers them."""

from __future__ import annotations

from evojax.policy.families import llama, qwen2, qwen3, qwen3_5
from evojax.policy.families.base import FAMILIES, Family, Leaf, Tensor, family_of

__all__ = ["FAMILIES", "Family", "Leaf", "Tensor", "family_of", "llama", "qwen2", "qwen3"]
__all__ += ["qwen3_5"]
