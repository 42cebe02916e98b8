"""The jitted programs of the embedded engine: prefill of shared prefixes, and generation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from evojax.policy.cache import PromptCache, decode_step, own_cache, prefill
from evojax.policy.decoder import ModelConfig, Params, lm_logits
from evojax.rollout.sampling import Draw, draw, stream_keys


class Request(NamedTuple):
    """One batch of prompts; shapes are the bucket, P prompts times n samples are its rows.

    Args:
        tokens: int32 ``[P, S]``, what follows each prefix, padded on the right.
        lengths: int32 ``[P]``, at least 1.
        live: bool ``[P]``, False for rows that only fill the bucket.
        words: uint32 ``[P, 2]``, seeds. samples: int32 ``[n]``, sample indices.
        temperature: scalar. stop: bool ``[V]``, True at ids that end a completion.
        limit: scalar int32, tokens per completion at most.
    """

    tokens: Any
    lengths: Any
    live: Any
    words: Any
    samples: Any
    temperature: Any
    stop: Any
    limit: Any


class Sampled(NamedTuple):
    """Tokens ``[P, n, N]`` int32, logprobs and entropies (nats), counts int32 ``[P, n]``."""

    tokens: jax.Array
    logprobs: jax.Array
    entropies: jax.Array
    counts: jax.Array


class _State(NamedTuple):
    index: jax.Array
    sampled: Sampled
    alive: jax.Array
    own: Any


def _empty(prompts: int, samples: int, budget: int, pad_id: int) -> Sampled:
    shape = (prompts, samples, budget)
    counts = jnp.zeros((prompts, samples), jnp.int32)
    return Sampled(jnp.full(shape, pad_id, jnp.int32), jnp.zeros(shape), jnp.zeros(shape), counts)


def _record(state: _State, drawn: Draw, own: Any, stop: jax.Array) -> _State:
    """Write one token of every row that is still alive; the other rows keep their padding."""

    def put(buffer: jax.Array, value: jax.Array) -> jax.Array:
        old = jax.lax.dynamic_index_in_dim(buffer, state.index, 2, keepdims=False)
        new = jnp.where(state.alive, value, old)
        return jax.lax.dynamic_update_index_in_dim(buffer, new, state.index, 2)

    old = state.sampled
    sampled = Sampled(
        put(old.tokens, drawn.token),
        put(old.logprobs, drawn.logprob),
        put(old.entropies, drawn.entropy),
        old.counts + state.alive,
    )
    return _State(state.index + 1, sampled, state.alive & ~stop[drawn.token], own)


def prefix_cache(
    params: Params, cfg: ModelConfig, tokens: jax.Array, lengths: jax.Array
) -> PromptCache:
    """What prefixes ``[U, C]``, with ``lengths`` tokens each (0 allowed), leave in the cache."""
    return prefill(params, cfg, tokens, lengths)[1]


def sample_completions(
    params: Params,
    cfg: ModelConfig,
    budget: int,
    pad_id: int,
    past: PromptCache | None,
    request: Request,
) -> Sampled:
    """Sample until every row has stopped or reached the limit.

    Args:
        params: from ``unstack``. cfg: shape of the model.
        budget: N, size of the buffers, at least ``request.limit``. pad_id: fills unused places.
        past: cache of each prompt's prefix, or None when ``request.tokens`` are whole prompts.
        request: the batch.
    """
    hidden, prompt = prefill(params, cfg, request.tokens, request.lengths, past)
    prompts, samples = request.tokens.shape[0], request.samples.shape[0]
    keys = stream_keys(request.words, request.samples).reshape(-1)

    def pick(hidden: jax.Array, index: jax.Array) -> Draw:
        logits = lm_logits(params, cfg, hidden)
        logits = jnp.broadcast_to(logits, (prompts, samples, cfg.vocab_size))
        drawn = draw(logits.reshape(prompts * samples, -1), keys, index, request.temperature)
        return jax.tree.map(lambda a: a.reshape(prompts, samples), drawn)

    def more(state: _State) -> jax.Array:
        return (state.index < request.limit) & jnp.any(state.alive)

    def step(state: _State) -> _State:
        last = state.index - 1
        tokens = jax.lax.dynamic_index_in_dim(state.sampled.tokens, last, 2, keepdims=False)
        hidden, own = decode_step(params, cfg, tokens, last, prompt, state.own)
        return _record(state, pick(hidden, state.index), own, request.stop)

    start = _State(
        jnp.int32(0),
        _empty(prompts, samples, budget, pad_id),
        jnp.broadcast_to(request.live[:, None], (prompts, samples)),
        own_cache(cfg, prompt, samples, budget),
    )
    first = _record(start, pick(hidden[:, None], start.index), start.own, request.stop)
    return jax.lax.while_loop(more, step, first).sampled
