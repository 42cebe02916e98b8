"""The real programs of a run, compiled ahead of time for chips that are not here.

The update and the sampler are lowered on abstract arrays, so no weight is ever allocated. TPU: XLA
compiles for a described topology (package ``libtpu``, no chip needed). CUDA: the programs are
lowered for the GPU, which shows that they can be, and partitioned for as many devices of this CPU,
which shows what they send; their memory on the GPU stays an estimate. CPU: as they run here.

Run as ``python -m evojax.plan.programs <config.yaml>``, in a process of its own: a compiler that
fails may end its process.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from omegaconf import OmegaConf

from evojax.config import EvojaxConf, HardwareConf
from evojax.grpo.pack import Packed
from evojax.grpo.update import Updater, update
from evojax.plan import hlo
from evojax.plan.case import Case, case_of, example_batch, row_shape, shape_of
from evojax.plan.memory import decode_budget
from evojax.plan.rates import micro_batches
from evojax.policy.cache import unstack
from evojax.policy.decoder import param_shapes
from evojax.policy.home import home_spec
from evojax.policy.sharding import AXES, row_shardings
from evojax.rollout.generate import Request, sample_completions

MARK = "evojax-plan: "  # begins the lines of output that are results
_LENGTH_STEP = 16  # prompts are padded to multiples of it
_HOSTS = {1: (1, 1), 4: (2, 2), 8: (2, 4)}  # chips of a TPU host by their sides


def devices_of(hardware: HardwareConf) -> list[Any]:
    """The chips: described ones of a TPU, else devices of this CPU.

    Raises:
        RuntimeError: the topology is unknown to the compiler, or has another number of chips.
    """
    if hardware.platform != "tpu":
        return list(jax.devices("cpu"))[: hardware.chips]
    return _described(hardware.topology or "", hardware.chips)


def devices_of_process(hardware: HardwareConf) -> list[Any]:
    """The chips of one process, as devices of a machine of their own: what an engine sees."""
    count = min(hardware.chips, hardware.host_chips)
    if hardware.platform != "tpu":
        return list(jax.devices("cpu"))[:count]
    return _described(host_topology(hardware.topology or "", count), count)


def host_topology(topology: str, chips: int) -> str:
    """How the chips of one host are joined.

    >>> host_topology("v5e:4x4", 4), host_topology("v5p:2x4x4", 4), host_topology("v5e:2x4", 8)
    ('v5e:2x2', 'v5p:2x2x1', 'v5e:2x4')
    """
    generation, _, layout = topology.partition(":")
    sides = [*_HOSTS[chips], 1][: layout.count("x") + 1]
    return f"{generation}:{'x'.join(map(str, sides))}"


def _described(topology: str, chips: int) -> list[Any]:
    from jax.experimental import topologies

    found = topologies.get_topology_desc(topology, platform="tpu").devices
    if len(found) != chips:
        raise RuntimeError(f"{topology} has {len(found)} chips, the configuration says {chips}")
    return list(found)


def mesh_of(case: Case, devices: Sequence[Any]) -> Mesh:
    """The mesh of a run on these devices."""
    grid = mesh_utils.create_device_mesh(case.mesh, list(devices), allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_batch(case: Case) -> Packed:
    """A step's batch as shapes only: every micro-batch, with a row for each shard."""
    example = example_batch(case, case.work.micro_groups)
    sizes = (micro_batches(case) // case.work.minibatches, case.rows_abreast)

    def grown(x: Any) -> Any:
        shape = (*sizes, *np.shape(x)[2:]) if np.ndim(x) else ()
        return jax.ShapeDtypeStruct(shape, np.asarray(x).dtype)

    return Packed(jax.tree.map(grown, example.rows), example.owner, example.stats)


def lowered_update(conf: EvojaxConf, case: Case, devices: Sequence[Any]) -> tuple[Any, Any]:
    """The lowered update, and the abstract state that it takes."""
    updater = _updater(conf, mesh_of(case, devices))
    state = updater.abstract_state()
    return updater.lower(state, abstract_batch(case)), state


def _updater(conf: EvojaxConf, mesh: Mesh) -> Updater:
    model, temperature = shape_of(conf.policy), conf.sampling.temperature
    return Updater(model, conf.algorithm, temperature, mesh=mesh, lora=conf.policy.lora)


def abstract_request(case: Case) -> Request:
    """What the engine is asked for at once: as many prompts as ``max_batch`` has room for."""
    work = case.work
    prompts = max(1, work.max_batch // work.samples)
    samples = min(work.samples, work.max_batch)
    length = -(-work.prompt // _LENGTH_STEP) * _LENGTH_STEP

    def array(kind: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, kind)

    return Request(
        tokens=array(jnp.int32, prompts, length),
        lengths=array(jnp.int32, prompts),
        live=array(jnp.bool_, prompts),
        words=array(jnp.uint32, prompts, 2),
        samples=array(jnp.int32, samples),
        temperature=array(jnp.float32),
        stop=array(jnp.bool_, case.model.vocab_size),
        limit=array(jnp.int32),
    )


def lowered_rollout(case: Case, devices: Sequence[Any]) -> Any:
    """The lowered sampler of one process: prompts, then one token after the other."""
    cfg, count = case.model, case.engine_chips
    home = Mesh(np.array(devices[:count]), ("tp",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(home, PartitionSpec())
    weights = jax.eval_shape(lambda p: unstack(p, cfg), param_shapes(cfg))

    def placed(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    def cut(path: tuple[Any, ...], x: Any) -> Any:
        names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        spec = home_spec(names, (1, *x.shape) if len(names) > 1 else x.shape, cfg, count)
        spec = PartitionSpec(*spec[1:]) if len(names) > 1 else spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(home, spec))

    program = jax.jit(sample_completions, static_argnames=("cfg", "budget", "pad_id"))
    return program.lower(
        jax.tree_util.tree_map_with_path(cut, weights),
        cfg,
        decode_budget(case.work.new),
        0,
        None,
        jax.tree.map(placed, abstract_request(case)),
    )


def measured(lowered: Any, case: Case) -> dict[str, Any]:
    """Compile, and read what the compiler knows: bytes of a device, operations, collectives.

    ``flops`` and ``bytes_accessed`` are the compiler's own counts, in which a loop counts once.
    """
    began = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - began
    stats = compiled.memory_analysis()
    parts = {
        "arguments": int(stats.argument_size_in_bytes),
        "outputs": int(stats.output_size_in_bytes),
        "aliased": int(stats.alias_size_in_bytes),
        "temporary": int(stats.temp_size_in_bytes),
        "code": int(stats.generated_code_size_in_bytes),
    }
    total = sum(parts.values()) - 2 * parts["aliased"]
    found = hlo.collectives(compiled.as_text())
    rows = row_shape(case).slots
    gathered = hlo.gathering(found, rows, case.model.vocab_size, case.model.hidden_size)
    costs = compiled.cost_analysis() or {}
    costs = costs[0] if isinstance(costs, list) else costs
    return {
        "memory": parts,
        "device_bytes": total,
        "flops": float(costs.get("flops", 0.0)),
        "bytes_accessed": float(costs.get("bytes accessed", 0.0)),
        "collectives": hlo.totals(found),
        "gathers_logits": [one.shapes[0] for one in gathered],
        "compile_s": seconds,
    }


def state_bytes(state: Any) -> int:
    """Bytes of a state on one device."""

    def size(leaf: Any) -> int:
        sharding = leaf.sharding
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return int(np.prod(shape)) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(state))


def cross_lowered(conf: EvojaxConf, case: Case, devices: Sequence[Any]) -> dict[str, Any]:
    """The update lowered for CUDA without a GPU: that it can be, and the size of its text."""
    mesh = mesh_of(case, devices)
    updater = _updater(conf, mesh)
    rows = abstract_batch(case).rows
    where = row_shardings(rows, mesh)
    rows = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), rows, where
    )
    with jax.set_mesh(mesh):
        traced = update.trace(
            updater.abstract_state(), case.model, updater.spec, updater.hyper, rows,
            updater.abstract_frozen(),
        )  # fmt: skip
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return {"platform": "cuda", "stablehlo_bytes": len(text)}


def run(conf: EvojaxConf) -> Iterator[dict[str, Any]]:
    """Compile the programs that ``plan.programs`` names; each part of the report as it is done."""
    case = case_of(conf, shape_of(conf.policy))
    devices = devices_of(conf.hardware)
    yield {"for": conf.hardware.platform, "device": str(devices[0])}
    if "update" in conf.plan.programs:
        lowered, state = lowered_update(conf, case, devices)
        size = state_bytes(state)
        try:
            found = measured(lowered, case)
            found |= {"state": size, "donated": found["memory"]["aliased"] >= size}
            yield {"update": found}
        except jax.errors.JaxRuntimeError as error:
            yield _refused("update", error)
        if conf.hardware.platform == "cuda":
            yield {"cross_lowered": cross_lowered(conf, case, devices)}
    if "rollout" in conf.plan.programs:
        lowered = lowered_rollout(case, devices_of_process(conf.hardware))
        try:
            yield {"rollout": measured(lowered, case)}
        except jax.errors.JaxRuntimeError as error:
            yield _refused("rollout", error)


def _refused(name: str, error: Exception) -> dict[str, Any]:
    """What a compiler says to a program that is larger than the chip.

    Raises:
        JaxRuntimeError: it says something else.
    """
    first = str(error).splitlines()[0]
    if "RESOURCE_EXHAUSTED" not in first:
        raise error
    return {f"{name}_too_large": first[first.index("RESOURCE_EXHAUSTED") :]}


def main(argv: Sequence[str]) -> None:
    """Compile what the configuration file says; every part of the result is a marked JSON line."""
    jax.config.update("jax_enable_compilation_cache", False)
    plain = OmegaConf.load(Path(argv[0]))
    conf = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EvojaxConf), plain))
    for part in run(cast(EvojaxConf, conf)):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(MARK + json.dumps(part | {"peak_rss_bytes": peak}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
