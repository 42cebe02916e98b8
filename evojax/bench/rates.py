"""Parts by themselves: decoding for several batch sizes, the update, its compilation."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from evojax.bench.flops import update_flops
from evojax.bench.timing import empty_compile_cache, note, timed
from evojax.config import AlgorithmConf
from evojax.evidence.types import Completion
from evojax.grpo.advantages import RewardTable, estimate
from evojax.grpo.pack import Packed, pack
from evojax.grpo.update import Updater
from evojax.policy.decoder import ModelConfig, Params
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine


def decode_rates(
    cfg: ModelConfig, params: Params, batches: tuple[int, ...], prompt: int, new: int, repeats: int
) -> list[dict[str, Any]]:
    """Sampled tokens per second, prefill included, for each batch size.

    Args:
        batches: rows decoded together. prompt, new: tokens. repeats: timed runs of each.
    """
    engine = EmbeddedEngine(cfg, pad_id=0, max_batch=max(batches))
    engine.load_weights(params, "bench")
    sampling = SamplingParams(1.0, new, stop_token_ids=())
    rng = np.random.default_rng(0)
    out = []
    for batch in batches:
        prompts = list(rng.integers(0, cfg.vocab_size, (batch, prompt), np.int32))
        seconds = timed(lambda p=prompts: engine.generate(p, sampling, 1, range(len(p))), repeats)
        rate = batch * new / seconds["median_s"]
        out.append({"batch": batch, "tokens_per_s": rate, **seconds})
        note(f"decode, batch {batch}: {rate:.1f} tokens/s")
    return out


def plain_batch(cfg: ModelConfig, rows: int, length: int) -> Packed:
    """Sequences that share nothing but one first token per pair, all of it trained on.

    Args:
        rows: sequences, an even number. length: tokens of each.
    """
    rng = np.random.default_rng(1)

    def completion() -> Completion:
        ids = rng.integers(0, cfg.vocab_size, length - 1, np.int32)
        logp = np.full(length - 1, -np.log(cfg.vocab_size), np.float32)
        return Completion(ids, logp, np.zeros(length - 1, np.float32), "length", "bench")

    prompts = [np.array([g], np.int32) for g in range(rows // 2)]
    completions = [[completion(), completion()] for _ in prompts]
    conf, rewards = AlgorithmConf(), np.tile([1.0, 0.0], (len(prompts), 1))
    live = estimate(conf.advantage, RewardTable(rewards, conf.dead_tolerance))
    packed = pack(prompts, completions, live, 1, aggregation=conf.aggregation, horizon=length)
    if packed is None:
        raise RuntimeError("every group has two different rewards, so one must be live")
    return packed


def update_rate(cfg: ModelConfig, params: Params, packed: Packed, repeats: int) -> dict[str, Any]:
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
        "packed_tokens_per_s": packed.stats["tokens_packed"] / median,
        "gflop_per_s": update_flops(cfg, packed) / median * 1e-9,
        **seconds,
    }
    note(f"update of unshared sequences: {median:.2f} s, {out['gflop_per_s']:.1f} GFLOP/s")
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
            updater.lower(state, packed).compile()
            out[name] = time.perf_counter() - began
    note(f"compile, update: {out['cold_s']:.2f} s cold, {out['warm_s']:.2f} s from the cache")
    return out
