"""Speed of this machine: ``python -m evojax.bench [--quick] [--policy NAME]`` prints one JSON.

Floating-point operations are counted as 2 per weight and token forward and 4 backward, for the
tokens that are really computed (prefix-tree nodes; the head for the nodes that predict). Padding,
attention scores and recomputation count nothing, so the ratios to the matmul rate are honest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from evojax.config import AlgorithmConf, PolicyConf
from evojax.evidence.types import Completion
from evojax.grpo.advantages import group_normalised
from evojax.grpo.pack import Packed, pack
from evojax.grpo.update import Updater, update
from evojax.policy.decoder import ModelConfig, Params
from evojax.policy.load import SOURCES, load_policy
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine

SCHEMA = 1
BUDGET_S = 20.0
_CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_min_compile_time_secs",
)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        repeats: timed runs of each thing, after one that is not timed.
        batches: rows decoded together. decode_prompt, decode_new: tokens.
        groups, samples, prompt, new: shape of a training step (new = longest completion).
        plain_rows, plain_length: the update on unshared sequences.
    """

    repeats: int = 5
    batches: tuple[int, ...] = (1, 8, 32, 64)
    decode_prompt: int = 96
    decode_new: int = 64
    groups: int = 8
    samples: int = 8
    prompt: int = 60
    new: int = 6
    plain_rows: int = 32
    plain_length: int = 160


QUICK = Plan(
    repeats=2, batches=(1, 8), decode_prompt=16, decode_new=8, groups=4, samples=4, plain_rows=4,
    plain_length=32,
)  # fmt: skip


def note(text: str) -> None:
    """Progress, on stderr: stdout carries the JSON alone."""
    print(text, file=sys.stderr, flush=True)


def timed(run: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Seconds of ``run`` as {n, median, iqr}; the first call (compilation) is left out.

    Something slow is repeated less often: no further run begins after ``BUDGET_S`` seconds.

    >>> timed(lambda: None, 3)["n"]
    3
    """
    run()
    seconds: list[float] = []
    while len(seconds) < repeats and (not seconds or sum(seconds) < BUDGET_S):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return {"n": len(seconds), "median_s": float(middle), "iqr_s": float(high - low)}


def matmul_rates(cfg: ModelConfig, repeats: int) -> list[dict[str, Any]]:
    """GFLOP/s of plain float32 products on the model's own shapes ``m x k x n``."""
    width, inner, vocabulary = cfg.hidden_size, cfg.intermediate_size, cfg.vocab_size
    shapes = [(1280, width, inner), (1280, inner, width), (128, width, inner), (32, width, inner)]
    shapes.append((256, width, vocabulary))
    multiply = jax.jit(jnp.matmul)
    out = []
    for m, k, n in shapes:
        left, right = jnp.ones((m, k), jnp.float32), jnp.ones((k, n), jnp.float32)
        inner_runs = max(1, int(1e9 // (2 * m * k * n)))

        def run(left: jax.Array = left, right: jax.Array = right, times: int = inner_runs) -> None:
            for _ in range(times):
                multiply(left, right).block_until_ready()

        seconds = timed(run, repeats)
        rate = 2e-9 * m * k * n * inner_runs / seconds["median_s"]
        out.append({"shape": [m, k, n], "gflop_per_s": rate, **seconds})
        note(f"matmul {m} x {k} x {n}: {rate:.1f} GFLOP/s")
    return out


def decode_rates(cfg: ModelConfig, params: Params, plan: Plan) -> list[dict[str, Any]]:
    """Sampled tokens per second, prefill included, for each batch size."""
    engine = EmbeddedEngine(cfg, pad_id=0, max_batch=max(plan.batches))
    engine.load_weights(params, "bench")
    sampling = SamplingParams(1.0, plan.decode_new, stop_token_ids=())
    rng = np.random.default_rng(0)
    out = []
    for batch in plan.batches:
        prompts = list(rng.integers(0, cfg.vocab_size, (batch, plan.decode_prompt), np.int32))
        seconds = timed(
            lambda p=prompts: engine.generate(p, sampling, 1, range(len(p))), plan.repeats
        )
        rate = batch * plan.decode_new / seconds["median_s"]
        out.append({"batch": batch, "tokens_per_s": rate, **seconds})
        note(f"decode, batch {batch}: {rate:.1f} tokens/s")
    return out


def _packed(
    cfg: ModelConfig, prompts: Sequence[np.ndarray], samples: int, new: int, per_row: int
) -> Packed:
    """Random completions of ``new`` tokens whose first sample is right: every group is live."""
    rng = np.random.default_rng(1)

    def completion() -> Completion:
        ids = rng.integers(0, cfg.vocab_size, new, np.int32)
        logp = np.full(new, -np.log(cfg.vocab_size), np.float32)
        return Completion(ids, logp, np.zeros(new, np.float32), "length", "bench")

    rewards = np.zeros((len(prompts), samples))
    rewards[:, 0] = 1.0
    packed = pack(
        prompts,
        [[completion() for _ in range(samples)] for _ in prompts],
        group_normalised(rewards, tolerance=1e-6),
        per_row,
    )
    if packed is None:
        raise RuntimeError("every group has two different rewards, so one must be live")
    return packed


def main_job_batch(cfg: ModelConfig, plan: Plan) -> Packed:
    """Groups of few-shot prompts: four families, all but the last ten tokens shared in each."""
    rng = np.random.default_rng(0)
    families = rng.integers(0, cfg.vocab_size, (4, plan.prompt - 10), np.int32)
    own = rng.integers(0, cfg.vocab_size, (plan.groups, 10), np.int32)
    prompts = [np.concatenate([families[g % 4], own[g]]) for g in range(plan.groups)]
    return _packed(cfg, prompts, plan.samples, plan.new, per_row=2)


def plain_batch(cfg: ModelConfig, plan: Plan) -> Packed:
    """Sequences that share nothing but one first token per pair, all of it trained on."""
    prompts = [np.array([g], np.int32) for g in range(plan.plain_rows // 2)]
    return _packed(cfg, prompts, 2, plan.plain_length - 1, per_row=1)


def update_flops(cfg: ModelConfig, packed: Packed) -> float:
    """Floating-point operations of one update; see the module's text for what is counted."""
    width, head = cfg.hidden_size, cfg.num_heads * cfg.head_dim
    kv = cfg.num_kv_heads * cfg.head_dim
    layer = width * (2 * head + 2 * kv) + 3 * width * cfg.intermediate_size
    predicting = sum(
        len(np.unique(slot[mask]))
        for slot, mask in zip(packed.rows.slot, packed.rows.response_mask, strict=True)
    )
    nodes = packed.stats["tokens_packed"]
    return 6.0 * (cfg.num_layers * layer * nodes + width * cfg.vocab_size * predicting)


def update_rate(
    cfg: ModelConfig, params: Params, packed: Packed, repeats: int, name: str
) -> dict[str, Any]:
    """Seconds, tokens and GFLOP per second of whole updates, optimizer included."""
    updater = Updater(cfg, AlgorithmConf(lr=0.0), 1.0)
    state = [updater.init(params)]

    def run() -> None:
        state[0], _ = updater.step(state[0], packed)

    seconds = timed(run, repeats)
    median = seconds["median_s"]
    out = {
        **packed.stats,
        "response_tokens": float(packed.rows.response_mask.sum()),
        "sequence_tokens_per_s": packed.stats["tokens_sequences"] / median,
        "packed_tokens_per_s": packed.stats["tokens_packed"] / median,
        "gflop_per_s": update_flops(cfg, packed) / median * 1e-9,
        **seconds,
    }
    note(f"update, {name}: {median:.2f} s, {out['gflop_per_s']:.1f} GFLOP/s")
    return out


def compile_seconds(cfg: ModelConfig, packed: Packed) -> dict[str, float]:
    """Compiling the update: into an empty persistent cache, and again from it (a warm start)."""
    updater = Updater(cfg, AlgorithmConf(), 1.0)
    state = updater.abstract_state()
    out = {}
    with empty_compile_cache():
        for name in ("cold_s", "warm_s"):
            jax.clear_caches()
            began = time.perf_counter()
            update.lower(state, cfg, updater.hyper, packed.rows).compile()
            out[name] = time.perf_counter() - began
    note(f"compile, update: {out['cold_s']:.2f} s cold, {out['warm_s']:.2f} s from the cache")
    return out


@contextmanager
def empty_compile_cache() -> Iterator[None]:
    """An empty persistent compile cache; afterwards the one that was set before."""
    before = {name: jax.config.values[name] for name in _CACHE_SETTINGS}
    with tempfile.TemporaryDirectory() as directory:
        _configure(dict(zip(_CACHE_SETTINGS, (directory, -1, 0), strict=True)))
        try:
            yield
        finally:
            _configure(before)


def _configure(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1m": os.getloadavg()[0],
        "devices": [d.device_kind for d in jax.devices()],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
    }


def measure(source: str, plan: Plan) -> dict[str, Any]:
    """Every figure as one JSON-ready dictionary."""
    began = time.perf_counter()
    before = machine()
    policy = load_policy(PolicyConf(source=source), seed=0)
    cfg, params = policy.cfg, policy.params
    note(f"{policy.label} loaded; {before['cores']} cores, load {before['load_1m']:.1f}")
    main_job, plain = main_job_batch(cfg, plan), plain_batch(cfg, plan)
    compiled = compile_seconds(cfg, main_job)
    matmul = matmul_rates(cfg, plan.repeats)
    decode = decode_rates(cfg, params, plan)
    updates = {
        name: update_rate(cfg, params, packed, plan.repeats, name)
        for name, packed in (("main_job", main_job), ("plain", plain))
    }
    ceiling = matmul[0]["gflop_per_s"]
    return {
        "schema": SCHEMA,
        "policy": policy.label,
        "parameters": int(sum(p.size for p in jax.tree.leaves(params))),
        "machine": before,
        "plan": vars(plan),
        "matmul": matmul,
        "decode": decode,
        "update": updates,
        "compile": {"update": compiled},
        "ratios": {
            f"update_{name}_to_matmul": value["gflop_per_s"] / ceiling
            for name, value in updates.items()
        }
        | {
            f"decode_batch_{row['batch']}_to_first": row["tokens_per_s"] / decode[0]["tokens_per_s"]
            for row in decode[1:]
        },
        "wall_s": time.perf_counter() - began,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m evojax.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, two repeats")
    sources = [source for source in SOURCES if source != "path"]
    parser.add_argument("--policy", choices=sources, default=sources[0])
    options = parser.parse_args(argv)
    print(json.dumps(measure(options.policy, QUICK if options.quick else Plan()), indent=1))


if __name__ == "__main__":
    main()
