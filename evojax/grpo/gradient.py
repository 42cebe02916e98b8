"""Loss and gradient of a packed batch: micro-batches, whose sums are only added.

``loss = sum of weight * (correction * objective + kl_coef * kl - entropy_coef * entropy)`` over
all response tokens; ``weight`` holds the aggregation and the denominators of the whole batch, so
rows, micro-batches and devices add up to the same gradient however they are cut.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from evojax.grpo.correction import CORRECTIONS, Corrected, mismatch
from evojax.grpo.kl import KL_LOSSES, k1, k3
from evojax.grpo.logprobs import row_at, row_logprobs
from evojax.grpo.objectives import OBJECTIVES
from evojax.grpo.objectives.base import Bounds, TokenLoss, masked_sum
from evojax.grpo.optimizer import Hyper
from evojax.grpo.pack import PackedRows
from evojax.grpo.spec import UpdateSpec
from evojax.policy.decoder import ModelConfig, Params
from evojax.policy.lora import joined
from evojax.policy.sharding import laid_out

Sums = dict[str, jax.Array]

SUMS = ("loss", "tokens", "entropy", "ratio", "clip_high", "clip_low", "clip_dual")
SUMS += ("correction_kept", "correction_truncated", "kl_k1", "kl_k3")
SUMS += ("mismatch_k1", "mismatch_k3", "is_weight", "is_weight_square")
MAXIMA = ("ratio_max", "mismatch_max")


class _Scores(NamedTuple):
    """Log-probabilities ``[A*B, T]`` under the three policies, and the entropy."""

    cur: jax.Array
    old: jax.Array
    anchor: jax.Array  # the trainer's, to be compared with the sampler's
    entropy: jax.Array


def _lined_up(row: PackedRows) -> PackedRows:
    """A micro-batch with what the loss reads as ``[A*B, T]``, no longer ``[A, B, T]``."""
    names = ("logp_rollout", "logp_ref", "advantages", "response_mask", "weight")
    return row._replace(**{name: _lines(getattr(row, name)) for name in names})


def _lines(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _scores(
    params: Params, cfg: ModelConfig, spec: UpdateSpec, hyper: Hyper, row: PackedRows
) -> _Scores:
    cur, entropy = row_logprobs(params, cfg, row, hyper["temperature"], entropy_grad=spec.entropy)
    cur, entropy, given = _lines(cur), _lines(entropy), _lines(row.logp_old)
    fixed = jax.lax.stop_gradient(cur)
    old = fixed if spec.reuse_logp else given
    return _Scores(cur, old, given if spec.scores_old else fixed, entropy)


def _row_sums(
    row: PackedRows, scores: _Scores, token: TokenLoss, corrected: Corrected, loss: jax.Array
) -> Sums:
    """What the metrics are made of: sums over the tokens, and two maxima."""
    valid = row.response_mask
    drift = mismatch(row.logp_rollout, scores.anchor, valid)
    of_tokens = {
        "entropy": scores.entropy,
        "ratio": token.ratio,
        "clip_high": token.clip_high,
        "clip_low": token.clip_low,
        "clip_dual": token.clip_dual,
        "correction_kept": corrected.kept,
        "correction_truncated": corrected.truncated,
        "kl_k1": k1(scores.cur, row.logp_ref, valid),
        "kl_k3": k3(scores.cur, row.logp_ref, valid),
    }
    return {
        **{name: masked_sum(value, valid)[0] for name, value in of_tokens.items()},
        "loss": loss,
        "tokens": jnp.sum(valid.astype(jnp.float32)),
        "mismatch_k1": drift.k1[0],
        "mismatch_k3": drift.k3[0],
        "is_weight": drift.ess[0],
        "is_weight_square": drift.ess[1],
        "ratio_max": jnp.max(jnp.where(valid, token.ratio, 0.0)),
        "mismatch_max": drift.max_abs,
    }


def row_loss(
    params: Params, cfg: ModelConfig, spec: UpdateSpec, hyper: Hyper, row: PackedRows
) -> tuple[jax.Array, Sums]:
    """One micro-batch's part of the batch's loss, and the sums behind the metrics.

    Args:
        row: without the leading M. hyper: traced scalars, see ``hyper_of``.
    """
    scores = _scores(params, cfg, spec, hyper, row)
    row = _lined_up(row)
    valid = row.response_mask
    bounds = Bounds(hyper["eps_low"], hyper["eps_high"], hyper["dual_clip"] if spec.dual else None)
    objective = OBJECTIVES.get(spec.objective, "algorithm.objective")
    token = objective(scores.cur, scores.old, row.advantages, valid, bounds)
    correct = CORRECTIONS.get(spec.correction, "algorithm.correction")
    corrected = correct(
        scores.old, row.logp_rollout, valid, hyper["correction_low"], hyper["correction_high"]
    )
    total = corrected.weight * token.loss
    if spec.kl_loss is not None:
        kl_loss = KL_LOSSES.get(spec.kl_loss, "algorithm.kl_loss")
        total = total + hyper["kl_coef"] * kl_loss(scores.cur, row.logp_ref, scores.old, valid)
    if spec.entropy:
        total = total - hyper["entropy_coef"] * jnp.where(valid, scores.entropy, 0.0)
    loss = masked_sum(row.weight * total, valid)[0]
    return loss, jax.lax.stop_gradient(_row_sums(row, scores, token, corrected, loss))


def batch_gradient(
    params: Params,
    cfg: ModelConfig,
    spec: UpdateSpec,
    hyper: Hyper,
    rows: PackedRows,
    frozen: Params | None = None,
) -> tuple[Params, Sums]:
    """Gradient of the batch's loss and the summed metrics.

    The loop over micro-batches has a *traced* number of turns: what was not packed costs nothing,
    and batches of any number of live groups share one compilation.

    Args:
        params: what is trained: every weight, or adapters.
        frozen: the weights that the adapters change; None where every weight is trained.

    Returns:
        Gradient, shaped like ``params``, and ``SUMS`` (added) with ``MAXIMA`` (the larger one).
        On a mesh they are those of all devices, which hold the A rows of a micro-batch between
        them.
    """

    def loss(trained: Params, row: PackedRows) -> tuple[jax.Array, Sums]:
        weights = joined(trained, frozen, spec.lora_scale)
        return row_loss(weights, cfg, spec, hyper, row)

    def add_row(index: jax.Array, carry: tuple[Params, Sums]) -> tuple[Params, Sums]:
        total, sums = carry
        gradient, new = jax.grad(loss, has_aux=True)(params, row_at(rows, index))
        merged = {name: sums[name] + new[name] for name in SUMS}
        merged |= {name: jnp.maximum(sums[name], new[name]) for name in MAXIMA}
        return laid_out(jax.tree.map(jnp.add, total, gradient)), merged

    zeros = laid_out(jax.tree.map(jnp.zeros_like, params))
    nothing = {name: jnp.zeros((), jnp.float32) for name in (*SUMS, *MAXIMA)}
    return jax.lax.fori_loop(0, rows.rows, add_row, (zeros, nothing))
