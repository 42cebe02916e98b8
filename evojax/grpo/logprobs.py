"""Log-probabilities of packed response tokens, under the distribution they were sampled from."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from evojax.grpo.pack import PackedRows
from evojax.policy.decoder import ModelConfig, Params, hidden_states, lm_logits

# Head positions scored at once: 256 x 49152 float32 logits are 50 MB.
_CHUNK = 256


def tree_mask(subtree_end: jax.Array) -> jax.Array:
    """Who may attend to whom in a packed row: ``s <= t < subtree_end[s]``.

    Args:
        subtree_end: int32 ``[T]``, see ``evojax.grpo.pack``.

    Returns:
        bool ``[T, T]``, query t by key s.

    >>> tree_mask(jnp.array([3, 2, 3, 0])).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    """
    index = jnp.arange(subtree_end.shape[0])
    return (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])


def row_logprobs(
    params: Params,
    cfg: ModelConfig,
    row: PackedRows,
    temperature: jax.Array,
    remat: bool,
    entropy_grad: bool,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy at every response token of one packed row.

    Logits are divided by the sampling temperature first, as the sampler does. The head runs on
    the gathered nodes only, in chunks that are recomputed in the backward pass.

    Args:
        row: one row of a batch, without the leading M.
        temperature: of the sampler, > 0.
        remat: recompute layers in the backward pass.
        entropy_grad: the entropy is differentiated too; otherwise it costs no backward pass.

    Returns:
        ``logp [B, T]`` and ``entropy [B, T]``, nats; what they hold off the mask means nothing.
    """
    mask = tree_mask(row.subtree_end)
    hidden = hidden_states(
        params, cfg, row.tokens[None], row.positions[None], mask[None], remat=remat
    )[0][row.head]
    slots = hidden.shape[0]
    chunks = -(-slots // _CHUNK)
    width = -(-slots // chunks)
    hidden = jnp.pad(hidden, ((0, chunks * width - slots), (0, 0)))

    def one_chunk(
        carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        vectors, start = part
        logits = lm_logits(params, cfg, vectors) / temperature
        log_norm = jax.nn.logsumexp(logits, axis=-1)
        fixed, fixed_norm = (logits, log_norm)
        if not entropy_grad:
            fixed, fixed_norm = jax.lax.stop_gradient((logits, log_norm))
        mean_logit = jnp.sum(jnp.exp(fixed - fixed_norm[:, None]) * fixed, axis=-1)
        here = (row.slot >= start) & (row.slot < start + width)
        local = jnp.where(here, row.slot - start, 0)
        logp = logits[local, row.target] - log_norm[local]
        entropy = (fixed_norm - mean_logit)[local]
        found = jnp.where(here, logp, 0.0), jnp.where(here, entropy, 0.0)
        return (carry[0] + found[0], carry[1] + found[1]), None

    zero = jnp.zeros(row.slot.shape, jnp.float32)
    parts = hidden.reshape(chunks, width, -1), jnp.arange(chunks) * width
    if chunks == 1:
        (logp, entropy), _ = one_chunk((zero, zero), (parts[0][0], parts[1][0]))
    else:
        (logp, entropy), _ = jax.lax.scan(jax.checkpoint(one_chunk), (zero, zero), parts)
    return logp, entropy


def row_at(rows: PackedRows, index: jax.Array) -> PackedRows:
    """Row ``index`` of a batch (the scalar stays as it is)."""
    return PackedRows(*(x[index] if jnp.ndim(x) else x for x in rows))


@partial(jax.jit, static_argnames=("cfg",))
def score(
    params: Params, cfg: ModelConfig, rows: PackedRows, temperature: float | jax.Array
) -> jax.Array:
    """Log-probabilities ``[M, B, T]`` of the packed response tokens, nats, 0 off the mask.

    Under the policy of the ratio, under the KL reference, or for parity with the sampler: they
    must equal ``rows.logp_rollout`` before any update.
    """
    scale = jnp.asarray(temperature, jnp.float32)

    def one_row(index: jax.Array, scores: jax.Array) -> jax.Array:
        row = row_at(rows, index)
        logp, _ = row_logprobs(params, cfg, row, scale, False, False)
        return scores.at[index].set(jnp.where(row.response_mask, logp, 0.0))

    nothing = jnp.zeros(rows.slot.shape, jnp.float32)
    return jax.lax.fori_loop(0, rows.rows, one_row, nothing)
