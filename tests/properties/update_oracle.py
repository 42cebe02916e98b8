"""The update the slow way: one sequence a row, and every derivative by logp written in NumPy.

``loss = sum of w_i (c_it L_it + beta K_it - eta H_it)``. The derivative of each term by the
token's log-probability is worked out by hand below, in float64; only the network's own backward
pass is JAX's, on plain causal rows that share nothing.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from evojax.evidence.types import Completion
from evojax.grpo.advantages import RewardTable, estimate
from evojax.policy.decoder import ModelConfig, hidden_states, init_params, lm_logits

TINY = ModelConfig(
    vocab_size=7,
    hidden_size=8,
    intermediate_size=12,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope_theta=10000.0,
    rms_eps=1e-5,
    max_position=64,
)
TEMPERATURE = 0.8
GROUPS, SAMPLES, LONGEST, WIDTH = 4, 3, 4, 12


@cache
def weights(seed=0):
    """A policy whose probabilities differ; other seeds give neighbours of it."""
    params = init_params(TINY, 1)
    params = jax.tree.map(lambda p: p * 12 if p.ndim == 3 or p.shape[0] == 7 else p, params)
    rng = np.random.default_rng(seed)
    size = 0.03 if seed else 0.0
    return jax.tree.map(lambda p: p + size * jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


class Batch:
    """Rollouts with one dead group and one unscorable member, and all that an oracle needs."""

    def __init__(self, seed, order=None):
        rng = np.random.default_rng(seed)
        heads = rng.integers(0, 7, (2, 3))
        self.prompts, self.completions = [], []
        for g in range(GROUPS):
            tail = rng.integers(0, 7, rng.integers(1, 4))
            self.prompts.append(np.concatenate([heads[g % 2], tail]).astype(np.int32))
            self.completions.append([self._completion(rng) for _ in range(SAMPLES)])
        self.rewards = rng.integers(0, 2, (GROUPS, SAMPLES)).astype(float)
        self.rewards[:, :2] = [1.0, 0.0]
        self.rewards[1] = 1.0
        self.rewards[3, 2] = np.nan
        for g, s in np.ndindex(GROUPS, SAMPLES):
            self._sampler_logp(g, s, rng)
        if order is not None:
            self.prompts = [self.prompts[g] for g in order]
            self.completions = [self.completions[g] for g in order]
            self.rewards = self.rewards[list(order)]
        self.advantages = estimate("grpo", RewardTable(self.rewards, 1e-6))

    @staticmethod
    def _completion(rng):
        ids = rng.integers(0, 7, rng.integers(1, LONGEST + 1)).astype(np.int32)
        return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids)), "stop", "v@0")

    def _sampler_logp(self, g, s, rng):
        """The sampler's log-probabilities: near those of the policy, and not equal to them."""
        found = self.completions[g][s]
        logp, _ = lines(weights(), *self.line(g, s))
        start = len(self.prompts[g]) - 1
        near = np.asarray(logp)[start : start + len(found.token_ids)]
        found.logprobs[:] = near + 0.3 * rng.normal(size=len(near))

    def line(self, g, s):
        """Ids ``[WIDTH]`` of one sequence alone, padded."""
        ids = np.zeros(WIDTH, np.int32)
        both = np.concatenate([self.prompts[g], self.completions[g][s].token_ids])
        ids[: len(both)] = both
        return (ids,)

    def arrays(self):
        """ids ``[N, WIDTH]``, mask, sampler's logp and advantages ``[N, WIDTH - 1]``, weight."""
        total = GROUPS * SAMPLES
        ids = np.zeros((total, WIDTH), np.int32)
        mask = np.zeros((total, WIDTH - 1), bool)
        logp, adv = np.zeros(mask.shape), np.zeros(mask.shape)
        for i, (g, s) in enumerate(np.ndindex(GROUPS, SAMPLES)):
            (ids[i],) = self.line(g, s)
            found, first = self.completions[g][s], len(self.prompts[g]) - 1
            place = slice(first, first + len(found.token_ids))
            mask[i, place] = self.advantages.weight[g, s]
            logp[i, place] = found.logprobs
            adv[i, place] = self.advantages.advantages[g, s]
        return ids, mask, np.where(mask, logp, 0.0), np.where(mask, adv, 0.0)


@jax.jit
def lines(params, ids):
    """Log-probability and entropy ``[WIDTH - 1]`` of every next token of one causal row."""
    index = jnp.arange(WIDTH)[None]
    causal = jnp.tril(jnp.ones((1, WIDTH, WIDTH), bool))
    hidden = hidden_states(params, TINY, ids[None], index, causal)
    logp = jax.nn.log_softmax(lm_logits(params, TINY, hidden)[0, :-1] / TEMPERATURE)
    chosen = jnp.take_along_axis(logp, ids[1:, None], -1)[:, 0]
    return chosen, -jnp.sum(jnp.exp(logp) * logp, -1)


@jax.jit
def all_lines(params, ids):
    return jax.lax.map(lambda row: lines(params, row), ids)


@jax.jit
def pulled_back(params, ids, by_logp, by_entropy):
    """Gradient by the weights of ``sum(by_logp * logp + by_entropy * entropy)``."""
    _, pull = jax.vjp(lambda p: all_lines(p, ids), params)
    return pull((by_logp, by_entropy))[0]


def aggregated(name, mask, horizon):
    lengths = mask.sum(1, keepdims=True)
    sequences = (lengths > 0).sum()
    if name == "token_mean":
        return mask / mask.sum()
    if name == "seq_mean_token_mean":
        return mask / np.maximum(lengths, 1) / sequences
    return mask / sequences / (horizon if name == "seq_mean_token_sum_norm" else 1)


def corrected(name, rho_log, mask, low, high):
    """Weight ``[N, T]`` of the rollout correction."""
    rho = np.exp(rho_log)
    total = (rho_log * mask).sum(1, keepdims=True)
    mean = np.exp(total / np.maximum(mask.sum(1, keepdims=True), 1))
    return {
        "none": np.ones(mask.shape),
        "token_tis": np.minimum(rho, high),
        "sequence_tis": np.minimum(np.exp(total), high) * np.ones(mask.shape),
        "token_mask": np.where((rho >= low) & (rho <= high), rho, 0.0),
        "geometric_mask": ((mean >= low) & (mean <= high)) * np.ones(mask.shape),
    }[name]


def objective(name, cur, old, adv, mask, conf):
    """Loss of every token and its derivative by ``cur``."""
    log_ratio = (cur - old) * mask
    if name == "gspo":
        mean = (log_ratio.sum(1) / np.maximum(mask.sum(1), 1))[:, None]
        log_ratio = mean * np.ones(mask.shape)
    ratio = np.exp(log_ratio)
    if name == "cispo":
        weight = np.minimum(ratio, 1 + conf.eps_high)
        return -weight * adv * cur, -weight * adv
    low, high = 1 - conf.eps_low, 1 + conf.eps_high
    value = np.minimum(ratio * adv, np.clip(ratio, low, high) * adv)
    slope = np.where(ratio * adv <= np.clip(ratio, low, high) * adv, ratio * adv, 0.0)
    if conf.dual_clip is not None:
        bound = conf.dual_clip * adv
        slope = np.where((adv < 0) & (bound > value), 0.0, slope)
        value = np.where(adv < 0, np.maximum(value, bound), value)
    return -value, -slope


def kl_term(name, cur, ref, old):
    d = ref - cur
    if name == "k2":
        return d**2 / 2, -d
    k3, weight = np.exp(d) - d - 1, np.exp(cur - old)
    return weight * k3, weight * (k3 + 1 - np.exp(d))


def oracle(params, batch, conf, horizon, old_params, ref_params):
    """Loss and gradient of the whole batch for an ``AlgorithmConf``."""
    ids, mask, sampler, adv = batch.arrays()
    cur, entropy = (np.asarray(x, np.float64) for x in all_lines(params, ids))
    ref = np.asarray(all_lines(ref_params, ids)[0], np.float64)
    old = sampler
    if conf.old_logprobs == "trainer":
        single = conf.epochs * conf.minibatches == 1
        old = cur if single else np.asarray(all_lines(old_params, ids)[0], np.float64)
    weight = aggregated(conf.aggregation, mask, horizon)
    loss, slope = objective(conf.objective, cur, old, adv, mask, conf)
    factor = corrected(
        conf.correction, (old - sampler) * mask, mask, conf.correction_low, conf.correction_high
    )
    total, by_logp = factor * loss, factor * slope
    if conf.kl_coef:
        value, by_cur = kl_term(conf.kl_loss, cur, ref, old)
        total, by_logp = total + conf.kl_coef * value, by_logp + conf.kl_coef * by_cur
    total = total - conf.entropy_coef * entropy
    by_logp = np.where(mask, weight * by_logp, 0.0)
    by_entropy = -conf.entropy_coef * weight
    gradient = pulled_back(params, ids, jnp.float32(by_logp), jnp.float32(by_entropy))
    return float(np.where(mask, weight * total, 0.0).sum()), gradient
