"""Weights in and out: local Hugging Face directories of the Llama family (safetensors)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evojax.errors import InputError, Problem
from evojax.policy.decoder import ModelConfig, Params
from evojax.policy.tokenizer import Tokenizer, read_json

_WHERE = "policy.path"
_DTYPES = ("F32", "F16", "BF16")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position": "max_position_embeddings",
}


def load_hf(path: str | Path) -> tuple[ModelConfig, Params]:
    """Read a local directory: config.json and one or several safetensors files.

    Weights in bfloat16 and float16 become float32. Matrices are stored ``[out, in]`` in the file
    and kept ``[in, out]`` here.

    Raises:
        InputError: every problem found (unsupported family or option, missing or misshapen
            tensors, unreadable files), each naming ``policy.path``.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise InputError.one(
            "no such directory", _WHERE, str(path), "give a local Hugging Face model directory"
        )
    cfg = read_config(directory)
    files = _weight_files(directory)
    problems: list[Problem] = []
    stored = _read_tensors(directory, files, _expected(cfg), problems)
    if problems:
        raise InputError(problems)
    return cfg, _assemble(cfg, stored)


def read_config(directory: Path) -> ModelConfig:
    """``ModelConfig`` of a directory's config.json.

    Raises:
        InputError: all options that this decoder does not implement, and all missing sizes.
    """
    raw = read_json(directory / "config.json")
    found: list[str] = []
    if not raw:
        found.append("config.json is missing or empty")
    elif raw.get("model_type") != "llama":
        found.append(f"model_type {raw.get('model_type')!r} is not supported, only 'llama' is")
    else:
        found += _unsupported(raw)
    for key in _SIZES.values():
        if raw and not (isinstance(raw.get(key), int) and raw[key] > 0):
            found.append(f"config.json gives no valid {key} (found {raw.get(key)!r})")
    if found:
        raise _input_error(found, directory)
    rope = _rope(raw)
    cfg = ModelConfig(
        **{ours: raw[theirs] for ours, theirs in _SIZES.items()},
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )
    if cfg.faults():
        raise _input_error(cfg.faults(), directory)
    return cfg


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings from the current key or the two older ones."""
    old = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
    return old | (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})


def _unsupported(raw: dict[str, Any]) -> list[str]:
    kind = _rope(raw).get("rope_type", _rope(raw).get("type", "default"))
    wanted = {
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(raw.get("attention_bias", False)), False),
        "mlp_bias": (bool(raw.get("mlp_bias", False)), False),
        "rope_type": (kind, "default"),
        "quantization_config": (raw.get("quantization_config"), None),
    }
    return [
        f"{name} {seen!r} is not supported, only {ok!r} is"
        for name, (seen, ok) in wanted.items()
        if seen != ok
    ]


def _weight_files(directory: Path) -> list[str]:
    """Names of the safetensors files, from the index when there is one."""
    index = read_json(directory / "model.safetensors.index.json")
    if not index:
        if (directory / "model.safetensors").is_file():
            return ["model.safetensors"]
        raise _input_error(
            ["there is neither model.safetensors nor model.safetensors.index.json"], directory
        )
    weights = index.get("weight_map")
    names = sorted(set(weights.values())) if isinstance(weights, dict) else []
    found = [f"shard {n!r} is not a plain file name" for n in names if Path(n).name != n]
    found += [f"shard {n} is missing" for n in names if not (directory / n).is_file()]
    if found or not names:
        raise _input_error(found or ["the safetensors index names no shards"], directory)
    return names


def _expected(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor as stored, by its name in the file."""
    width, inner = cfg.hidden_size, cfg.intermediate_size
    heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    shapes = {"model.embed_tokens.weight": (cfg.vocab_size, width), "model.norm.weight": (width,)}
    if not cfg.tie_embeddings:
        shapes["lm_head.weight"] = (cfg.vocab_size, width)
    per_layer = {
        "attn_norm": (width,),
        "q": (heads, width),
        "k": (kv, width),
        "v": (kv, width),
        "o": (width, heads),
        "mlp_norm": (width,),
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
    }
    for i in range(cfg.num_layers):
        shapes |= {_stored_name(i, name): shape for name, shape in per_layer.items()}
    return shapes


def _stored_name(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{_LAYER_NAMES[name]}.weight"


def _read_tensors(
    directory: Path,
    files: list[str],
    expected: dict[str, tuple[int, ...]],
    problems: list[Problem],
) -> dict[str, np.ndarray]:
    """All expected tensors as float32; what is wrong is appended to ``problems``."""
    from safetensors import SafetensorError, safe_open

    found: list[str] = []
    stored: dict[str, np.ndarray] = {}
    for file in files:
        try:
            with safe_open(str(directory / file), framework="numpy") as reader:
                for name in reader.keys():
                    # Tied models may carry a copy of the embedding, old ones a frequency table.
                    if name == "lm_head.weight" and name not in expected:
                        continue
                    if name.endswith("rotary_emb.inv_freq"):
                        continue
                    view = reader.get_slice(name)
                    fault = _tensor_fault(name, view, expected)
                    if fault:
                        found.append(fault)
                    else:
                        stored[name] = np.asarray(reader.get_tensor(name)).astype(np.float32)
        except (SafetensorError, OSError) as fault:
            found.append(f"{file} cannot be read ({fault})")
    missing = [name for name in expected if name not in stored] if not found else []
    found += [f"tensor {name} is missing" for name in missing]
    problems += _input_error(found, directory).problems
    return stored


def _tensor_fault(name: str, view: Any, expected: dict[str, tuple[int, ...]]) -> str | None:
    if name not in expected:
        return f"tensor {name} has no place in a Llama decoder"
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if dtype not in _DTYPES:
        return f"tensor {name} has type {dtype}, not one of {', '.join(_DTYPES)}"
    if shape != expected[name]:
        return f"tensor {name} has shape {shape}, config.json asks for {expected[name]}"
    return None


def _assemble(cfg: ModelConfig, stored: dict[str, np.ndarray]) -> Params:
    """Stack the layers and turn ``[out, in]`` into ``[in, out]``."""
    params: Params = {
        "embed": jnp.asarray(stored.pop("model.embed_tokens.weight")),
        "final_norm": jnp.asarray(stored.pop("model.norm.weight")),
        "layers": {},
    }
    if not cfg.tie_embeddings:
        params["head"] = jnp.asarray(stored.pop("lm_head.weight").T)
    for name in _LAYER_NAMES:
        parts = [stored.pop(_stored_name(i, name)).T for i in range(cfg.num_layers)]
        params["layers"][name] = jnp.asarray(np.stack(parts))
    return params


def save_hf(path: str | Path, cfg: ModelConfig, params: Params, tokenizer: Tokenizer) -> None:
    """Write a directory that ``load_hf`` and transformers' ``LlamaForCausalLM`` both load.

    Args:
        path: directory, created when absent; files of the same name are replaced.
        cfg: shape of the model. params: its weights, stored as float32.
        tokenizer: written beside the weights; gives the special ids of config.json.
    """
    from safetensors.numpy import save_file

    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    host = jax.tree.map(lambda a: np.asarray(a, np.float32), params)
    tensors = {"model.embed_tokens.weight": host["embed"], "model.norm.weight": host["final_norm"]}
    if not cfg.tie_embeddings:
        tensors["lm_head.weight"] = np.ascontiguousarray(host["head"].T)
    for name, stacked in host["layers"].items():
        for i in range(cfg.num_layers):
            tensors[_stored_name(i, name)] = np.ascontiguousarray(stacked[i].T)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    special = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids) if tokenizer.eos_ids[1:] else tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    _write_json(directory / "config.json", _config_json(cfg) | special)
    _write_json(directory / "generation_config.json", special)
    tokenizer.save(directory)


def _config_json(cfg: ModelConfig) -> dict[str, Any]:
    return {theirs: getattr(cfg, ours) for ours, theirs in _SIZES.items()} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "rope_theta": cfg.rope_theta,
        "rms_norm_eps": cfg.rms_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _input_error(found: list[str], directory: Path) -> InputError:
    remedy = "give a complete local directory of a Llama-family model with safetensors weights"
    return InputError([Problem(what, _WHERE, str(directory), remedy) for what in found])
