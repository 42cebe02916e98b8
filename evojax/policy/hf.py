"""Reading and writing Hugging Face model directories (safetensors); see ``families`` for names."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evojax.errors import InputError, Problem
from evojax.policy.decoder import Params
from evojax.policy.families import Leaf, Tensor, family_of
from evojax.policy.families.base import read_shape, written_config
from evojax.policy.shape import ModelConfig, leaf_shapes
from evojax.policy.tokenizer import Tokenizer, read_json

SHARD_BYTES = 5_000_000_000
_WHERE = "policy.path"
_DTYPES = ("F32", "F16", "BF16")
_STORED = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SCRATCH = ".saving"


def load_hf(path: str | Path) -> tuple[ModelConfig, Params]:
    """Read a local directory: config.json and one or several safetensors files.

    Weights in bfloat16 and float16 become float32. Tensors of other parts of the model (vision
    tower, multi-token prediction) are left out; their number goes to standard error.

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
    reading = _Reading(cfg)
    for file in _weight_files(directory):
        reading.read(directory / file)
    if found := reading.problems():
        raise _input_error(found, directory)
    if reading.skipped:
        what = f"{reading.skipped} tensors that do not belong to the text decoder are left out"
        print(f"{directory.name}: {what}", file=sys.stderr, flush=True)
    return cfg, reading.params()


def read_config(directory: Path) -> ModelConfig:
    """``ModelConfig`` of a directory's config.json.

    Raises:
        InputError: all options that this decoder does not implement, and all missing sizes.
    """
    raw = read_json(directory / "config.json")
    if not raw:
        raise _input_error(["config.json is missing or empty"], directory)
    cfg, found = read_shape(raw)
    if cfg is None or found:
        raise _input_error(found, directory)
    return cfg


def _weight_files(directory: Path) -> list[str]:
    """Names of the safetensors files, from the index when there is one."""
    index = read_json(directory / _INDEX)
    if not index:
        if (directory / _WEIGHTS).is_file():
            return [_WEIGHTS]
        raise _input_error([f"there is neither {_WEIGHTS} nor {_INDEX}"], directory)
    weights = index.get("weight_map")
    names = sorted(set(weights.values())) if isinstance(weights, dict) else []
    found = [f"shard {n!r} is not a plain file name" for n in names if Path(n).name != n]
    found += [f"shard {n} is missing" for n in names if not (directory / n).is_file()]
    if found or not names:
        raise _input_error(found or ["the safetensors index names no shards"], directory)
    return names


class _Reading:
    """Tensors of several files, put into their places of the tree one by one.

    Never holds more than the tree and the tensor at hand.
    """

    def __init__(self, cfg: ModelConfig):
        self.cfg = cfg
        self.skipped = 0
        self._ignored = family_of(cfg).skipped
        self._missing = {tensor.name: tensor for tensor in family_of(cfg).tensors(cfg)}
        self._expected = dict(self._missing)
        self._found: list[str] = []
        self._shapes = leaf_shapes(cfg)
        self._tree: dict[str, Any] = {}

    def read(self, file: Path) -> None:
        """Take everything that ``file`` has."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(file), framework="numpy") as reader:
                for stored in reader.keys():
                    self._take(stored, reader)
        except (SafetensorError, OSError) as fault:
            self._found.append(f"{file.name} cannot be read ({fault})")

    def _take(self, stored: str, reader: Any) -> None:
        name = stored.replace("model.language_model.", "model.", 1)
        if name not in self._expected:
            if name.startswith(self._ignored):
                self.skipped += 1
            # Tied models may carry a copy of the embedding, old ones a frequency table.
            elif name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                what = f"tensor {stored} has no place in a {self.cfg.family} decoder"
                self._found.append(what)
            return
        tensor = self._expected[name]
        view = reader.get_slice(stored)
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if dtype not in _DTYPES:
            self._found.append(f"tensor {stored} has type {dtype}, not {', '.join(_DTYPES)}")
        elif shape != tensor.shape:
            what = f"tensor {stored} has shape {shape}, config.json asks for {tensor.shape}"
            self._found.append(what)
        else:
            array = np.asarray(reader.get_tensor(stored)).astype(np.float32)
            for leaf, part in zip(tensor.leaves, tensor.split(array), strict=True):
                self._put(leaf, part)
        self._missing.pop(name, None)

    def _put(self, leaf: Leaf, part: np.ndarray) -> None:
        place = self._tree.setdefault(leaf.group, {}) if leaf.group else self._tree
        if leaf.layer is None:
            place[leaf.name] = np.ascontiguousarray(part)
            return
        if leaf.name not in place:
            place[leaf.name] = np.empty(self._shapes[leaf.group][leaf.name], np.float32)
        place[leaf.name][leaf.layer] = part

    def problems(self) -> list[str]:
        """Everything that was wrong; what is missing only when all else is right."""
        return self._found or [f"tensor {name} is missing" for name in self._missing]

    def params(self) -> Params:
        """The tree as JAX arrays; the reader's own copy goes leaf by leaf."""

        def moved(node: dict[str, Any]) -> dict[str, Any]:
            return {
                name: moved(node.pop(name))
                if isinstance(node[name], dict)
                else jnp.asarray(node.pop(name))
                for name in list(node)
            }

        return moved(self._tree)


def save_hf(
    path: str | Path,
    cfg: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    *,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that ``load_hf`` and transformers both load.

    config.json goes first and comes back last, so that a directory is whole or refused.

    Args:
        path: directory, created when absent; a model that is there is replaced.
        cfg: shape of the model. params: its weights.
        tokenizer: written beside the weights; gives the special ids of config.json.
        dtype: of the stored weights, float32 or bfloat16 (rounded to nearest).
        shard_bytes: largest safetensors file; with more, there is an index.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    scratch = directory / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed while it saved
    scratch.mkdir()
    try:
        _write_weights(scratch, cfg, params, _STORED[dtype], shard_bytes)
        _write_settings(scratch, cfg, tokenizer, dtype)
        _put_in_place(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_settings(scratch: Path, cfg: ModelConfig, tokenizer: Tokenizer, dtype: str) -> None:
    special = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids) if tokenizer.eos_ids[1:] else tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    _write_json(scratch / "generation_config.json", special)
    tokenizer.save(scratch)
    config = written_config(cfg) | special | {"torch_dtype": dtype}
    _write_json(scratch / "config.json", config)


def _put_in_place(scratch: Path, directory: Path) -> None:
    """Move new files over old ones, config.json last; weights of the old model go."""
    (directory / "config.json").unlink(missing_ok=True)
    for old in [*directory.glob("model*.safetensors"), directory / _INDEX]:
        old.unlink(missing_ok=True)
    files = sorted(scratch.iterdir(), key=lambda file: file.name == "config.json")
    for file in files:
        file.replace(directory / file.name)


def _write_weights(
    directory: Path, cfg: ModelConfig, params: Params, dtype: np.dtype, shard_bytes: int
) -> None:
    """All tensors, one file after the other."""
    from safetensors.numpy import save_file

    host = jax.tree.map(lambda a: np.asarray(a, np.float32), params)
    shards = _shards(family_of(cfg).tensors(cfg), dtype.itemsize, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if shards[1:] else _WEIGHTS
        arrays = {tensor.name: _stored(tensor, host, dtype) for tensor in members}
        save_file(arrays, str(directory / name), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
    if shards[1:]:
        total = sum(math.prod(tensor.shape) for members in shards for tensor in members)
        index = {"metadata": {"total_size": total * dtype.itemsize}, "weight_map": weight_map}
        _write_json(directory / _INDEX, index)


def _stored(tensor: Tensor, host: Params, dtype: np.dtype) -> np.ndarray:
    """The array that the file holds."""
    parts = []
    for leaf in tensor.leaves:
        values = (host[leaf.group] if leaf.group else host)[leaf.name]
        parts.append(values if leaf.layer is None else values[leaf.layer])
    return np.ascontiguousarray(tensor.join(*parts).astype(dtype))


def _shards(tensors: Iterable[Tensor], itemsize: int, limit: int) -> list[list[Tensor]]:
    """Tensors in their order, cut so that no file is larger than ``limit`` bytes if it can be."""
    found: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * itemsize
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(tensor)
        room -= size
    return found


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _input_error(found: list[str], directory: Path) -> InputError:
    remedy = "give a complete local directory of a supported model with safetensors weights"
    return InputError([Problem(what, _WHERE, str(directory), remedy) for what in found])
