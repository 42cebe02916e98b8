"""Aggregation: how the losses of tokens become the loss of a batch.

A scheme is the weight of one token of every sequence, already divided by the counts of the *whole*
batch. The loss is the plain sum of ``weight * token_loss``, so micro-batches, rows, padding and
devices cannot change it: they only add. (Averaging the means of unequal micro-batches does.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from evojax.registry import Registry

AggregationFn = Callable[[np.ndarray, int], np.ndarray]
"""``(lengths int64 [N], horizon) -> float64 [N]``; see ``token_weights``."""

AGGREGATIONS: Registry[AggregationFn] = Registry("aggregation")


def token_weights(name: str, lengths: np.ndarray | Sequence[int], horizon: int) -> np.ndarray:
    """Weight of one token of each sequence.

    Args:
        name: registered name (``algorithm.aggregation``).
        lengths: ``[N]``, response tokens of every weighted sequence of the whole batch, those of
            dead groups included. An empty sequence (0) has weight 0 and is not counted.
        horizon: tokens, the most a response may have; a constant of the run. Only
            ``seq_mean_token_sum_norm`` divides by it.

    Returns:
        float64 ``[N]``.

    Raises:
        InputError: no such aggregation.
        ValueError: lengths below 0 or not one-dimensional, or horizon below 1.

    >>> token_weights("token_mean", [3, 1], horizon=8).tolist()
    [0.25, 0.25]
    >>> token_weights("seq_mean_token_mean", [4, 1], horizon=8).tolist()
    [0.125, 0.5]
    """
    counts = np.asarray(lengths, dtype=np.int64)
    if counts.ndim != 1 or (counts < 0).any():
        raise ValueError(f"lengths must be [N] and at least 0, got {counts.tolist()}")
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1 token, got {horizon}")
    weights = AGGREGATIONS.get(name, "algorithm.aggregation")(counts, horizon)
    return np.where(counts > 0, weights, 0.0)


def _sequences(lengths: np.ndarray) -> int:
    return max(int((lengths > 0).sum()), 1)


@AGGREGATIONS.register("token_mean")
def token_mean(lengths: np.ndarray, horizon: int) -> np.ndarray:
    """``sum_it l_it / sum_i L_i``: every token of the batch weighs the same (DAPO, 2503.14476)."""
    return np.full(lengths.shape, 1.0 / max(int(lengths.sum()), 1))


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(lengths: np.ndarray, horizon: int) -> np.ndarray:
    """``mean_i (sum_t l_it / L_i)``: every sequence weighs the same (GRPO, 2402.03300)."""
    return 1.0 / (_sequences(lengths) * np.maximum(lengths, 1))


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(lengths: np.ndarray, horizon: int) -> np.ndarray:
    """``mean_i sum_t l_it``: the policy gradient of whole sequences, unscaled."""
    return np.full(lengths.shape, 1.0 / _sequences(lengths))


@AGGREGATIONS.register("seq_mean_token_sum_norm")
def seq_mean_token_sum_norm(lengths: np.ndarray, horizon: int) -> np.ndarray:
    """``mean_i sum_t l_it / H`` with H a constant of the run (Dr.GRPO, 2503.20783)."""
    return np.full(lengths.shape, 1.0 / (_sequences(lengths) * horizon))
