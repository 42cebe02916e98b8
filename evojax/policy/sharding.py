"""Where weights and batches lie on a mesh of devices: one table of rules.

Axes: ``data`` holds copies of the weights; ``fsdp`` cuts the weights, which are gathered layer by
layer where they are used; ``tp`` cuts heads, inner width and vocabulary, also while computing. The
rows of a micro-batch lie on data and fsdp together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from evojax.config import MeshConf
from evojax.errors import InputError, Problem

if TYPE_CHECKING:
    from evojax.policy.shape import ModelConfig

AXES = ("data", "fsdp", "tp")
BATCH = ("data", "fsdp")
Axis = str | tuple[str, ...] | None
Tree = Any

_INWARD: tuple[Axis, ...] = (None, "fsdp", "tp")  # [L, inputs, outputs], outputs cut
_OUTWARD: tuple[Axis, ...] = (None, "tp", "fsdp")  # [L, inputs, outputs], inputs cut
# The gated-delta layers' joint matrix is whole where it is used: its parts do not end where an
# even cut would.
_JOINT: tuple[Axis, ...] = (None, ("fsdp", "tp"), None)
_SMALL = ("final_norm", "attn_norm", "mlp_norm", "q_norm", "k_norm", "gated_norm")
_SMALL += ("conv", "dt_bias", "a_log")

# What each dimension of a weight is cut over; None: not at all. () is whole on every device.
RULES: dict[str, tuple[Axis, ...]] = {
    "embed": ("tp", "fsdp"),
    "head": ("fsdp", "tp"),
    **dict.fromkeys(("q", "k", "v", "attn_gate", "gate", "up", "z"), _INWARD),
    **dict.fromkeys(("o", "down", "out"), _OUTWARD),
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), (None, "tp")),
    "qkv": _JOINT,
    **dict.fromkeys(("a", "b"), (None, "fsdp", None)),
    **dict.fromkeys(_SMALL, ()),
}


def make_mesh(conf: MeshConf) -> Mesh:
    """The mesh of this process's devices, or of all processes'.

    Raises:
        InputError: there are fewer devices, or processes that the mesh leaves out.
    """
    sizes = (conf.data, conf.fsdp, conf.tp)
    devices, wanted = jax.devices(), math.prod(sizes)
    if wanted > len(devices) or (jax.process_count() > 1 and wanted != len(devices)):
        raise InputError.one(
            f"the mesh has {wanted} devices, and {len(devices)} are there",
            "hardware.mesh",
            dict(zip(AXES, sizes, strict=True)),
            f"choose sizes whose product is {len(devices)}",
        )
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=kinds, devices=devices[:wanted])


def batch_shards(mesh: Mesh | None) -> int:
    """How many rows a micro-batch has: one for each shard of the batch."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH)


def _names(path: tuple[Any, ...]) -> list[str]:
    """Keys of dictionaries, and which factor of an ``Adapted`` it is."""
    dictionary, field = jax.tree_util.DictKey, jax.tree_util.GetAttrKey
    found = [str(key.key) for key in path if isinstance(key, dictionary)]
    last: Any = path[-1] if path else None
    factor = isinstance(last, field) and last.name in ("a", "b")
    return [*found, last.name] if factor else found


def rule_of(names: list[str]) -> tuple[Axis, ...]:
    """The rule of a weight, or of what the optimizer keeps of it, by the keys on its path.

    >>> rule_of(["layers", "q"]), rule_of(["layers", "attn_norm"]), rule_of(["step"])
    ((None, 'fsdp', 'tp'), (), ())
    >>> rule_of(["layers", "q", "a"]), rule_of(["layers", "q", "b"])  # LoRA
    ((None, 'fsdp', None), (None, None, 'tp'))
    """
    if len(names) > 1 and names[-1] in ("a", "b") and (of := RULES.get(names[-2])):
        *stacked, rows, columns = of
        stack = (None,) * len(stacked)
        return (*stack, rows, None) if names[-1] == "a" else (*stack, None, columns)
    return RULES.get(names[-1], ()) if names else ()


def _spec(path: tuple[Any, ...], leaf: Any) -> P:
    """Something of another rank than its weight (factored moments, counters) is whole."""
    rule = rule_of(_names(path))
    return P(*rule) if len(rule) == len(leaf.shape) else P()


def head_units(cfg: ModelConfig) -> dict[str, int]:
    """How many heads lie in the dimension of a weight that ``tp`` cuts; none is cut in two."""
    units: dict[str, int] = {}
    queries = ("q", "o", "q_bias", "attn_gate")
    keys = ("k", "v", "k_bias", "v_bias")
    units |= dict.fromkeys(queries, cfg.num_heads)
    return units | dict.fromkeys(keys, cfg.num_kv_heads)


def _problems(
    name: str, shape: tuple[int, ...], rule: P, mesh: Mesh | AbstractMesh, heads: int | None
):
    for dimension, (size, axes) in enumerate(zip(shape, rule, strict=False)):
        over = (axes,) if isinstance(axes, str) else axes or ()
        parts = math.prod(mesh.shape[axis] for axis in over)
        units = heads if heads and axes == "tp" else size
        if units % parts:
            kind = f"{units} heads" if heads and axes == "tp" else f"length {size}"
            yield Problem(
                f"dimension {dimension} of {name} {shape}, {kind}, cannot be cut into {parts} "
                "equal parts",
                " x ".join(f"hardware.mesh.{axis}" for axis in over),
                parts,
                f"use a divisor of {units}",
            )


def param_specs(
    shapes: Tree, mesh: Mesh | AbstractMesh, heads: Mapping[str, int] | None = None
) -> Tree:
    """The ``PartitionSpec`` of every weight.

    Args:
        shapes: tree of arrays or ``jax.ShapeDtypeStruct``: weights, adapters, a training state.
        heads: from ``head_units``; without it, only lengths are checked.

    Raises:
        InputError: every dimension that its mesh axis does not divide.
    """
    specs = jax.tree_util.tree_map_with_path(_spec, shapes)
    problems: dict[tuple[str, str], Problem] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        names = _names(path)
        units = (heads or {}).get(names[-1]) if names else None
        rule = _spec(path, leaf)
        place = ".".join(name for name in names if name not in ("params", "opt_state"))
        for problem in _problems(place, leaf.shape, rule, mesh, units):
            problems.setdefault((place, problem.where), problem)
    if problems:
        raise InputError(list(problems.values()))
    return specs


def shardings(shapes: Tree, mesh: Mesh, heads: Mapping[str, int] | None = None) -> Tree:
    """``param_specs`` as ``NamedSharding``, for ``jax.jit``, ``place`` and checkpoints."""
    specs = param_specs(shapes, mesh, heads)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def row_shardings(rows: Tree, mesh: Mesh) -> Tree:
    """Of the arrays ``[M, A, ...]`` of a packed batch: A is cut; scalars are everywhere."""
    cut, everywhere = NamedSharding(mesh, P(None, BATCH)), NamedSharding(mesh, P())
    return jax.tree.map(lambda x: cut if np.ndim(x) else everywhere, rows)


def place(tree: Tree, where: Tree) -> Tree:
    """Arrays of this process put on the devices of all; always fresh buffers.

    Args:
        tree: whole arrays, the same in every process. where: a sharding each.
    """

    def one(x: Any, sharding: NamedSharding) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(
            host.shape, sharding, lambda index: np.array(host[index], copy=True)
        )

    return jax.tree.map(one, tree, where)


def placed(shapes: Tree, where: Tree) -> Tree:
    """``jax.ShapeDtypeStruct`` of each array with its sharding; nothing is allocated."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=place), shapes, where
    )


def local(tree: Tree) -> Tree:
    """Every array whole in this process's memory (numpy), one after the other.

    All processes of a mesh must call it together.
    """

    def one(x: jax.Array) -> np.ndarray:
        if x.is_fully_addressable:
            return np.asarray(x)
        everywhere = NamedSharding(x.sharding.mesh, P())  # type: ignore[attr-defined]
        whole = jax.jit(lambda v: v, out_shardings=everywhere)(x)
        return np.asarray(whole.addressable_data(0))

    return jax.tree.map(one, tree)


def _on_mesh() -> bool:
    """Whether a program is being traced for a mesh (inside ``jax.set_mesh``)."""
    return not jax.sharding.get_abstract_mesh().empty


def _without_fsdp(rule: tuple[Axis, ...]) -> P:
    return P(*(axis if axis in ("data", "tp") else None for axis in rule))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: jax.Array, used: P, kept: P) -> jax.Array:
    """``x`` laid out as ``used``; its gradient as ``kept``, summed over devices only there."""
    return jax.lax.with_sharding_constraint(x, used)


def _moved_forward(x: jax.Array, used: P, kept: P) -> tuple[jax.Array, None]:
    return jax.lax.with_sharding_constraint(x, used), None


def _moved_back(used: P, kept: P, _: None, given: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(given, kept),)


_moved.defvjp(_moved_forward, _moved_back)


def for_use(layer: Tree) -> Tree:
    """One layer's weights (no leading L) as its products take them: whole over ``fsdp``.

    Without a mesh, nothing.
    """
    if not _on_mesh():
        return layer

    def one(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        rule = rule_of(_names(path))[1:]
        return _moved(x, _without_fsdp(rule), P(*rule)) if rule else x

    return jax.tree_util.tree_map_with_path(one, layer)


def matrix_for_use(params: Tree, name: str) -> jax.Array:
    """``params["embed"]`` or ``params["head"]`` whole over ``fsdp``."""
    if not _on_mesh():
        return params[name]
    return _moved(params[name], _without_fsdp(RULES[name]), P(*RULES[name]))


def side_by_side(x: jax.Array) -> jax.Array:
    """``[A, ...]`` with A on the shards of the batch."""
    return jax.lax.with_sharding_constraint(x, P(BATCH)) if _on_mesh() else x


def laid_out(tree: Tree) -> Tree:
    """Inside a program: weights, gradients or a state laid out by the rules."""
    if not _on_mesh():
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.lax.with_sharding_constraint(x, _spec(path, x)), tree
    )


def replicated(tree: Tree) -> Tree:
    """Inside a program: whole on every device, so that every process can read it."""
    if not _on_mesh():
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), tree)


def lookup(matrix: jax.Array, ids: jax.Array, vocabulary: int = 0) -> jax.Array:
    """Vectors ``[..., D]`` of token ids ``[A, ...]``.

    On a mesh each part of the vocabulary looks up its own ids, and gradients are summed straight
    into the parts that devices keep; the compiler alone would send the vectors around instead.

    Args:
        matrix: ``[V, D]``, or ``[D, V]`` with ``vocabulary`` 1: the dimension of the ids.
    """
    if not _on_mesh():
        return matrix[ids] if vocabulary == 0 else jnp.moveaxis(matrix[:, ids], 0, -1)

    def local(part: jax.Array, mine: jax.Array) -> jax.Array:
        part = jax.lax.all_gather(part, "fsdp", axis=1 - vocabulary, tiled=True)
        size = part.shape[vocabulary]
        place = mine - jax.lax.axis_index("tp") * size
        found = jnp.take(part, place, axis=vocabulary, mode="clip")
        found = found if vocabulary == 0 else jnp.moveaxis(found, 0, -1)
        here = (place >= 0) & (place < size)
        return jax.lax.psum(jnp.where(here[..., None], found, 0.0), "tp")

    cut = P("tp", "fsdp") if vocabulary == 0 else P("fsdp", "tp")
    return jax.shard_map(local, in_specs=(cut, P(BATCH)), out_specs=P(BATCH))(matrix, ids)
