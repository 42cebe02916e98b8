"""Small random batches for the tests of packing and the update."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np

from evojax.evidence.types import Completion
from evojax.grpo.advantages import RewardTable, estimate
from evojax.grpo.pack import pack
from evojax.policy.decoder import ModelConfig, init_params

TINY = ModelConfig(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rope_theta=10000.0,
    rms_eps=1e-5,
    max_position=128,
)


@cache
def sharp_params():
    """Weights large enough that a wrong neighbour or position would show; never donated."""
    params = init_params(TINY, 1)
    return jax.tree.map(lambda p: p * 12 if p.ndim == 3 or p.shape[0] == 11 else p, params)


def completion(token_ids, logprobs=None) -> Completion:
    ids = np.array(token_ids, np.int32)
    logp = np.full(len(ids), -1.5) if logprobs is None else np.array(logprobs)
    return Completion(ids, logp.astype(np.float32), np.zeros(len(ids), np.float32), "stop", "v0")


def random_batch(seed, groups=4, samples=3, longest=3, vocab=11, prefix=4):
    """Prompts (pairs share a beginning), completions and rewards; group 1 is dead."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, vocab, prefix) for _ in range(max(groups // 2, 1))]
    prompts, completions = [], []
    for g in range(groups):
        tail = rng.integers(0, vocab, rng.integers(1, 4))
        prompts.append(np.concatenate([heads[g % len(heads)], tail]).astype(np.int32))
        completions.append(
            [
                completion(rng.integers(0, vocab, n), -rng.uniform(0.5, 3.0, n))
                for n in rng.integers(1, longest + 1, samples)
            ]
        )
    rewards = rng.integers(0, 2, (groups, samples)).astype(float)
    rewards[:, :2] = [1.0, 0.0]
    if groups > 1:
        rewards[1] = 0.0
    return prompts, completions, rewards


def advantages_of(rewards, name="grpo"):
    return estimate(name, RewardTable(np.asarray(rewards, dtype=float), 1e-6))


def packed_of(prompts, completions, rewards, per_row=2, **options):
    """A pack of every group; ``token_mean`` unless told otherwise."""
    options = {"aggregation": "token_mean", "horizon": 8} | options
    return pack(prompts, completions, advantages_of(rewards), per_row, **options)
