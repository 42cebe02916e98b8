"""Arithmetic, traffic and time of a step: the roofline of the chips, before any inefficiency.

Seconds are lower bounds: every unit at its published peak, everything overlapped. Real programs
take a small multiple of them; the multiple is what a measurement on the chip is for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax

from evojax.plan.case import Case, row_shape
from evojax.plan.memory import (
    FLOAT,
    activations,
    adapter_count,
    cache_bytes,
    weights_per_device,
    width_of,
)
from evojax.policy.decoder import param_shapes
from evojax.policy.shape import ModelConfig, num_params

_DELTA_CHUNK = 64  # tokens of a chunk of the gated delta rule


@dataclass(frozen=True)
class Phase:
    """One part of a step.

    Args:
        flops: operations of all devices. model_flops: those of the model alone, each token once,
            nothing computed again: what MFU divides by.
        compute_s, memory_s, links_s: seconds at the chip's peaks, of the busiest device.
        link_bytes: sent by a device. tokens: that the phase is about.
    """

    flops: float
    model_flops: float
    compute_s: float
    memory_s: float
    links_s: float
    link_bytes: float
    tokens: float

    @property
    def seconds(self) -> float:
        """The slowest of the three, the others hidden behind it."""
        return max(self.compute_s, self.memory_s, self.links_s)

    @property
    def bound(self) -> str:
        """What that is: compute, memory or links."""
        names = {"compute": self.compute_s, "memory": self.memory_s, "links": self.links_s}
        return max(names, key=lambda name: names[name])


def products_per_token(cfg: ModelConfig) -> float:
    """Multiplications of one token in the matrices of all layers, the head left out."""
    shapes = param_shapes(cfg)
    stacks = [shapes[name] for name in ("layers", "linear_layers") if name in shapes]
    leaves = [leaf for stack in stacks for leaf in jax.tree.leaves(stack)]
    total = float(sum(math.prod(leaf.shape) for leaf in leaves if len(leaf.shape) == 3))
    if cfg.linear is not None:
        key, value = cfg.linear.key_dim, cfg.linear.value_dim
        rule = cfg.linear.value_heads * (3 * key * value + _DELTA_CHUNK * (key + value))
        total += rule * cfg.linear_layers
    return total


def micro_batches(case: Case) -> int:
    """Micro-batches of one pass over a step's batch; each has a row for every shard."""
    work = case.work
    groups = -(-work.groups // work.minibatches)
    rows = -(-groups // work.micro_groups)
    return work.minibatches * -(-rows // case.rows_abreast)


def _row_flops(case: Case) -> tuple[float, float]:
    """Operations of one row's forward pass: layers, and head."""
    cfg, row = case.model, row_shape(case)
    scores = 2.0 * cfg.num_heads * cfg.head_dim * row.pairs * cfg.full_layers
    body = 2.0 * (products_per_token(cfg) * row.nodes + scores)
    return body, 2.0 * cfg.vocab_size * cfg.hidden_size * row.slots


def _link_bytes(case: Case) -> float:
    """Bytes that a device sends in one micro-batch.

    fsdp: weights gathered for either pass and their gradients scattered; data: gradients added;
    tp: the stream added twice a layer in either pass. A ring sends ``(n - 1) / n`` of what is
    gathered or scattered, and twice that of what is added.
    """
    data, fsdp, tp = case.mesh
    cfg = case.model
    share = {name: (n - 1) / n for name, n in (("data", data), ("fsdp", fsdp), ("tp", tp))}
    whole = num_params(cfg) / tp
    trained = adapter_count(case) if case.lora_rank else whole
    gathered = 2.0 * width_of(cfg) * whole * share["fsdp"]
    scattered = FLOAT * trained * share["fsdp"]
    added = 2.0 * FLOAT * trained / fsdp * share["data"]
    stream = FLOAT * row_shape(case).nodes * cfg.hidden_size
    return gathered + scattered + added + 2.0 * share["tp"] * 4.0 * stream * cfg.num_layers


def update(case: Case) -> Phase:
    """One step's passes over its batch, the forward passes that score it included."""
    cfg, work, chip, row = case.model, case.work, case.chip, row_shape(case)
    body, head = _row_flops(case)
    turns = micro_batches(case)
    backward = 1.0 if case.lora_rank else 2.0
    again = 0.0 if cfg.remat == "none" else 1.0
    rows = turns * case.rows_abreast
    passes = work.epochs * (1.0 + backward)
    flops = rows * ((passes + work.epochs * again + work.scored) * body + passes * head)
    flops += rows * work.scored * head
    real = -(-work.groups // work.micro_groups)
    model = real * work.epochs * (1.0 + backward) * (body + head)
    weights = weights_per_device(case)
    trained = adapter_count(case) if case.lora_rank else weights
    traffic = 3.0 * num_params(cfg) / case.mesh[2] * width_of(cfg)
    traffic += 3.0 * FLOAT * trained + 2.0 * sum(activations(case).values())
    traffic = work.epochs * (traffic * turns + work.minibatches * 8.0 * FLOAT * trained)
    links = work.epochs * turns * _link_bytes(case)
    return Phase(
        flops=flops,
        model_flops=model,
        compute_s=flops / case.chips / chip.flops,
        memory_s=traffic / chip.memory_rate,
        links_s=links / chip.link_rate if links else 0.0,
        link_bytes=links,
        tokens=float(real * row.responses * work.new),
    )


def rollout(case: Case) -> Phase:
    """Sampling of one step's responses; every process samples its share on all of its devices.

    Every token of a batch reads the weights and the caches once; prompts are run once each. What
    the devices of an engine send each other, two vectors a layer and row, is counted as links.
    """
    cfg, work, chip = case.model, case.work, case.chip
    rows = float(work.groups * work.samples)
    head = cfg.vocab_size * cfg.hidden_size
    layers, full = products_per_token(cfg), cfg.full_layers
    reach = work.prompt + work.new / 2
    token = 2.0 * (layers + head) + 4.0 * cfg.num_heads * cfg.head_dim * reach * full
    prompt = 2.0 * layers * work.prompt + 2.0 * head
    prompt += 4.0 * cfg.num_heads * cfg.head_dim * work.prompt**2 * full
    flops = rows * work.new * token + work.groups * prompt
    together = max(1, work.max_batch // work.samples) * min(work.samples, work.max_batch)
    turns = math.ceil(rows / case.processes / together)
    chips = case.engine_chips
    read = num_params(cfg) * width_of(cfg) + cache_bytes(case)
    sent = 2.0 * (chips - 1) / chips * 2.0 * FLOAT * cfg.hidden_size * cfg.num_layers
    links = turns * (work.new + work.prompt / work.samples) * together * sent
    return Phase(
        flops=flops,
        model_flops=flops,
        compute_s=flops / case.processes / chips / chip.flops,
        memory_s=turns * (work.new + 1) * read / chips / chip.memory_rate,
        links_s=links / chip.link_rate if links else 0.0,
        link_bytes=links,
        tokens=rows * work.new,
    )
