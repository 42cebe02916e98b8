"""Decoding with a key-value cache: one prefill per prompt, shared by all of its samples.

Layers are unrolled here (a tuple of per-layer weights), for slicing stacked weights inside the
decode loop would copy them at every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from evojax.policy.decoder import (
    MASKED,
    ModelConfig,
    Params,
    attention,
    block,
    embed,
    rms_norm,
    rope_tables,
)

KV = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptCache:
    """Keys and values of P prompts.

    Args:
        kv: for each layer keys ``[P, K, d, S]`` and values ``[P, K, S, d]``, laid out for the
            products of the decode step.
        valid: bool ``[P, S]``, True at tokens of the prompt.
        lengths: int32 ``[P]``, tokens of each prompt.
    """

    kv: tuple[KV, ...]
    valid: jax.Array
    lengths: jax.Array


def unstack(params: Params, cfg: ModelConfig) -> Params:
    """A copy of ``params`` with ``layers`` as a tuple of per-layer dictionaries.

    Always fresh buffers, so the caller may donate ``params`` to an update later.
    """
    layers = [
        {name: jnp.copy(stacked[i]) for name, stacked in params["layers"].items()}
        for i in range(cfg.num_layers)
    ]
    rest = {name: jnp.copy(value) for name, value in params.items() if name != "layers"}
    return rest | {"layers": tuple(layers)}


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
    x = embed(params, tokens)
    caches = []
    for i, layer in enumerate(params["layers"]):
        before = None if past is None else past.kv[i]

        attend = partial(_attend_after, before, mask)
        x, kv = block(layer, cfg, x, rope, attend)
        caches.append(kv)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    hidden = rms_norm(last, params["final_norm"], cfg.rms_eps)
    return hidden, PromptCache(tuple(caches), valid, start + lengths)


def _attend_after(
    before: KV | None, mask: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, KV]:
    """Attention of whole rows over what was cached before them and themselves."""
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    if before is not None:
        keys = jnp.concatenate([before[0], keys], axis=3)
        values = jnp.concatenate([before[1], values], axis=2)
    mixed = attention(q, keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3), mask)
    return mixed, (keys, values)


def empty_cache(cfg: ModelConfig, prompts: int, samples: int, budget: int) -> tuple[KV, ...]:
    """Room for the sampled tokens of every layer: two ``[P, n, budget, K, d]`` of zeros."""
    shape = (prompts, samples, budget, cfg.num_kv_heads, cfg.head_dim)
    return tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(cfg.num_layers))


def decode_step(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    index: jax.Array,
    prompt: PromptCache,
    own: tuple[KV, ...],
) -> tuple[jax.Array, tuple[KV, ...]]:
    """Run one sampled token of every sample.

    Args:
        params: from ``unstack``. cfg: shape of the model.
        tokens: int32 ``[P, n]``, the tokens sampled last.
        index: scalar int32, how many tokens each sample had before these.
        prompt: from ``prefill``. own: from ``empty_cache`` or the step before.

    Returns:
        Final hidden states ``[P, n, D]`` and the new ``own``.
    """
    prompts, samples = tokens.shape
    rows = prompts * samples
    positions = jnp.broadcast_to((prompt.lengths + index)[:, None], tokens.shape)
    rope = rope_tables(cfg, positions.reshape(rows, 1))
    x = embed(params, tokens.reshape(rows, 1))
    updated = []
    for layer, shared, mine in zip(params["layers"], prompt.kv, own, strict=True):
        attend = partial(_attend_sampled, shared, prompt.valid, mine, index)
        x, grown = block(layer, cfg, x, rope, attend)
        updated.append(grown)
    hidden = rms_norm(x[:, 0], params["final_norm"], cfg.rms_eps)
    return hidden.reshape(prompts, samples, -1), tuple(updated)


def _attend_sampled(
    shared: KV,
    valid: jax.Array,
    own: KV,
    index: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, KV]:
    """Attention of one new token per sample over its prompt (read once) and its own tokens.

    Args:
        shared, valid: of the prompt cache.
        own: ``[P, n, N, K, d]``, filled below ``index``; returned with ``k`` and ``v`` added.
        q: ``[P*n, 1, H, d]``. k, v: ``[P*n, 1, K, d]``.
    """
    prompts, samples, budget, kv, dim = own[0].shape
    heads = q.shape[2]
    place, at = (prompts, samples, 1, kv, dim), (0, 0, index, 0, 0)
    own_keys = jax.lax.dynamic_update_slice(own[0], k.reshape(place), at)
    own_values = jax.lax.dynamic_update_slice(own[1], v.reshape(place), at)
    keys, values = shared
    q = q.reshape(prompts, samples, kv, heads // kv, dim) * dim**-0.5
    over_prompt = jnp.einsum("pnkgd,pkds->pnkgs", q, keys)
    over_prompt = jnp.where(valid[:, None, None, None, :], over_prompt, MASKED)
    over_own = jnp.einsum("pnkgd,pnmkd->pnkgm", q, own_keys)
    filled = (jnp.arange(budget) <= index)[None, None, None, None]
    over_own = jnp.where(filled, over_own, MASKED)
    weights = jax.nn.softmax(jnp.concatenate([over_prompt, over_own], axis=-1), axis=-1)
    at_prompt, at_own = jnp.split(weights, [keys.shape[-1]], axis=-1)
    mixed = jnp.einsum("pnkgs,pksd->pnkgd", at_prompt, values)
    mixed = mixed + jnp.einsum("pnkgm,pnmkd->pnkgd", at_own, own_values)
    return mixed.reshape(prompts * samples, 1, heads, dim), (own_keys, own_values)
