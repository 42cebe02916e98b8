"""Log-probabilities of packed response tokens, under the distribution they were sampled from."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from evojax.grpo.pack import PackedRows
from evojax.grpo.token_scores import pick, token_scores
from evojax.grpo.tree_attention import tree_attend
from evojax.policy.decoder import ModelConfig, Params, run_layers
from evojax.policy.hybrid import over_lines
from evojax.policy.sharding import replicated


def row_logprobs(
    params: Params,
    cfg: ModelConfig,
    row: PackedRows,
    temperature: jax.Array,
    entropy_grad: bool,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy at every response token of one micro-batch.

    Logits are divided by the sampling temperature first, as the sampler does. The head runs on
    the gathered nodes only.

    Args:
        row: one micro-batch, without the leading M; of a hybrid packed with ``share=False``.
        temperature: of the sampler, > 0.
        entropy_grad: the entropy is differentiated too; otherwise it costs no backward pass.

    Returns:
        ``logp [A, B, T]`` and ``entropy [A, B, T]``, nats; what they hold off the mask means
        nothing.
    """
    attend = tree_attend(row.shared_end, row.parent, row.tail, cfg.num_kv_heads, cfg.compute_dtype)
    recur = over_lines(cfg, row.shared_end.shape[1], row.tail) if cfg.linear else None
    hidden = run_layers(params, cfg, row.tokens, row.positions, attend, recur)
    hidden = pick(hidden, row.head)
    return token_scores(params, cfg, hidden, row.slot, row.target, temperature, entropy_grad)


def row_at(rows: PackedRows, index: jax.Array) -> PackedRows:
    """Micro-batch ``index`` of a batch (the scalar stays as it is)."""
    return PackedRows(*(x[index] if jnp.ndim(x) else x for x in rows))


@partial(jax.jit, static_argnames=("cfg",))
def score(
    params: Params, cfg: ModelConfig, rows: PackedRows, temperature: float | jax.Array
) -> jax.Array:
    """Log-probabilities ``[M, A, B, T]`` of the packed response tokens, nats, 0 off the mask.

    Under the policy of the ratio, under the KL reference, or for parity with the sampler: they
    must equal ``rows.logp_rollout`` before any update.
    """
    scale = jnp.asarray(temperature, jnp.float32)

    def one(index: jax.Array, scores: jax.Array) -> jax.Array:
        row = row_at(rows, index)
        logp, _ = row_logprobs(params, cfg, row, scale, False)
        return scores.at[index].set(jnp.where(row.response_mask, logp, 0.0))

    nothing = jnp.zeros(rows.slot.shape, jnp.float32)
    return replicated(jax.lax.fori_loop(0, rows.rows, one, nothing))
