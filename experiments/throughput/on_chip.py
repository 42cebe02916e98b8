"""One accelerator: is it right, and how fast is it? Prepared, to be run where there is a chip.

    python -m experiments.throughput.on_chip --hardware h200_1 --out on_chip.jsonl

prints one JSON line, within ten minutes on one chip:

- correctness: log-probabilities and one update of a small float32 model, on the chip and on the CPU
  of the same machine, as the largest absolute differences;
- speed of a random model of Qwen3-0.6B's shape in bfloat16: seconds of an update, MFU, tokens a
  second; sampled tokens a second for several batch sizes.

MFU is model operations (each token once: 2 a weight forward, 4 backward; attention scores in full,
not halved for causality; the head on scored positions; the embedding's look-up not counted; nothing
for what is computed again) over seconds times the chip's published bfloat16 peak.
``--rehearse`` takes a tiny model and whatever device there is, and its result says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from evojax.bench.rates import decode_rates
from evojax.bench.timing import machine, note, timed
from evojax.config import AlgorithmConf, EvojaxConf
from evojax.evolution.config_edit import compose_conf
from evojax.evolution.workshop import typed
from evojax.grpo.logprobs import score
from evojax.grpo.update import Updater
from evojax.paths import conf_dir
from evojax.plan.case import Case, case_of, example_batch, shape_of
from evojax.plan.rates import update
from evojax.policy.decoder import init_params
from evojax.policy.shape import ModelConfig, num_params

SCHEMA = 1
SMALL = ModelConfig(
    512, 128, 256, 4, 4, 2, 32, 1e6, 1e-6, 512, family="qwen3", qk_norm=True
)  # fmt: skip
SIZES = [
    "train.prompts_per_step=8", "train.micro_batch_groups=1", "sampling.group_size=8",
    "sampling.max_new_tokens=256", "plan.prompt_tokens=256", "rollout.max_batch=128",
]  # fmt: skip
TINY_SIZES = ["sampling.max_new_tokens=8", "plan.prompt_tokens=8", "train.prompts_per_step=2"]
BATCHES, TINY_BATCHES = (1, 8, 32, 128), (2,)


def planned(hardware: str, rehearse: bool) -> tuple[EvojaxConf, Case]:
    """The configuration of the timed part, and its case on one chip."""
    policy = "random_tiny" if rehearse else "qwen3_0_6b"
    words = [f"policy={policy}", f"hardware={hardware}", *SIZES, *(TINY_SIZES if rehearse else ())]
    cfg = compose_conf(conf_dir(), ["+experiment=plan", *words])
    conf = typed(cfg)
    case = case_of(conf, shape_of(conf.policy))
    return conf, dataclasses.replace(case, chips=1, host_chips=1, mesh=(1, 1, 1))


def _on(device: Any, model: ModelConfig, case: Case) -> dict[str, Any]:
    """Log-probabilities, gradient norm and new weights of one update on one device."""
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        packed = example_batch(case, 2)
        params = jax.tree.map(np.asarray, init_params(model, 0))
        params = jax.device_put(params, device)
        logp = np.asarray(score(params, model, packed.rows, 1.0))
        updater = Updater(model, AlgorithmConf(lr=1e-3), 1.0)
        state, metrics = updater.step(updater.init(params), packed)
        weights = [np.asarray(leaf) for leaf in jax.tree.leaves(state["params"])]
    return {"logp": logp, "metrics": metrics, "weights": weights}


def correctness(device: Any) -> dict[str, float]:
    """Largest absolute differences between ``device`` and the CPU."""
    _, case = planned("local", rehearse=True)
    case = dataclasses.replace(case, model=SMALL)
    here, cpu = _on(device, SMALL, case), _on(jax.devices("cpu")[0], SMALL, case)
    pairs = zip(here["weights"], cpu["weights"], strict=True)
    norms = [found["metrics"]["grad_norm"] for found in (here, cpu)]
    return {
        "logprobs": float(np.abs(here["logp"] - cpu["logp"]).max()),
        "loss": abs(here["metrics"]["loss"] - cpu["metrics"]["loss"]),
        "grad_norm_relative": abs(norms[0] - norms[1]) / norms[1],
        "weights_after_update": max(float(np.abs(a - b).max()) for a, b in pairs),
    }


def update_speed(case: Case, params: Any, repeats: int) -> dict[str, Any]:
    """Seconds of an update, tokens a second and MFU."""
    work = case.work
    packed = example_batch(case, work.groups)
    updater = Updater(case.model, AlgorithmConf(lr=0.0), 1.0)
    state = [updater.init(params)]
    began = time.perf_counter()
    state[0], _ = updater.step(state[0], packed)
    first = time.perf_counter() - began

    def run() -> None:
        state[0], _ = updater.step(state[0], packed)

    seconds = timed(run, repeats)
    plain = dataclasses.replace(work, epochs=1, minibatches=1, scored=0.0)
    phase = update(dataclasses.replace(case, work=plain))
    return {
        **seconds,
        "first_call_s": first,
        "response_tokens_per_s": phase.tokens / seconds["median_s"],
        "model_tflop": phase.model_flops / 1e12,
        "mfu": phase.model_flops / seconds["median_s"] / case.chip.flops,
        "roofline_s": phase.seconds,
    }


def peak_bytes(device: Any) -> int | None:
    """Most memory in use so far; None where the backend does not say."""
    stats = device.memory_stats()
    return None if not stats else int(stats.get("peak_bytes_in_use", 0)) or None


def measure(hardware: str, rehearse: bool, repeats: int) -> dict[str, Any]:
    """Everything, JSON-ready."""
    began = time.perf_counter()
    device = jax.devices()[0]
    note(f"device {device.device_kind}")
    conf, case = planned(hardware, rehearse)
    found = correctness(device)
    note(f"differences from the CPU: {found}")
    params = init_params(case.model, 0)
    speed = update_speed(case, params, repeats)
    note(f"update {speed['median_s']:.3f} s, MFU {speed['mfu']:.1%}")
    batches = TINY_BATCHES if rehearse else BATCHES
    work = case.work
    decode = decode_rates(case.model, params, batches, work.prompt, work.new, repeats)
    return {
        "schema": SCHEMA,
        "rehearsal": rehearse,
        "hardware": hardware,
        "device": device.device_kind,
        "machine": machine(),
        "policy": conf.policy.repo or conf.policy.source,
        "parameters": num_params(case.model),
        "compute_dtype": case.model.compute_dtype,
        "remat": case.model.remat,
        "work": dataclasses.asdict(work),
        "difference_from_cpu": found,
        "update": speed,
        "decode": decode,
        "peak_bytes": peak_bytes(device),
        "wall_s": time.perf_counter() - began,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m experiments.throughput.on_chip")
    parser.add_argument("--hardware", required=True, help="preset of conf/hardware, for its peak")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on any device")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the line to this file too")
    options = parser.parse_args(argv)
    if jax.default_backend() == "cpu" and not options.rehearse:
        print("on_chip: no accelerator here; --rehearse runs it on the CPU", file=sys.stderr)
        return 3
    line = json.dumps(measure(options.hardware, options.rehearse, options.repeats))
    print(line, flush=True)
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
