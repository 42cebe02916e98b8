"""Decoding with a cache: one prefill per prompt, shared by all of its samples.

Attention keeps the keys and values of every token; the samples read those of their prompt where
they lie. A hybrid's other layers keep a memory of constant size, which each sample goes on with in
a copy of its own.

Layers are unrolled here (a tuple of per-layer weights), for slicing stacked weights inside the
decode loop would copy them at every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from evojax.policy.attention import MASKED, attention, grouped, rms_norm, ungrouped
from evojax.policy.decoder import Params, block, embed, linear_block, rope_tables
from evojax.policy.hybrid import is_linear, over_rows, over_token
from evojax.policy.products import as_bits, from_bits, pair_dot
from evojax.policy.shape import ModelConfig

Kept = tuple[jax.Array, jax.Array]  # keys and values of a layer, or its memory


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptCache:
    """What P prompts leave behind.

    Args:
        layers: for each layer keys ``[P, K, d, S]`` and values ``[P, K, S, d]`` in the type of the
            model's products, laid out for those of the decode step; for one without attention
            its memory, see ``evojax.policy.hybrid.Memory``.
        valid: bool ``[P, S]``, True at tokens of the prompt.
        lengths: int32 ``[P]``, tokens of each prompt.
    """

    layers: tuple[Kept, ...]
    valid: jax.Array
    lengths: jax.Array


def unstack(params: Params, cfg: ModelConfig) -> Params:
    """A copy of ``params`` with ``layers`` as a tuple of dictionaries, one a layer, first to last.

    Matrices are rounded to the type of the model's products here, once. Always fresh buffers, so
    the caller may donate ``params`` to an update later.
    """

    def copied(weight: jax.Array) -> jax.Array:
        return jnp.array(weight, cfg.compute_dtype if weight.ndim > 1 else None, copy=True)

    every = cfg.linear.interval if cfg.linear else 1

    def layer(i: int) -> Params:
        full = i // every  # layers with attention before this one
        stack, at = ("linear_layers", i - full) if is_linear(cfg, i) else ("layers", full)
        return {name: copied(stacked[at]) for name, stacked in params[stack].items()}

    rest = {name: copied(value) for name, value in params.items() if not isinstance(value, dict)}
    return rest | {"layers": tuple(layer(i) for i in range(cfg.num_layers))}


def gather(prefixes: PromptCache, which: jax.Array) -> PromptCache:
    """The cache row of each prompt's prefix: rows ``which`` (int32 ``[P]``) of ``prefixes``."""
    return jax.tree.map(lambda a: a[which], prefixes)


def prefill(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    past: PromptCache | None = None,
) -> tuple[jax.Array, PromptCache]:
    """Run the prompts, or what follows a part that was run before.

    Args:
        params: from ``unstack``. cfg: shape of the model.
        tokens: int32 ``[P, S]``, padded on the right. lengths: int32 ``[P]``, tokens in each row;
            the hidden state of a row without tokens means nothing.
        past: cache of the tokens before these, one row per prompt.

    Returns:
        Final hidden state of each row's last token ``[P, D]``, and the cache of everything so far.
    """
    size = tokens.shape[1]
    offsets = jnp.arange(size)[None]
    start = jnp.zeros_like(lengths) if past is None else past.lengths
    rope = rope_tables(cfg, start[:, None] + offsets)
    valid = offsets < lengths[:, None]
    mask = jnp.tril(jnp.ones((1, size, size), bool)) & valid[:, None, :]
    if past is not None:
        seen = jnp.broadcast_to(past.valid[:, None], (*mask.shape[:2], past.valid.shape[1]))
        mask = jnp.concatenate([seen, mask], axis=-1)
        valid = jnp.concatenate([past.valid, valid], axis=-1)
    x = embed(params, cfg, tokens)
    segment = (offsets < lengths[:, None]).astype(jnp.int32)
    caches = []
    for i, layer in enumerate(params["layers"]):
        before = None if past is None else past.layers[i]
        if is_linear(cfg, i):
            x, kept = linear_block(layer, cfg, x, over_rows(cfg, segment, before))
        else:
            attend = partial(_attend_after, before, mask, cfg.compute_dtype)
            x, kept = block(layer, cfg, x, rope, attend)
        caches.append(kept)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    hidden = rms_norm(last, params["final_norm"], cfg.rms_eps)
    return hidden, PromptCache(tuple(caches), valid, start + lengths)


def _attend_after(
    before: Kept | None, mask: jax.Array, dtype: str, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, Kept]:
    """Attention of whole rows over what was cached before them and themselves."""
    keys = k.transpose(0, 2, 3, 1).astype(dtype)
    values = v.transpose(0, 2, 1, 3).astype(dtype)
    if before is not None:
        keys = jnp.concatenate([before[0], keys], axis=3)
        values = jnp.concatenate([before[1], values], axis=2)
    mixed = attention(q, keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3), mask, dtype)
    return mixed, (keys, values)


def own_cache(cfg: ModelConfig, prompt: PromptCache, samples: int, budget: int) -> tuple[Kept, ...]:
    """What each of n samples of every prompt begins with.

    Of attention, room for the sampled tokens: zeros ``[P*n, K, d, N]``, ``[P*n, K, N, d]``; the
    decode loop writes to them, so they hold ``as_bits``. Of other layers, the prompt's memory.

    Args:
        prompt: from ``prefill``. samples: n. budget: N, tokens.
    """
    rows, kv, dim = prompt.lengths.shape[0] * samples, cfg.num_kv_heads, cfg.head_dim
    keys = as_bits(jnp.zeros((rows, kv, dim, budget), cfg.compute_dtype))
    values = as_bits(jnp.zeros((rows, kv, budget, dim), cfg.compute_dtype))

    def copies(memory: Kept) -> Kept:
        return jnp.repeat(memory[0], samples, axis=0), jnp.repeat(memory[1], samples, axis=0)

    return tuple(
        copies(kept) if is_linear(cfg, i) else (keys, values)
        for i, kept in enumerate(prompt.layers)
    )


def decode_step(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    index: jax.Array,
    prompt: PromptCache,
    own: tuple[Kept, ...],
) -> tuple[jax.Array, tuple[Kept, ...]]:
    """Run one sampled token of every sample.

    Args:
        params: from ``unstack``. cfg: shape of the model.
        tokens: int32 ``[P, n]``, the tokens sampled last.
        index: scalar int32, how many tokens each sample had before these.
        prompt: from ``prefill``. own: from ``own_cache`` or the step before.

    Returns:
        Final hidden states ``[P, n, D]`` and the new ``own``.
    """
    prompts, samples = tokens.shape
    rows = prompts * samples
    positions = jnp.broadcast_to((prompt.lengths + index)[:, None], tokens.shape)
    rope = rope_tables(cfg, positions.reshape(rows, 1))
    x = embed(params, cfg, tokens.reshape(rows, 1))
    updated = []
    for i, layer in enumerate(params["layers"]):
        if is_linear(cfg, i):
            x, kept = linear_block(layer, cfg, x, over_token(cfg, own[i]))
        else:
            attend = partial(_attend_sampled, prompt.layers[i], prompt.valid, own[i], index)
            x, kept = block(layer, cfg, x, rope, attend)
        updated.append(kept)
    hidden = rms_norm(x[:, 0], params["final_norm"], cfg.rms_eps)
    return hidden.reshape(prompts, samples, -1), tuple(updated)


def _attend_sampled(
    shared: Kept,
    valid: jax.Array,
    own: Kept,
    index: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, Kept]:
    """Attention of one new token per sample over its prompt (read once) and its own tokens.

    Args:
        shared, valid: of the prompt cache.
        own: from ``own_cache``, filled below ``index``; returned with ``k`` and ``v`` added.
        q: ``[P*n, 1, H, d]``. k, v: ``[P*n, 1, K, d]``.
    """
    keys, values = own
    rows, kv, dim, budget = keys.shape
    prompts, samples = valid.shape[0], rows // valid.shape[0]
    heads = q.shape[2] // kv
    kind = shared[0].dtype
    new = as_bits(k.reshape(rows, kv, dim, 1).astype(kind))
    keys = jax.lax.dynamic_update_slice(keys, new, (0, 0, 0, index))
    new = as_bits(v.reshape(rows, kv, 1, dim).astype(kind))
    values = jax.lax.dynamic_update_slice(values, new, (0, 0, index, 0))

    def by_prompt(x: jax.Array) -> jax.Array:
        """``[P*n, K, G, c] -> [P, K, n*G, c]``: all samples of a prompt in one product."""
        x = x.reshape(prompts, samples, kv, heads, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(prompts, kv, samples * heads, -1)

    def by_sample(x: jax.Array) -> jax.Array:
        """The way back."""
        x = x.reshape(prompts, kv, samples, heads, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(rows, kv, heads, -1)

    q = (grouped(q, kv)[..., 0, :] * dim**-0.5).astype(kind)
    over_prompt = jnp.where(valid[:, None, None], pair_dot(by_prompt(q), shared[0], 3, 2), MASKED)
    filled = (jnp.arange(budget) <= index)[None, None, None]
    over_own = jnp.where(filled, pair_dot(q, from_bits(keys), 3, 2), MASKED)
    top = jnp.maximum(
        by_sample(jnp.max(over_prompt, axis=-1, keepdims=True)),
        jnp.max(over_own, axis=-1, keepdims=True),
    )
    at_prompt = jnp.exp(over_prompt - by_prompt(top))
    at_own = jnp.exp(over_own - top)
    total = by_sample(jnp.sum(at_prompt, axis=-1, keepdims=True))
    total = total + jnp.sum(at_own, axis=-1, keepdims=True)
    mixed = by_sample(pair_dot(at_prompt.astype(kind), shared[1], 3, 2))
    mixed = mixed + pair_dot(at_own.astype(kind), from_bits(values), 3, 2)
    return ungrouped((mixed / total)[..., None, :]), (keys, values)
