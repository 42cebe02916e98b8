"""Weights where a process samples: cut over its own devices, whatever mesh the training has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from evojax.policy.decoder import Params
from evojax.policy.shape import ModelConfig
from evojax.policy.sharding import Axis, head_units, rule_of

AXIS = "tp"


def home_mesh(mesh: Mesh | None) -> Mesh | None:
    """This process's devices of a training mesh, in one row; None: the default device alone."""
    if mesh is None or mesh.size == 1:
        return None
    mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return Mesh(np.array(mine), (AXIS,), axis_types=(AxisType.Auto,))


def home_spec(names: list[str], shape: tuple[int, ...], cfg: ModelConfig, devices: int) -> P:
    """What of a weight is cut: what ``tp`` cuts in training, where the devices divide it.

    Args:
        names: keys on the weight's path. devices: how many the process has.

    >>> cfg = ModelConfig(16, 8, 8, 1, 4, 2, 2, 1e4, 1e-5, 64)
    >>> tuple(home_spec(["layers", "q"], (1, 8, 8), cfg, 4))
    (None, None, 'tp')
    >>> tuple(home_spec(["layers", "k"], (1, 8, 4), cfg, 4))  # two heads, four devices
    (None, None, None)
    """
    units = head_units(cfg).get(names[-1])

    def cut(axis: Axis, size: int) -> str | None:
        return AXIS if axis == AXIS and (units or size) % devices == 0 else None

    return P(*(cut(axis, size) for axis, size in zip(rule_of(names), shape, strict=False)))


def at_home(params: Params, cfg: ModelConfig, home: Mesh | None) -> Params:
    """The weights on the devices of ``home``, matrices rounded to the type of the products.

    One after the other, so that no more than one of them is there unrounded.

    Args:
        params: arrays of the host, or whole ones of this process. home: from ``home_mesh``; None
            leaves everything as it is.
    """
    if home is None:
        return params

    def one(path: tuple[Any, ...], x: Any) -> jax.Array:
        names = [str(key.key) for key in path]
        where = NamedSharding(home, home_spec(names, x.shape, cfg, home.size))
        placed = jax.device_put(x, where)
        is_matrix = x.ndim > (2 if len(names) > 1 else 1)
        return placed.astype(jnp.dtype(cfg.compute_dtype)) if is_matrix else placed

    return jax.tree_util.tree_map_with_path(one, params)
