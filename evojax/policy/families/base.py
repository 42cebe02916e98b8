"""How a family of models is stored: config.json and tensor names, to and from our shape and tree.

A ``Tensor`` of a file holds one of our weights of one layer, or several; each family lists its
tensors, and reading and writing are the same table walked in the two directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from evojax.policy.shape import TRAITS, ModelConfig, RopeScaling, leaf_shapes
from evojax.registry import Registry

Raw = Mapping[str, Any]
Split = Callable[[np.ndarray], tuple[np.ndarray, ...]]
Join = Callable[..., np.ndarray]

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position": "max_position_embeddings",
}
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ATTENTION = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
}
MLP = {
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


@dataclass(frozen=True)
class Leaf:
    """One weight of ours: a whole leaf of the tree, or one layer of a stacked one.

    Args:
        group: layers, linear_layers, or "" for the top of the tree. name: of the leaf.
        layer: place on the leading axis; None for a leaf that is not stacked.
    """

    group: str
    name: str
    layer: int | None = None


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file.

    Args:
        name: in the file. shape: in the file. leaves: the weights of ours that it holds.
        split: array of the file -> one array for each of ``leaves``. join: the way back.
    """

    name: str
    shape: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    split: Split
    join: Join


@dataclass(frozen=True)
class Family:
    """What is particular to one family.

    Args:
        architecture: class in transformers that loads what is written here.
        model_types: of config.json; the first is written.
        fields: config.json -> further fields of ``ModelConfig``; what is unsupported is appended
            to the list.
        written: shape -> further keys of config.json.
        tensors: shape -> every tensor.
        options: keys of config.json that must be absent or have this value.
        body: config.json -> the part that describes the text decoder.
        skipped: beginnings of names of tensors that belong to no text decoder.
    """

    architecture: str
    model_types: tuple[str, ...]
    fields: Callable[[Raw, list[str]], dict[str, Any]]
    written: Callable[[ModelConfig], dict[str, Any]]
    tensors: Callable[[ModelConfig], list[Tensor]]
    options: Mapping[str, Any]
    body: Callable[[Raw], Raw] = lambda raw: raw
    skipped: tuple[str, ...] = ()


FAMILIES: Registry[Family] = Registry("model family")


def family_of(cfg: ModelConfig) -> Family:
    """The family that ``cfg`` belongs to."""
    return FAMILIES.get(cfg.family, "policy.arch.family")


def as_it_is(leaf: Leaf, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor that equals our weight: vectors, and the embedding."""
    return Tensor(name, shape, (leaf,), lambda x: (x,), lambda x: x)


def turned(leaf: Leaf, name: str, shape: tuple[int, ...]) -> Tensor:
    """A matrix that is ``[out, in]`` in the file and ``[in, out]`` here; ``shape`` is ours."""
    return Tensor(name, shape[::-1], (leaf,), lambda x: (x.T,), lambda x: x.T)


def top_tensors(cfg: ModelConfig) -> list[Tensor]:
    """Embedding, last norm and untied output matrix."""
    shapes = leaf_shapes(cfg)
    found = [
        as_it_is(Leaf("", "embed"), EMBED, shapes["embed"]),
        as_it_is(Leaf("", "final_norm"), NORM, shapes["final_norm"]),
    ]
    if not cfg.tie_embeddings:
        found.append(turned(Leaf("", "head"), HEAD, shapes["head"]))
    return found


def layer_tensors(
    cfg: ModelConfig, group: str, numbers: Iterable[int], names: Mapping[str, str]
) -> list[Tensor]:
    """Tensors of stacked layers: matrices turned, vectors as they are.

    Args:
        group: of our tree. numbers: of its layers in the file, in the order in which they are
            stacked. names: our name -> name in the file, without ``model.layers.N.``.
    """
    shapes = leaf_shapes(cfg)[group]
    found = []
    for place, number in enumerate(numbers):
        for ours, theirs in names.items():
            shape = shapes[ours][1:]
            kind = turned if len(shape) > 1 else as_it_is
            found.append(kind(Leaf(group, ours, place), f"model.layers.{number}.{theirs}", shape))
    return found


def decoder_tensors(cfg: ModelConfig, **more: str) -> list[Tensor]:
    """All tensors of a decoder whose layers are alike; ``more`` names those beyond Llama's."""
    names = {**ATTENTION, **more, **MLP}
    return top_tensors(cfg) + layer_tensors(cfg, "layers", range(cfg.num_layers), names)


def rope_settings(raw: Raw) -> dict[str, Any]:
    """Rotary settings from the current key or the older ones."""
    keys = ("rope_theta", "partial_rotary_factor")
    old = {key: raw[key] for key in keys if raw.get(key) is not None}
    return old | (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})


def _rope_fields(raw: Raw, found: list[str]) -> dict[str, Any]:
    rope = rope_settings(raw)
    fields: dict[str, Any] = {
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "rotary_share": float(rope.get("partial_rotary_factor", 1.0)),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor")
        keys += ("original_max_position_embeddings",)
        missing = [key for key in keys if not isinstance(rope.get(key), (int, float))]
        found += [f"rope_type 'llama3' needs a number {key}" for key in missing]
        if not missing:
            fields["rope_scaling"] = RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position=int(rope["original_max_position_embeddings"]),
            )
    elif kind != "default":
        found.append(f"rope_type {kind!r} is not supported, only 'default' and 'llama3' are")
    return fields


_OPTIONS = {"hidden_act": "silu", "quantization_config": None}


def _unusable(text: Raw, raw: Raw, options: Mapping[str, Any]) -> list[str]:
    """Sizes that are missing, and options that are not implemented."""
    found = [
        f"config.json gives no valid {key} (found {text.get(key)!r})"
        for key in SIZES.values()
        if not (isinstance(text.get(key), int) and text[key] > 0)
    ]
    for key, wanted in options.items():
        seen = text.get(key, raw.get(key, wanted))
        if seen != wanted:
            found.append(f"{key} {seen!r} is not supported, only {wanted!r} is")
    return found


def read_shape(raw: Raw) -> tuple[ModelConfig | None, list[str]]:
    """The shape that config.json describes, and everything that this decoder does not implement.

    Returns:
        The shape, None when there is something wrong, and one sentence for each such thing.
    """
    kind = raw.get("model_type")
    names = {t: name for name in FAMILIES for t in FAMILIES.get(name, "model_type").model_types}
    if kind not in names:
        known = ", ".join(sorted(map(repr, names)))
        return None, [f"model_type {kind!r} is not supported, only {known} are"]
    family = FAMILIES.get(names[kind], "model_type")
    text = family.body(raw)
    found = _unusable(text, raw, {**_OPTIONS, **family.options})
    more = _rope_fields(text, found) | family.fields(text, found)
    if found:
        return None, found
    tied = text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))
    traits = TRAITS[names[kind]]
    cfg = ModelConfig(
        **{ours: text[theirs] for ours, theirs in SIZES.items()},
        num_kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
        head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        rms_eps=float(text.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(tied),
        family=names[kind],
        qkv_bias="qkv_bias" in traits,
        qk_norm="qk_norm" in traits,
        attn_gate="attn_gate" in traits,
        **more,
    )
    return cfg, cfg.faults()


def written_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json of a shape, without the ids of special tokens."""
    family = family_of(cfg)
    content = {theirs: getattr(cfg, ours) for ours, theirs in SIZES.items()}
    content |= {
        "architectures": [family.architecture],
        "model_type": family.model_types[0],
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "rope_theta": cfg.rope_theta,
        "rms_norm_eps": cfg.rms_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "hidden_act": "silu",
    }
    if scaling := cfg.rope_scaling:
        content["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return content | family.written(cfg)
