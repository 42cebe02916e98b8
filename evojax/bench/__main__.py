"""Speed of this machine: ``python -m evojax.bench [--shapes ...]`` prints one JSON.

For every shape whole GRPO steps run through the real trainer: seconds by part, raw and useful
tokens per second (useful: the token's advantage is not zero), padding, peak memory, and the
update's rate beside that of XLA's own matrix products on the same shapes. All groups are live, the
worst case; the share that would be dead under the tasks' own grades stands beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from evojax.bench.flops import matmul_ceiling, update_flops
from evojax.bench.rates import compile_seconds, decode_rates, plain_batch, update_rate
from evojax.bench.shapes import SHAPES, Shape, tiny
from evojax.bench.step import PARTS, run_steps, step_conf
from evojax.bench.timing import BUDGET_S, machine, note, spread
from evojax.config import PolicyConf
from evojax.policy.compile_cache import enable_compile_cache
from evojax.policy.load import SOURCES, Policy, load_policy

SCHEMA = 2
TOKENS = ("tokens", "tokens_sequences", "tokens_packed", "tokens_padded")


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        steps: training steps of a shape that are timed, between its warm-up and a last one.
        repeats: timed runs of everything else. batches: rows decoded together.
        decode_prompt, decode_new: tokens. plain_rows, plain_length: the update on unshared
            sequences.
    """

    steps: int = 5
    repeats: int = 5
    batches: tuple[int, ...] = (1, 8, 32, 64)
    decode_prompt: int = 96
    decode_new: int = 64
    plain_rows: int = 32
    plain_length: int = 160


QUICK = Plan(
    steps=2, repeats=2, batches=(1, 8), decode_prompt=16, decode_new=8, plain_rows=4,
    plain_length=32,
)  # fmt: skip


def shape_figures(policy: Policy, shape: Shape, conf: PolicyConf, plan: Plan) -> dict[str, Any]:
    """Every figure of one shape.

    The first steps warm up; the last one also measures the KL and saves a checkpoint, and only
    tells what those take.
    """
    training = step_conf(shape, conf, shape.warmup + plan.steps + 1)
    *steps, last = run_steps(policy, shape, training, live=True)[shape.warmup :]
    packs = [packed for step in steps if (packed := step.repacked(training)) is not None]
    parts = {part: _median([s.row[part] for s in steps]) for part in PARTS}
    whole = spread([s.seconds for s in steps])
    gflop = _median([update_flops(policy.cfg, p) * 1e-9 for p in packs])
    ceiling = matmul_ceiling(policy.cfg, packs[0], conf.compute_dtype, plan.repeats)
    rate = gflop / parts["update_s"]
    note(
        f"{shape.name}: {whole['median_s']:.2f} s a step; "
        + ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
        + f"; update {rate:.1f} GFLOP/s, {rate / ceiling['gflop_per_s']:.0%} of the matmuls'"
    )
    return {
        "shape": vars(shape),
        "step": whole,
        "parts": parts,
        "beside": {
            "checkpoint_s": last.row["checkpoint_s"],
            "kl_measure_s": max(0.0, last.row["update_s"] - parts["update_s"]),
        },
        "tokens_per_s": {
            "raw": _median([s.row["tokens"] / s.seconds for s in steps]),
            "useful": _median([s.row["useful_tokens"] / s.seconds for s in steps]),
        },
        "live_share": _median([s.live_share for s in steps]),
        "natural_dead_share": 1.0 - float(np.mean([s.natural_live_share for s in steps])),
        "tokens": {name: _median([s.row[name] for s in steps]) for name in TOKENS},
        "padding_share": _median(
            [1.0 - s.row["tokens_packed"] / s.row["tokens_padded"] for s in steps]
        ),
        "peak_rss_gb": steps[-1].row["peak_rss_mb"] / 1e3,
        "update": {
            "gflop": gflop,
            "gflop_per_s": rate,
            "to_matmul": rate / ceiling["gflop_per_s"],
        },
        "matmul": ceiling,
    }


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def measure(conf: PolicyConf, shapes: Sequence[Shape], plan: Plan) -> dict[str, Any]:
    """Every figure as one JSON-ready dictionary; shapes run from the smallest, one after another.

    ``peak_rss_gb`` of a shape is that of the process up to its end.
    """
    began = time.perf_counter()
    before = machine()
    enable_compile_cache()
    policy = load_policy(conf, seed=0)
    note(f"{policy.label} loaded; {before['cores']} cores, load {before['load_1m']:.1f}")
    figures = {s.name: shape_figures(policy, s, conf, plan) for s in shapes}
    plain = plain_batch(policy.cfg, plan.plain_rows, plan.plain_length)
    decode = decode_rates(
        policy.cfg, policy.params, plan.batches, plan.decode_prompt, plan.decode_new, plan.repeats
    )
    return {
        "schema": SCHEMA,
        "policy": policy.label,
        "compute_dtype": conf.compute_dtype,
        "parameters": int(sum(p.size for p in jax.tree.leaves(policy.params))),
        "machine": before,
        "plan": vars(plan) | {"budget_s": BUDGET_S},
        "shapes": figures,
        "decode": decode,
        "plain_update": update_rate(policy.cfg, policy.params, plain, plan.repeats),
        "compile": {"update": compile_seconds(policy.cfg, plain)},
        "wall_s": time.perf_counter() - began,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m evojax.bench", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--quick", action="store_true", help="two steps and repeats of each")
    sources = [source for source in SOURCES if source not in ("path", "hub")]
    parser.add_argument("--policy", choices=sources, default=sources[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, help="training steps that are timed, per shape")
    parser.add_argument("--micro-batch-groups", type=int, help="groups of a micro-batch")
    options = parser.parse_args(argv)
    plan = QUICK if options.quick else Plan()
    if options.steps is not None:
        plan = replace(plan, steps=options.steps)
    shapes = [s for s in SHAPES.values() if s.name in options.shapes]
    if options.policy == "random":
        shapes = [tiny(shape) for shape in shapes]
    if options.micro_batch_groups is not None:
        shapes = [replace(s, micro_batch_groups=options.micro_batch_groups) for s in shapes]
    conf = PolicyConf(source=options.policy, compute_dtype=options.dtype)
    print(json.dumps(measure(conf, shapes, plan), indent=1))


if __name__ == "__main__":
    main()
