"""evojax's side: the real trainer on the job's items, one JSON line a step.

python -m experiments.throughput.ours job.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from evojax.bench.flops import matmul_ceiling, update_flops
from evojax.bench.rates import pack_live
from evojax.bench.shapes import Shape
from evojax.bench.step import StepTimes, peak_rss_gb, run_steps, step_conf
from evojax.bench.timing import machine
from evojax.config import PolicyConf
from evojax.grpo.advantages import RewardTable
from evojax.grpo.pack import Packed
from evojax.policy.compile_cache import enable_compile_cache
from evojax.policy.load import load_policy

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def main(path: Path) -> None:
    """Run the job and print its lines, the last one about the process."""
    job = json.loads(path.read_text())
    enable_compile_cache()
    named = {**job, "tasks": tuple(job["tasks"])}
    shape = Shape(**{f.name: named[f.name] for f in fields(Shape)})
    conf = PolicyConf(source="path", path=job["model"], compute_dtype=DTYPES[job["dtype"]])
    policy = load_policy(conf, seed=job["seed"])
    training = step_conf(shape, conf, job["steps"], job["micro"])
    training.seed, training.algorithm.lr = job["seed"], job["lr"]
    steps = run_steps(policy, shape, training, live=job["reward"] == "live")
    trained = [group.text for step in steps for group in step.groups]
    if trained != [item["prompt"] for item in job["items"]]:
        raise RuntimeError("the trainer selected other items than the job names")
    peak = peak_rss_gb()
    packs = {i: packed for i, step in enumerate(steps) if (packed := _packed(step, job))}
    for i, step in enumerate(steps):
        print(json.dumps(_line(i, step, packs.get(i), policy.cfg)), flush=True)
    last = {"peak_rss_gb": peak, "versions": machine()["versions"]}
    if packs:
        ceiling = matmul_ceiling(policy.cfg, packs[min(packs)], conf.compute_dtype, 3)
        last["matmul_gflop_per_s"] = ceiling["gflop_per_s"]
    print(json.dumps(last), flush=True)


def _packed(step: StepTimes, job: dict[str, Any]) -> Packed | None:
    """The batch of the step's update; None when no group was live."""
    if step.live_share == 0:
        return None
    return pack_live(
        [g.prompt for g in step.groups],
        [g.completions for g in step.groups],
        RewardTable(np.array([g.rewards for g in step.groups]), 1e-6),
        job["micro"],
        job["new"],
    )


def _line(index: int, step: StepTimes, packed: Packed | None, cfg: Any) -> dict[str, Any]:
    """One step in the form that the peer's lines have; its rollout includes the rewards."""
    line = {
        "step": index,
        "step_s": step.step_s,
        "rollout_s": step.rollout_s + step.reward_s,
        "reward_s": step.reward_s,
        "update_s": step.update_s,
        "sync_s": step.sync_s,
        "live_share": step.live_share,
        "natural_live_share": step.natural_live_share,
        "response_tokens": step.response_tokens,
    }
    if packed is not None:
        line["update_gflop"] = update_flops(cfg, packed) * 1e-9
        line["tokens_sequences"] = packed.stats["tokens_sequences"]
        line["tokens_packed"] = packed.stats["tokens_packed"]
        line["tokens_padded"] = packed.stats["tokens_padded"]
    return line


if __name__ == "__main__":
    main(Path(sys.argv[1]))
