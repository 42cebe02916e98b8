"""Adapters in and out in PEFT's format: adapter_model.safetensors and adapter_config.json.

PEFT keeps ``lora_A [rank, in]`` and ``lora_B [out, rank]`` for each linear layer of the Hugging
Face model; which of our matrices that holds, and how its rows are ordered, is in the family's table
of tensors. Where it holds two of them (the gated attention's queries and gates), the two adapters
become one of twice the rank and the same scale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evojax.config import LoraConf
from evojax.errors import InputError, Problem
from evojax.policy.decoder import Params
from evojax.policy.families import Leaf, Tensor, family_of
from evojax.policy.lora import adapter_shapes
from evojax.policy.shape import ModelConfig
from evojax.policy.tokenizer import read_json

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
# What PEFT's settings must say of adapters that are nothing but W + (alpha / rank) a b.
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layers_to_transform": None,
}


def save_peft(
    directory: Path, cfg: ModelConfig, adapters: Params, conf: LoraConf, base: str | None
) -> None:
    """Write adapters as a directory that ``peft.PeftModel.from_pretrained`` loads.

    Args:
        directory: created when absent; files of the same name are replaced.
        cfg: shape of the model. adapters: its adapters. conf: their rank, alpha and targets.
        base: name or directory of the frozen model, written for the reader; None: not known.
    """
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    host = jax.tree.map(lambda value: np.asarray(value, np.float32), adapters)
    modules = list(_modules(cfg, host))
    tensors: dict[str, np.ndarray] = {}
    for module in modules:
        down, up = module.stored(host)
        tensors |= {module.down: np.ascontiguousarray(down), module.up: np.ascontiguousarray(up)}
    save_file(tensors, str(directory / _WEIGHTS), metadata={"format": "pt"})
    settings = _settings(conf, modules) | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "target_modules": sorted({module.short for module in modules}),
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / _CONFIG).write_text(text, encoding="utf-8")


def load_peft(directory: Path, cfg: ModelConfig, weights: Params, conf: LoraConf) -> Params:
    """Read adapters that ``save_peft`` or PEFT wrote.

    Args:
        cfg: shape of the model. weights: its parameters, or their shapes.
        conf: rank, alpha and targets that the adapters must have.

    Raises:
        InputError: every problem found: other settings than ``conf`` has, options that are not
            supported, missing, foreign or misshapen tensors.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    settings = read_json(directory / _CONFIG)
    if not settings:
        raise _error([f"there is no {_CONFIG}"], directory)
    shapes = adapter_shapes(weights, conf)
    try:
        stored = load_file(str(directory / _WEIGHTS))
    except (SafetensorError, OSError) as fault:
        raise _error([f"{_WEIGHTS} cannot be read ({fault})"], directory) from fault
    blank = jax.tree.map(lambda shape: np.zeros(shape.shape, np.float32), shapes)
    modules = list(_modules(cfg, blank))
    found = [
        f"{_CONFIG} has {name} {settings[name]!r}, {wanted!r} is needed"
        for name, wanted in _settings(conf, modules).items()
        if settings.get(name, wanted) != wanted
    ]
    expected: dict[str, tuple[int, ...]] = {}
    for module in modules:
        down, up = module.stored(blank)
        expected |= {module.down: down.shape, module.up: up.shape}
    found += [f"tensor {name} is missing" for name in expected if name not in stored]
    for name, value in stored.items():
        if name not in expected:
            found.append(f"tensor {name} belongs to no target of policy.lora.targets")
        elif value.shape != expected[name]:
            found.append(f"tensor {name} has shape {value.shape}, not {expected[name]}")
    if found:
        raise _error(found, directory)
    for module in modules:
        module.fill(blank, stored)
    return jax.tree.map(jnp.asarray, blank)


def _settings(conf: LoraConf, modules: list[_Module]) -> dict[str, Any]:
    """The settings that decide what adapters do."""
    doubled = {module.short: len(module.parts) for module in modules if len(module.parts) > 1}
    return _PLAIN | {
        "r": conf.rank,
        "lora_alpha": conf.alpha,
        "rank_pattern": {name: times * conf.rank for name, times in doubled.items()},
        "alpha_pattern": {name: times * conf.alpha for name, times in doubled.items()},
    }


@dataclass(frozen=True)
class _Module:
    """One linear layer of the Hugging Face model.

    Args:
        tensor: its weight in the family's table.
        parts: the adapted ones of ``tensor.leaves`` by their place there, each with the rows of
            ``lora_A`` that are its own.
    """

    tensor: Tensor
    parts: dict[int, slice]

    @property
    def short(self) -> str:
        """Last part of the module's name, which PEFT knows targets by."""
        return self.tensor.name.removesuffix(".weight").rpartition(".")[2]

    @property
    def down(self) -> str:
        """Name of ``lora_A``."""
        return f"{_PREFIX}{self.tensor.name.removesuffix('.weight')}.lora_A.weight"

    @property
    def up(self) -> str:
        """Name of ``lora_B``."""
        return self.down.replace("lora_A", "lora_B")

    def stored(self, adapters: Params) -> tuple[np.ndarray, np.ndarray]:
        """``lora_A`` and ``lora_B``; 0 where a leaf meets another one's rank, or has none."""
        leaves = self.tensor.leaves
        pairs = {i: _pair(adapters, leaves[i]) for i in self.parts}
        ranks = sum(a.shape[1] for a, _ in pairs.values())
        outputs = self.tensor.shape[0] // len(leaves)
        wide = [np.zeros((ranks, outputs), np.float32) for _ in leaves]
        for i, rows in self.parts.items():
            wide[i][rows] = pairs[i][1]
        return np.concatenate([a.T for a, _ in pairs.values()]), self.tensor.join(*wide)

    def fill(self, adapters: Params, stored: dict[str, np.ndarray]) -> None:
        """Write what ``stored`` has of this module into ``adapters``."""
        wide = self.tensor.split(stored[self.up])
        for i, rows in self.parts.items():
            a, b = _pair(adapters, self.tensor.leaves[i])
            a[...], b[...] = stored[self.down][rows].T, wide[i][rows]


def _pair(adapters: Params, leaf: Leaf) -> tuple[np.ndarray, np.ndarray]:
    """``a`` and ``b`` of one layer's matrix; views, so that they can be written to."""
    pair = adapters[leaf.group][leaf.name] if leaf.group else adapters[leaf.name]
    where = slice(None) if leaf.layer is None else leaf.layer
    return pair["a"][where], pair["b"][where]


def _modules(cfg: ModelConfig, adapters: Params) -> Iterator[_Module]:
    """Every linear layer with an adapter."""
    for tensor in family_of(cfg).tensors(cfg):
        parts: dict[int, slice] = {}
        first = 0
        for i, leaf in enumerate(tensor.leaves):
            if leaf.name in (adapters.get(leaf.group, {}) if leaf.group else adapters):
                rank = _pair(adapters, leaf)[0].shape[1]
                parts[i] = slice(first, first := first + rank)
        if parts:
            yield _Module(tensor, parts)


def _error(found: list[str], directory: Path) -> InputError:
    remedy = "give adapters of this model with the rank, alpha and targets of policy.lora"
    return InputError([Problem(what, "adapter", str(directory), remedy) for what in found])
