"""Bytes on one device, counted from shapes: what stays, what an update adds, what sampling adds.

The counts follow the programs as they are written (what a backward pass keeps, what is computed
again), and know nothing of how a compiler lays them out: they are estimates. Where a compiler for
the chip is at hand, ``evojax.plan.programs`` asks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from evojax.config import AlgorithmConf
from evojax.grpo.optimizer import optimizer
from evojax.grpo.spec import hyper_of
from evojax.grpo.token_scores import _CHUNK, _KEEP
from evojax.plan.case import Case, RowShape, row_shape
from evojax.policy.decoder import param_shapes
from evojax.policy.home import home_spec
from evojax.policy.lora import linears
from evojax.policy.shape import ModelConfig
from evojax.policy.sharding import AXES, head_units, param_specs

FLOAT = 4  # bytes of stored weights, sums and the stream between layers


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by what they hold.

    Args:
        resident: there all the time. update, sync, rollout: added by each of the phases.
        limit: bytes that the device has.
    """

    resident: dict[str, float]
    update: dict[str, float]
    sync: dict[str, float]
    rollout: dict[str, float]
    limit: float

    @property
    def peak(self) -> float:
        """The largest of the phases."""
        phases = (self.update, self.sync, self.rollout)
        return sum(self.resident.values()) + max(sum(phase.values()) for phase in phases)

    @property
    def fits(self) -> bool:
        """Whether the peak is within what the device has."""
        return self.peak <= self.limit


def width_of(cfg: ModelConfig) -> int:
    """Bytes of one operand of a product."""
    return jnp.dtype(cfg.compute_dtype).itemsize


def shards(spec: PartitionSpec, sizes: dict[str, int]) -> int:
    """Parts that an array with this spec is cut into.

    >>> shards(PartitionSpec(None, ("data", "fsdp"), "tp"), {"data": 2, "fsdp": 4, "tp": 1})
    8
    """
    names = [n for part in spec if part for n in (part if isinstance(part, tuple) else (part,))]
    return math.prod(sizes[name] for name in names)


def elements_per_device(shapes: Any, specs: Any, sizes: dict[str, int]) -> float:
    """Numbers of a tree of arrays that lie on one device."""
    leaves = jax.tree.leaves(shapes)
    cuts = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return sum(
        math.prod(leaf.shape) / shards(cut, sizes) for leaf, cut in zip(leaves, cuts, strict=True)
    )


def axis_sizes(case: Case) -> dict[str, int]:
    """Mesh axes by name."""
    return dict(zip(AXES, case.mesh, strict=True))


def weights_per_device(case: Case) -> float:
    """Weights of the model that lie on one device.

    Raises:
        InputError: dimensions that their axes do not divide, all of them.
    """
    shapes = param_shapes(case.model)
    mesh = jax.sharding.AbstractMesh(case.mesh, AXES)
    specs = param_specs(shapes, mesh, head_units(case.model))
    return elements_per_device(shapes, specs, axis_sizes(case))


def adapter_count(case: Case) -> float:
    """Trained weights with adapters of rank r: ``r (inputs + outputs)`` of each target."""
    shapes, total = param_shapes(case.model), 0.0
    for name, stacks in linears(shapes).items():
        for stack in stacks if name in case.lora_targets else ():
            *stacked, rows, columns = (shapes[stack] if stack else shapes)[name].shape
            total += math.prod(stacked) * case.lora_rank * (rows + columns)
    return total


def moments_per_weight(name: str) -> float:
    """Numbers that an optimizer keeps for each weight of a large matrix.

    >>> moments_per_weight("adamw"), moments_per_weight("lion")
    (2.0, 1.0)
    """
    matrix = {"matrix": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    rule = optimizer(name, hyper_of(AlgorithmConf(), 1.0))
    kept = jax.eval_shape(rule.init, matrix)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(kept) if leaf.shape) / 1024**2


def engine_share(case: Case) -> float:
    """Weights of the engine's copy that lie on one device."""
    shapes, chips = param_shapes(case.model), case.engine_chips
    cut = {"tp": chips}
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        names = [str(key.key) for key in path]
        total += math.prod(leaf.shape) / shards(
            home_spec(names, leaf.shape, case.model, chips), cut
        )
    return total


def resident(case: Case) -> dict[str, float]:
    """What stays on a device: the training state, the KL reference and the engine's own copy."""
    weights = weights_per_device(case)
    trained = adapter_count(case) if case.lora_rank else weights
    return {
        "weights": FLOAT * weights,
        "adapters": FLOAT * trained if case.lora_rank else 0.0,
        "optimizer": FLOAT * trained * moments_per_weight(case.optimizer),
        "kl_reference": 0.0 if case.lora_rank else FLOAT * weights,
        "engine_weights": engine_share(case) * width_of(case.model),
    }


def _vectors(cfg: ModelConfig, row: RowShape, tp: int) -> dict[str, float]:
    """Bytes of one token that a layer makes going forward, by when remat keeps them.

    ``named``: queries, keys, values and the attention's output. ``products``: results of the
    products with weights. ``all``: everything that the backward pass reads.
    """
    b, heads, kv = width_of(cfg), cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    twice = 2 if row.lines else 1  # a tail attends to shared nodes and to itself
    named = FLOAT * (2 * heads + 2 * kv) / tp
    products = FLOAT * ((heads + 2 * kv + 2 * cfg.intermediate_size) / tp + 2 * cfg.hidden_size)
    stream = (2 * FLOAT + 2 * b) * cfg.hidden_size
    attention = (b * twice * (heads + 2 * kv) + (FLOAT * twice + b) * heads) / tp
    inner = (2 if cfg.compute_dtype == "float32" else 3) * b * cfg.intermediate_size / tp
    return {"named": named, "products": products, "all": stream + attention + inner}


def activations(case: Case) -> dict[str, float]:
    """Bytes kept between the forward and the backward pass of one row on one device.

    The gated-delta layers of a hybrid are counted as wide as its attention layers, without scores.
    """
    cfg, row, tp = case.model, row_shape(case), case.mesh[2]
    vectors = _vectors(cfg, row, tp)
    scores = width_of(cfg) * cfg.num_heads * row.pairs / tp
    at_work = scores * 2 * FLOAT / width_of(cfg)  # scores of one layer, and their gradient
    carry = float(FLOAT * row.nodes * cfg.hidden_size * cfg.num_layers)
    kept = {"none": vectors["all"], "dots": vectors["products"], "names": vectors["named"]}
    layers = row.nodes * kept.get(cfg.remat, 0.0) * cfg.num_layers
    if cfg.remat == "none":
        return {
            "activations": carry + layers,
            "attention_scores": cfg.full_layers * scores + at_work,
        }
    again = row.nodes * vectors["all"]
    return {"activations": carry + layers + again, "attention_scores": scores + at_work}


def logits_bytes(case: Case) -> float:
    """Bytes of the output layer: logits, their exponentials and their gradient at once."""
    whole = FLOAT * row_shape(case).slots * case.model.vocab_size
    at_once = whole if whole <= _KEEP else _CHUNK
    return 3.0 * min(at_once, whole) / case.mesh[2]


def gathered_bytes(case: Case) -> float:
    """Bytes of whole weights at once: one layer, its gradient, and the output matrix."""
    if case.mesh[1] == 1:
        return 0.0
    shapes, b = param_shapes(case.model), width_of(case.model)
    stacks = [shapes[name] for name in ("layers", "linear_layers") if name in shapes]
    layer = max(
        sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(stack)) for stack in stacks
    )
    matrix = case.model.vocab_size * case.model.hidden_size
    return ((b + FLOAT) * layer + (b + FLOAT) * matrix) / case.mesh[2]


def update_bytes(case: Case) -> dict[str, float]:
    """What an update adds: gradients (the sum and the row's own), activations, logits."""
    trained = adapter_count(case) if case.lora_rank else weights_per_device(case)
    return {
        "gradients": 2.0 * FLOAT * trained,
        "gathered_weights": gathered_bytes(case),
        **activations(case),
        "logits": logits_bytes(case),
    }


def decode_budget(new: int) -> int:
    """Places of the decode buffers, rounded as the engine does."""
    return max(8, 1 << (new - 1).bit_length())


def cache_bytes(case: Case) -> float:
    """Keys, values and recurrent states of the rows that are decoded together."""
    cfg, work = case.model, case.work
    prompts = max(1, work.max_batch // work.samples)
    rows = prompts * min(work.samples, work.max_batch)
    token = 2.0 * cfg.num_kv_heads * cfg.head_dim * width_of(cfg) * cfg.full_layers
    total = token * (prompts * work.prompt + rows * decode_budget(work.new))
    if cfg.linear is not None:
        state = cfg.linear.value_heads * cfg.linear.key_dim * cfg.linear.value_dim
        total += FLOAT * state * rows * cfg.linear_layers
    return total


def sync_bytes(case: Case) -> dict[str, float]:
    """What handing new weights to the engine adds: a copy of them there, and one matrix whole."""
    if math.prod(case.mesh) == 1:
        return {}
    largest = max(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(case.model)))
    return {
        "handed_weights": engine_share(case) * width_of(case.model),
        "whole_matrix": float(FLOAT * largest) if case.processes > 1 else 0.0,
    }


def rollout_bytes(case: Case) -> dict[str, float]:
    """What sampling adds: caches, logits and the prompts' scores, cut as the engine's heads are."""
    cfg, work, chips = case.model, case.work, case.engine_chips
    prompts = max(1, work.max_batch // work.samples)
    scores = 2.0 * FLOAT * cfg.num_heads * prompts * work.prompt**2 / chips
    inner = 3 * cfg.intermediate_size / chips
    vectors = FLOAT * prompts * work.prompt * (4 * cfg.hidden_size + inner)
    return {
        "kv_cache": cache_bytes(case) / (chips if cfg.num_kv_heads % chips == 0 else 1),
        "sampling_logits": 3.0 * FLOAT * work.max_batch * cfg.vocab_size / chips,
        "prefill": scores + vectors,
    }


def memory(case: Case) -> Memory:
    """Bytes on the fullest device."""
    return Memory(
        resident(case), update_bytes(case), sync_bytes(case), rollout_bytes(case), case.chip.memory
    )
