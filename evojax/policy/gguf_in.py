"""Weights in from GGUF files (llama.cpp): Llama, Qwen2 and Qwen3, whatever gguf can expand.

Stored matrices are ``[out, in]``, ours ``[in, out]``. In files of the architecture ``llama`` the
rows of the query and key matrices are in another order: llama.cpp turns neighbouring pairs, the
decoder pairs i and i + d/2. Files of the Qwen architectures keep our order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from evojax.errors import InputError, Problem
from evojax.policy.decoder import Params, stretched
from evojax.policy.gguf_tokenizer import gguf_tokenizer
from evojax.policy.shape import ModelConfig, RopeScaling, leaf_shapes
from evojax.policy.tokenizer import HFTokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_WHERE = "policy.path"
_NEIGHBOURS_TURN = ("llama",)
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "max_position": "context_length",
}
_EPS = "attention.layer_norm_rms_epsilon"
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    **{f"{name}_bias": f"attn_{name}.bias" for name in ("q", "k", "v")},
    **{f"{name}_norm": f"attn_{name}_norm.weight" for name in ("q", "k")},
}
_ROPE = "rope_freqs.weight"
_LLAMA3 = (1.0, 4.0, 8192)  # low and high frequency factor, original context: all releases alike


@dataclass(frozen=True)
class GGUFFile:
    """An opened file: its fields by name, its tensors by name; weights stay on the disk."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Any]

    def error(self, found: list[str]) -> InputError:
        """All that is wrong with the file."""
        remedy = f"give a whole GGUF file of one of these families: {', '.join(ARCHITECTURES)}"
        return InputError([Problem(what, _WHERE, str(self.path), remedy) for what in found])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in NumPy's order, rows first."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))


def open_gguf(path: str | Path) -> GGUFFile:
    """Read a file's header.

    Raises:
        InputError: there is no such file, or it is no GGUF file, or a damaged one.
    """
    from gguf import GGUFReader

    file = Path(path).expanduser()
    empty = GGUFFile(file, {}, {})
    try:
        reader = GGUFReader(str(file))
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError, UnicodeDecodeError) as fault:
        raise empty.error([f"the file cannot be read ({fault})"]) from fault
    return GGUFFile(file, fields, {tensor.name: tensor for tensor in reader.tensors})


def gguf_shape(path: str | Path) -> ModelConfig:
    """The shape that a file describes; nothing but its header is read.

    Raises:
        InputError: see ``load_gguf``.
    """
    return _config(open_gguf(path))


def count_weights(path: str | Path) -> int:
    """Number of weights in a file, from its header.

    Raises:
        InputError: see ``open_gguf``.
    """
    return sum(int(tensor.n_elements) for tensor in open_gguf(path).tensors.values())


def load_gguf(path: str | Path) -> tuple[ModelConfig, Params, HFTokenizer]:
    """Read a GGUF file; quantized weights are expanded exactly to float32.

    Raises:
        InputError: every problem found (architecture, sizes, missing, misshapen or foreign
            tensors, a tokenizer that cannot be built), each naming ``policy.path``.
    """
    source = open_gguf(path)
    cfg = _config(source)
    found = _tensor_faults(source, cfg)
    if found:
        raise source.error(found)
    return cfg, _weights(source, cfg), gguf_tokenizer(source.fields, source.path, cfg.max_position)


def _config(source: GGUFFile) -> ModelConfig:
    arch = source.fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise source.error([f"the architecture {arch!r} is not supported"])

    def field(name: str, default: Any = None) -> Any:
        return source.fields.get(f"{arch}.{name}", default)

    found = [
        f"the field {arch}.{theirs} gives no valid size (found {field(theirs)!r})"
        for theirs in _SIZES.values()
        if not (isinstance(field(theirs), int) and field(theirs) > 0)
    ]
    if not isinstance(field(_EPS), float):
        found.append(f"the field {arch}.{_EPS} is missing")
    if "token_embd.weight" not in source.tensors:
        found.append("tensor token_embd.weight is missing")
    if found:
        raise source.error(found)
    heads = field("attention.head_count")
    head_dim = field("attention.key_length", field("embedding_length") // heads)
    scaling, found = _rope_scaling(source, field, head_dim)
    cfg = ModelConfig(
        **{ours: field(theirs) for ours, theirs in _SIZES.items()},
        vocab_size=source.shape("token_embd.weight")[0],
        num_kv_heads=field("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=float(field("rope.freq_base", 10000.0)),
        rms_eps=float(f"{field(_EPS):.6g}"),  # float32 of 1e-5 reads back as 9.99999975e-06
        tie_embeddings="output.weight" not in source.tensors,
        family=arch,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        rope_scaling=scaling,
    )
    found += cfg.faults()
    if found:
        raise source.error(found)
    return cfg


def _rope_scaling(
    source: GGUFFile, field: Callable[..., Any], head_dim: int
) -> tuple[RopeScaling | None, list[str]]:
    """Scaling of the rotary frequencies, and which of the file's options are not supported."""
    wanted = {
        "rope.scaling.type": ("none", "none"),
        "rope.dimension_count": (head_dim, head_dim),
        "attention.value_length": (head_dim, head_dim),
        "attention.sliding_window": (0, 0),
        "expert_count": (0, 0),
    }
    found = [
        f"{name} {field(name, default)!r} is not supported, only {ok!r} is"
        for name, (default, ok) in wanted.items()
        if field(name, default) != ok
    ]
    if _ROPE not in source.tensors:
        return None, found
    factors = _read(source, _ROPE)
    scaling = RopeScaling(float(factors.max()), *_LLAMA3)
    theta = float(field("rope.freq_base", 10000.0))
    if not np.allclose(factors, llama3_factors(scaling, theta, head_dim), rtol=1e-3):
        found.append(f"the frequency factors of {_ROPE} are not those of Llama 3")
    return scaling, found


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    """What each rotary frequency is divided by in Llama 3, float32 ``[d/2]``; see ``stretched``.

    >>> llama3_factors(RopeScaling(8.0, 1.0, 4.0, 8192), 5e5, 8).astype(float).round(3).tolist()
    [1.0, 1.0, 2.695, 8.0]
    """
    frequency = jnp.asarray(theta ** -(np.arange(0, head_dim, 2) / head_dim), jnp.float32)
    return np.asarray(frequency / stretched(frequency, scaling))


def _expected(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor as stored, by its name in the file."""
    ours = leaf_shapes(cfg)
    shapes = {"token_embd.weight": ours["embed"], "output_norm.weight": ours["final_norm"]}
    if not cfg.tie_embeddings:
        shapes["output.weight"] = ours["head"][::-1]
    for i in range(cfg.num_layers):
        for name, (_, *shape) in ours["layers"].items():
            shapes[f"blk.{i}.{_LAYER[name]}"] = tuple(shape[::-1])
    return shapes


def _tensor_faults(source: GGUFFile, cfg: ModelConfig) -> list[str]:
    expected = _expected(cfg)
    found = [f"tensor {name} is missing" for name in expected if name not in source.tensors]
    for name in source.tensors:
        if name == _ROPE:
            continue
        if name not in expected:
            found.append(f"tensor {name} has no place in a {cfg.family} decoder")
        elif source.shape(name) != expected[name]:
            found.append(
                f"tensor {name} has shape {source.shape(name)}, the fields ask for {expected[name]}"
            )
        elif not _expands(source.tensors[name]):
            found.append(f"tensor {name} has the type {source.tensors[name].tensor_type.name}")
    return found


def _expands(tensor: Any) -> bool:
    """Whether gguf can expand the tensor's type; tried on its first row."""
    from gguf import dequantize

    try:
        dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError:
        return False
    return True


def _read(source: GGUFFile, name: str) -> np.ndarray:
    from gguf import dequantize

    tensor = source.tensors[name]
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)


def _weights(source: GGUFFile, cfg: ModelConfig) -> Params:
    def layer(index: int, name: str) -> np.ndarray:
        values = _read(source, f"blk.{index}.{_LAYER[name]}")
        if name in ("q", "k") and cfg.family in _NEIGHBOURS_TURN:
            values = half_rotation_order(values, cfg.head_dim)
        return values.T

    layers = {
        name: jnp.asarray(np.stack([layer(i, name) for i in range(cfg.num_layers)]))
        for name in leaf_shapes(cfg)["layers"]
    }
    params: Params = {
        "embed": jnp.asarray(_read(source, "token_embd.weight")),
        "final_norm": jnp.asarray(_read(source, "output_norm.weight")),
        "layers": layers,
    }
    if not cfg.tie_embeddings:
        params["head"] = jnp.asarray(_read(source, "output.weight").T)
    return params


def half_rotation_order(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows ``[heads * d, in]`` from neighbouring rotary pairs (2i, 2i+1) to (i, i + d/2).

    >>> half_rotation_order(np.array([[0], [10], [1], [11]]), 4).ravel().tolist()
    [0, 1, 10, 11]
    """
    rows, width = matrix.shape
    paired = matrix.reshape(rows // head_dim, head_dim // 2, 2, width)
    return paired.swapaxes(1, 2).reshape(rows, width)
