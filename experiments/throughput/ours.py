"""evojax's side: the real trainer on the job's items, one JSON line a step.

python -m experiments.throughput.ours job.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from evojax.bench.flops import matmul_ceiling, update_flops
from evojax.bench.shapes import Shape
from evojax.bench.step import Step, run_steps, step_conf
from evojax.bench.timing import machine
from evojax.config import PolicyConf
from evojax.grpo.pack import Packed
from evojax.policy.compile_cache import enable_compile_cache
from evojax.policy.decoder import ModelConfig
from evojax.policy.load import load_policy

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def main(path: Path) -> None:
    """Run the job and print its lines, the last one about the process."""
    job = json.loads(path.read_text())
    enable_compile_cache()
    named = {**job, "tasks": tuple(job["tasks"]), "micro_batch_groups": job["micro"]}
    shape = Shape(**{f.name: named[f.name] for f in fields(Shape)})
    conf = PolicyConf(source="path", path=job["model"], compute_dtype=DTYPES[job["dtype"]])
    policy = load_policy(conf, seed=job["seed"])
    training = step_conf(shape, conf, job["steps"] + 1)
    training.seed, training.algorithm.lr = job["seed"], job["lr"]
    # The last step measures the KL and saves a checkpoint, which the peer does not.
    steps = run_steps(policy, shape, training, live=job["reward"] == "live")[:-1]
    trained = [group.text for step in steps for group in step.groups]
    if trained != [item["prompt"] for item in job["items"]]:
        raise RuntimeError("the trainer selected other items than the job names")
    packs = [step.repacked(training) for step in steps]
    for i, (step, packed) in enumerate(zip(steps, packs, strict=True)):
        print(json.dumps(_line(i, step, packed, policy.cfg)), flush=True)
    process = {"peak_rss_gb": steps[-1].row["peak_rss_mb"] / 1e3, "versions": machine()["versions"]}
    live = [packed for packed in packs if packed is not None]
    if live:
        ceiling = matmul_ceiling(policy.cfg, live[0], conf.compute_dtype, 3)
        process["matmul_gflop_per_s"] = ceiling["gflop_per_s"]
    print(json.dumps(process), flush=True)


def _line(index: int, step: Step, packed: Packed | None, cfg: ModelConfig) -> dict[str, Any]:
    """One step in the form that the peer's lines have; its rollout includes the rewards."""
    row = step.row
    line = {
        "step": index,
        "step_s": step.seconds,
        "rollout_s": row["rollout_s"] + row["reward_s"],
        "reward_s": row["reward_s"],
        "update_s": row["update_s"],
        "sync_s": row["sync_s"],
        "live_share": step.live_share,
        "natural_live_share": step.natural_live_share,
        "response_tokens": row["tokens"],
    }
    if packed is not None:
        line["update_gflop"] = update_flops(cfg, packed) * 1e-9
        line |= packed.stats
    return line


if __name__ == "__main__":
    main(Path(sys.argv[1]))
