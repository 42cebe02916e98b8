"""Low-rank adapters: which weights have one, how they begin, how they become whole weights.

``W' = W + (alpha / rank) a b`` for every targeted matrix ``W [D, F]`` with ``a [D, rank]`` and
``b [rank, F]`` (LoRA, arXiv 2106.09685). Only ``a`` and ``b`` are trained. ``b`` begins at 0, so
the first policy is the frozen one exactly.

Adapters are a tree beside the weights' own: ``{"layers": {name: {"a", "b"}}, ...}`` with the layers
stacked as theirs are; ``head`` stands at the top.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from evojax.config import LoraConf
from evojax.errors import InputError, Problem
from evojax.policy.adapted import Adapted, whole
from evojax.policy.decoder import Params, param_shapes
from evojax.policy.shape import ModelConfig

_HEAD = "head"
_NO_PRODUCT = ("conv",)  # three dimensions, but not the matrix of a product
_WHERE = "policy.lora"


def scale_of(conf: LoraConf) -> float:
    """Factor of the change ``a b``: ``alpha / rank``.

    >>> scale_of(LoraConf(rank=8, alpha=16.0))
    2.0
    """
    return conf.alpha / conf.rank


def linears(weights: Params) -> dict[str, list[str]]:
    """The stacks of layers (``""`` for the top) that hold each matrix an adapter may change.

    Args:
        weights: parameters, or their shapes.

    >>> matrix = jnp.zeros((2, 4, 4))
    >>> linears({"embed": matrix[0], "layers": {"q": matrix, "attn_norm": matrix[0]}})
    {'q': ['layers']}
    """
    found: dict[str, list[str]] = {}
    for stack, content in weights.items():
        if isinstance(content, dict):
            for name, value in content.items():
                if len(value.shape) == 3 and name not in _NO_PRODUCT:
                    found.setdefault(name, []).append(stack)
    if _HEAD in weights:
        found[_HEAD] = [""]
    return found


def _targeted(weights: Params, targets: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Stack, name and value of every targeted matrix, in the weights' order."""
    places = linears(weights)
    for name in sorted(targets):
        for stack in places[name]:
            yield stack, name, weights[stack][name] if stack else weights[name]


def _placed(parts: Iterator[tuple[str, str, Any]]) -> Params:
    tree: Params = {}
    for stack, name, value in parts:
        (tree.setdefault(stack, {}) if stack else tree)[name] = value
    return tree


def check(weights: Params, conf: LoraConf) -> None:
    """Refuse adapters that this model cannot have.

    Raises:
        InputError: targets that are no matrix of the model, and ranks that are no low ranks.
    """
    places = linears(weights)
    problems = [
        Problem(
            "the model has no such matrix",
            f"{_WHERE}.targets",
            name,
            f"choose from: {', '.join(sorted(places))}",
        )
        for name in conf.targets
        if name not in places
    ]
    if not problems:
        for _, name, value in _targeted(weights, conf.targets):
            smallest = min(value.shape[-2:])
            if conf.rank > smallest:
                what = f"{name} is {value.shape[-2]} x {value.shape[-1]}: its rank is {smallest}"
                remedy = f"give at most {smallest}, or leave {name} out of {_WHERE}.targets"
                problems.append(Problem(what, f"{_WHERE}.rank", conf.rank, remedy))
    if problems:
        raise InputError(problems)


def adapter_shapes(weights: Params, conf: LoraConf) -> Params:
    """The tree of adapters as ``jax.ShapeDtypeStruct``; nothing is allocated.

    Args:
        weights: parameters, or their shapes. conf: rank and targets, checked before.
    """

    def pair(value: Any) -> dict[str, jax.ShapeDtypeStruct]:
        *stacked, rows, columns = value.shape
        return {
            "a": jax.ShapeDtypeStruct((*stacked, rows, conf.rank), jnp.float32),
            "b": jax.ShapeDtypeStruct((*stacked, conf.rank, columns), jnp.float32),
        }

    return _placed((s, n, pair(value)) for s, n, value in _targeted(weights, conf.targets))


def init_adapters(weights: Params, conf: LoraConf, seed: int) -> Params:
    """Fresh adapters: ``b`` is 0, ``a`` uniform in ``[-1/sqrt(D), 1/sqrt(D)]``.

    What a matrix gets depends on the seed and its own place, not on the other targets.

    Args:
        weights: parameters, or their shapes. seed: of the drawn values.

    Raises:
        InputError: see ``check``.
    """
    check(weights, conf)

    def drawn(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if path[-1].key == "b":
            return jnp.zeros(shape.shape, shape.dtype)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        bound = 1.0 / math.sqrt(shape.shape[-2])
        return jax.random.uniform(key, shape.shape, shape.dtype, -bound, bound)

    return jax.tree_util.tree_map_with_path(drawn, adapter_shapes(weights, conf))


def attach(frozen: Params, adapters: Params, scale: float) -> Params:
    """The weights with an ``Adapted`` in the place of every adapted matrix.

    ``decoder.run_layers`` takes them as they are: at any time one layer's whole matrices exist.
    The output matrix is put together here, for it is in use all the time.

    Args:
        frozen: of the model, not changed. adapters: from ``init_adapters``. scale: ``scale_of``.
    """
    joined = dict(frozen)
    for stack, parts in adapters.items():
        if stack == _HEAD:
            joined[_HEAD] = whole(Adapted(frozen[_HEAD], parts["a"], parts["b"], scale))
            continue
        joined[stack] = frozen[stack] | {
            name: Adapted(frozen[stack][name], pair["a"], pair["b"], scale)
            for name, pair in parts.items()
        }
    return joined


@jax.jit
def _whole(tree: Params) -> Params:
    return jax.tree.map(whole, tree, is_leaf=lambda leaf: isinstance(leaf, Adapted))


def merge(frozen: Params, adapters: Params, scale: float) -> Params:
    """Whole weights, as a sampler and an exporter want them; adapted matrices are fresh arrays.

    Args: see ``attach``.
    """
    joined = attach(frozen, adapters, scale)
    changed = {
        stack: {name: joined[stack][name] for name in parts}
        for stack, parts in adapters.items()
        if stack != _HEAD
    }
    made = _whole(changed)
    return joined | {stack: joined[stack] | parts for stack, parts in made.items()}


def trainable_shapes(cfg: ModelConfig, conf: LoraConf | None) -> Params:
    """Shapes of what is trained: every weight, or the adapters (``conf``, checked before)."""
    shapes = param_shapes(cfg)
    return shapes if conf is None else adapter_shapes(shapes, conf)


def joined(trainable: Params, frozen: Params | None, scale: float | None) -> Params:
    """The weights that something trainable stands for: itself, or ``attach``.

    Args:
        trainable: all weights, or adapters. frozen: what the adapters change; None without.
        scale: ``scale_of`` the adapters; None without.
    """
    if frozen is None or scale is None:
        return trainable
    return attach(frozen, trainable, scale)
