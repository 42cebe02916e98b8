"""Shapes of decoders: what a configuration must say, and the arrays that follow from it.

Nothing here imports JAX, so that checks and plans of large models stay fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "bfloat16")
REMAT = ("none", "full", "dots", "names")

# What each family has beyond a Llama decoder; a family always has all of it.
TRAITS: dict[str, frozenset[str]] = {
    "llama": frozenset(),
    "qwen2": frozenset({"qkv_bias"}),
    "qwen3": frozenset({"qk_norm"}),
    "qwen3_5": frozenset({"qk_norm", "attn_gate", "linear"}),
}
_TRAIT_NAMES = ("qkv_bias", "qk_norm", "attn_gate", "linear")


@dataclass(frozen=True)
class RopeScaling:
    """Stretched rotary waves of Llama 3: long waves by ``factor``, short ones not at all.

    Args:
        factor: by how much, at least 1.
        low_freq_factor, high_freq_factor: waves longer than ``original_max_position`` over the
            first are stretched in full, those shorter than it over the second are left.
        original_max_position: longest sequence before, tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class LinearConfig:
    """Gated delta-net layers of a hybrid decoder (arXiv 2412.06464).

    Args:
        interval: every ``interval``-th layer attends fully, the others are linear.
        key_heads, value_heads: the second is a multiple of the first.
        key_dim, value_dim: of one head. conv: places that the causal convolution looks at.
    """

    interval: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def keys(self) -> int:
        """Width of all keys together, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values together."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of what the convolution sees: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder; hashable, so that it can be a static argument of ``jax.jit``.

    Args:
        vocab_size: V. hidden_size: D. intermediate_size: F. num_layers: L.
        num_heads: query heads H. num_kv_heads: key and value heads K; H is a multiple of K.
        head_dim: d, even (rotary embedding turns pairs).
        rope_theta: base of the rotary frequencies. rms_eps: epsilon of the norms.
        max_position: longest sequence, tokens.
        tie_embeddings: the output matrix is the embedding.
        compute_dtype: float32 or bfloat16; every matrix, the embedding too, and what it is
            multiplied with is rounded to it first. Stored weights, sums, norms, softmax and the
            stream between the layers stay float32.
        family: whose config.json and tensor names the model has, see ``TRAITS``.
        qkv_bias: queries, keys and values have a bias. qk_norm: queries and keys of each head are
            normalised before they are turned.
        rope_scaling: None, or how the rotary waves are stretched.
        rotary_share: part of a head's dimensions, the first ones, that is turned.
        attn_gate: the attention's output is multiplied by the sigmoid of a projection.
        linear: None, or the layers of a hybrid that do not attend fully.
        remat: what the backward pass computes again, see ``evojax.policy.remat``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    max_position: int
    tie_embeddings: bool = True
    compute_dtype: str = "float32"
    family: str = "llama"
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    rotary_share: float = 1.0
    attn_gate: bool = False
    linear: LinearConfig | None = None
    remat: str = "none"

    @property
    def full_layers(self) -> int:
        """Layers with full attention; all of them but in a hybrid."""
        return self.num_layers // self.linear.interval if self.linear else self.num_layers

    @property
    def linear_layers(self) -> int:
        """Gated delta-net layers of a hybrid."""
        return self.num_layers - self.full_layers

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are turned."""
        return int(self.head_dim * self.rotary_share)

    def faults(self) -> list[str]:
        """Everything that makes this shape impossible, one sentence each; empty when sound.

        A sentence begins with the name of the field.

        >>> ModelConfig(8, 8, 8, 1, 3, 2, 5, 1e4, 1e-5, 16).faults()
        ['num_heads 3 is not a multiple of num_kv_heads 2', 'head_dim 5 is odd']
        """
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        sizes += ("num_kv_heads", "head_dim", "max_position", "rope_theta", "rms_eps")
        found = [f"{n} {getattr(self, n)} is not above 0" for n in sizes if _not_positive(self, n)]
        if not found and self.num_heads % self.num_kv_heads:
            found.append(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            found.append(f"head_dim {self.head_dim} is odd")
        elif not 0 < self.rotary_share <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            turned = f"rotary_share {self.rotary_share:g} of head_dim {self.head_dim}"
            found.append(f"{turned} is no even number of dimensions")
        if self.compute_dtype not in DTYPES:
            found.append(f"compute_dtype {self.compute_dtype} is not one of {', '.join(DTYPES)}")
        if self.remat not in REMAT:
            found.append(f"remat {self.remat} is not one of {', '.join(REMAT)}")
        return [*found, *self._family_faults(), *_scaling_faults(self.rope_scaling)]

    def _family_faults(self) -> Iterator[str]:
        if self.family not in TRAITS:
            yield f"family {self.family} is not one of {', '.join(TRAITS)}"
            return
        for name in _TRAIT_NAMES:
            needed = name in TRAITS[self.family]
            if bool(getattr(self, name)) != needed:
                yield f"{name} is what family {self.family} {'always' if needed else 'never'} has"
        if self.rotary_share < 1 and not self.linear:
            yield f"rotary_share {self.rotary_share:g}: family {self.family} turns whole heads"
        if self.linear:
            yield from self._linear_faults(self.linear)

    def _linear_faults(self, linear: LinearConfig) -> Iterator[str]:
        for name, value in vars(linear).items():
            if value <= 0:
                yield f"linear.{name} {value} is not above 0"
        if linear.interval < 2:
            yield f"linear.interval {linear.interval} leaves no linear layer"
        elif self.num_layers % linear.interval:
            yield f"num_layers {self.num_layers} is not a multiple of interval {linear.interval}"
        if linear.key_heads > 0 and linear.value_heads % linear.key_heads:
            heads = f"linear.value_heads {linear.value_heads}"
            yield f"{heads} is not a multiple of linear.key_heads {linear.key_heads}"


def _not_positive(cfg: ModelConfig, name: str) -> bool:
    return not 0 < getattr(cfg, name) < math.inf


def _scaling_faults(scaling: RopeScaling | None) -> Iterator[str]:
    if scaling is None:
        return
    if not 1 <= scaling.factor < math.inf:
        yield f"rope_scaling.factor {scaling.factor:g} is not at least 1"
    if not 0 < scaling.low_freq_factor < scaling.high_freq_factor < math.inf:
        yield "rope_scaling needs 0 < low_freq_factor < high_freq_factor"
    if scaling.original_max_position <= 0:
        yield f"rope_scaling.original_max_position {scaling.original_max_position} is not above 0"


SMOLLM2_135M = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 100000.0, 1e-5, 8192)


def leaf_shapes(cfg: ModelConfig) -> dict[str, Any]:
    """Shape of every weight, in the nested dictionary that holds the weights.

    ``embed [V, D]``, ``final_norm [D]``, ``head [D, V]`` (untied only) and ``layers``:
    ``attn_norm, mlp_norm [L, D]``, ``q [L, D, H*d]``, ``k, v [L, D, K*d]``, ``o [L, H*d, D]``,
    ``gate, up [L, D, F]``, ``down [L, F, D]``; with ``qkv_bias`` also ``q_bias [L, H*d]``,
    ``k_bias, v_bias [L, K*d]``, with ``qk_norm`` ``q_norm, k_norm [L, d]``, with ``attn_gate``
    ``attn_gate [L, D, H*d]``. A hybrid's ``layers`` are its full-attention layers; the others are
    ``linear_layers``, see ``_linear_layer``.

    >>> leaf_shapes(ModelConfig(16, 4, 8, 3, 2, 1, 2, 1e4, 1e-5, 64))["layers"]["k"]
    (3, 4, 2)
    """
    tree: dict[str, Any] = {"embed": (cfg.vocab_size, cfg.hidden_size)}
    tree["final_norm"] = (cfg.hidden_size,)
    if not cfg.tie_embeddings:
        tree["head"] = (cfg.hidden_size, cfg.vocab_size)
    tree["layers"] = _stacked(cfg.full_layers, _attention_layer(cfg))
    if cfg.linear:
        tree["linear_layers"] = _stacked(cfg.linear_layers, _linear_layer(cfg, cfg.linear))
    return tree


def _stacked(depth: int, layer: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: (depth, *shape) for name, shape in layer.items()}


def _attention_layer(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, heads, kv = (
        cfg.hidden_size,
        cfg.num_heads * cfg.head_dim,
        cfg.num_kv_heads * cfg.head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,),
        "q": (width, heads),
        "k": (width, kv),
        "v": (width, kv),
        "o": (heads, width),
        **_mlp(cfg),
    }
    if cfg.qkv_bias:
        shapes |= {"q_bias": (heads,), "k_bias": (kv,), "v_bias": (kv,)}
    if cfg.qk_norm:
        shapes |= {"q_norm": (cfg.head_dim,), "k_norm": (cfg.head_dim,)}
    if cfg.attn_gate:
        shapes["attn_gate"] = (width, heads)
    return shapes


def _linear_layer(cfg: ModelConfig, linear: LinearConfig) -> dict[str, tuple[int, ...]]:
    """Of a gated delta-net layer: projections, convolution, decay, norm of its output."""
    width, heads = cfg.hidden_size, linear.value_heads
    return {
        "attn_norm": (width,),
        "qkv": (width, linear.channels),
        "z": (width, linear.values),
        "b": (width, heads),
        "a": (width, heads),
        "conv": (linear.channels, linear.conv),
        "dt_bias": (heads,),
        "a_log": (heads,),
        "gated_norm": (linear.value_dim,),
        "out": (linear.values, width),
        **_mlp(cfg),
    }


def _mlp(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, inner = cfg.hidden_size, cfg.intermediate_size
    return {
        "mlp_norm": (width,),
        "gate": (width, inner),
        "up": (width, inner),
        "down": (inner, width),
    }


def num_params(cfg: ModelConfig) -> int:
    """Weights of the model; a tied output matrix is counted once.

    >>> num_params(SMOLLM2_135M)
    134515008
    """

    def count(node: Any) -> int:
        return sum(map(count, node.values())) if isinstance(node, dict) else math.prod(node)

    return count(leaf_shapes(cfg))
