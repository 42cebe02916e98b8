"""Packing: the samples of several groups as prefix trees, so that no token is computed twice.

A row of the packed batch holds whole groups. All their sequences (prompt + completion) are merged
into a forest of prefix trees laid out in depth-first order: a prompt is there once for its S
samples, few-shot examples once for all groups of the row, and equal beginnings of completions
once. A token may attend to its ancestors and itself, and its position is its depth, so every
sequence sees exactly what it would see alone.

The mask needs one integer a token. In depth-first order the descendants of node s are the nodes
``s .. end[s] - 1``; hence query t may attend to key s iff ``s <= t < end[s]``. Padding has
``end = 0``: nobody attends to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from evojax.evidence.types import Completion
from evojax.grpo.advantages import GroupAdvantages

_MIN_TOKENS = 32
_MIN_SLOTS = 16
Array = Any  # numpy on the host, jax.Array inside jit


class PackedRows(NamedTuple):
    """Arrays of one batch: M rows of T tree nodes, K head slots, N response tokens.

    Args:
        tokens, positions: int32 ``[M, T]``; position = depth in the tree.
        subtree_end: int32 ``[M, T]``, one past the last descendant; 0 for padding.
        head: int32 ``[M, K]``, nodes whose next-token distribution is wanted.
        slot: int32 ``[M, N]``, which head slot predicts the response token.
        target: int32 ``[M, N]``, the sampled token.
        logp_rollout: float32 ``[M, N]``, nats under the sampling distribution.
        advantages: float32 ``[M, N]``.
        response_mask: bool ``[M, N]``, False for padding.
        rows: int32 ``[]``, rows in use; those after it are empty and never computed.
        token_count: float32 ``[]``, the divisor of the loss (see ``pack``).
    """

    tokens: Array
    positions: Array
    subtree_end: Array
    head: Array
    slot: Array
    target: Array
    logp_rollout: Array
    advantages: Array
    response_mask: Array
    rows: Array
    token_count: Array


@dataclass(frozen=True)
class Packed:
    """A packed batch and what packing did to it.

    Args:
        rows: the arrays.
        owner: int32 ``[M, N, 3]``: group, sample and token index of every response token.
        stats: for the log: ``groups_packed``, ``tokens_sequences`` (prompt and response tokens of
            the packed samples), ``tokens_packed`` (nodes), ``tokens_padded`` (nodes and padding).
    """

    rows: PackedRows
    owner: np.ndarray
    stats: dict[str, float]


class PrefixTree(NamedTuple):
    """Sequences merged by common prefix, nodes in depth-first order.

    Args:
        tokens, positions, subtree_end: int32 ``[nodes]``; see ``PackedRows``.
        paths: for each sequence its nodes from the root on.
    """

    tokens: np.ndarray
    positions: np.ndarray
    subtree_end: np.ndarray
    paths: list[np.ndarray]


def prefix_tree(sequences: Sequence[list[int]]) -> PrefixTree:
    """Merge sequences of token ids into a forest.

    Sorted sequences visit the forest depth first, so each one only adds what follows its common
    prefix with the one before.

    >>> tree = prefix_tree([[5, 6, 7], [5, 6, 8], [9]])
    >>> tree.tokens.tolist(), tree.subtree_end.tolist()
    ([5, 6, 7, 8, 9], [4, 4, 3, 4, 5])
    >>> [path.tolist() for path in tree.paths]
    [[0, 1, 2], [0, 1, 3], [4]]
    """
    tokens: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    paths: list[np.ndarray] = [np.zeros(0, np.int32)] * len(sequences)
    stack: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda i: sequences[i]):
        sequence = sequences[index]
        shared = 0
        while shared < min(len(stack), len(sequence)):
            if tokens[stack[shared]] != sequence[shared]:
                break
            shared += 1
        for node in stack[shared:]:
            ends[node] = len(tokens)
        del stack[shared:]
        for depth in range(shared, len(sequence)):
            stack.append(len(tokens))
            tokens.append(sequence[depth])
            positions.append(depth)
            ends.append(0)
        paths[index] = np.array(stack, np.int32)
    for node in stack:
        ends[node] = len(tokens)
    return PrefixTree(
        np.array(tokens, np.int32), np.array(positions, np.int32), np.array(ends, np.int32), paths
    )


def bucket(size: int, minimum: int, parts: int) -> int:
    """Smallest bucket that holds ``size``: ``parts`` equal steps in every doubling.

    >>> [bucket(n, 32, 4) for n in (1, 32, 33, 41, 129, 160, 200)]
    [32, 32, 40, 48, 160, 160, 224]
    """
    if size <= minimum:
        return minimum
    below = 1 << ((size - 1).bit_length() - 1)
    step = max(below // parts, 1)
    return -(-size // step) * step


class _Row(NamedTuple):
    tree: PrefixTree
    head: np.ndarray
    slot: np.ndarray
    target: np.ndarray
    logp: np.ndarray
    advantages: np.ndarray
    owner: np.ndarray


def _build_row(
    groups: Sequence[int],
    prompts: Sequence[np.ndarray],
    completions: Sequence[Sequence[Completion]],
    advantages: GroupAdvantages,
) -> _Row:
    """One row: the weighted samples of ``groups``; the last token of each is only a target."""
    members = [
        (g, s)
        for g in groups
        for s, completion in enumerate(completions[g])
        if advantages.weight[g, s] and len(completion.token_ids)
    ]
    samples = [completions[g][s] for g, s in members]
    tree = prefix_tree(
        [
            [*prompts[g].tolist(), *sample.token_ids[:-1].tolist()]
            for (g, _), sample in zip(members, samples, strict=True)
        ]
    )
    nodes = [path[len(prompts[g]) - 1 :] for (g, _), path in zip(members, tree.paths, strict=True)]
    head, slot = np.unique(np.concatenate(nodes), return_inverse=True)
    return _Row(
        tree=tree,
        head=head,
        slot=slot,
        target=np.concatenate([sample.token_ids for sample in samples]),
        logp=np.concatenate([sample.logprobs for sample in samples]),
        advantages=np.concatenate(
            [np.full(len(n), advantages.advantages[m]) for n, m in zip(nodes, members, strict=True)]
        ),
        owner=np.concatenate(
            [[(*m, t) for t in range(len(n))] for n, m in zip(nodes, members, strict=True)]
        ),
    )


def _check(
    prompts: Sequence[np.ndarray],
    completions: Sequence[Sequence[Completion]],
    advantages: GroupAdvantages,
) -> None:
    groups, samples = advantages.weight.shape
    if len(prompts) != groups or [len(c) for c in completions] != [samples] * groups:
        raise ValueError(
            f"advantages are for {groups} groups of {samples}, got {len(prompts)} prompts and "
            f"groups of {[len(c) for c in completions]}"
        )
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt without tokens cannot predict its completion")
    if any(len(c.token_ids) != len(c.logprobs) for group in completions for c in group):
        raise ValueError("a completion has not one logprob for each token")


def pack(
    prompts: Sequence[np.ndarray],
    completions: Sequence[Sequence[Completion]],
    advantages: GroupAdvantages,
    micro_batch_groups: int,
) -> Packed | None:
    """Pack a batch of rollouts for the update.

    Only live groups are packed: a dead group has advantage 0 throughout, so its tokens add exactly
    nothing to the gradient and computing them would be waste. They *are* in ``token_count``, the
    number of response tokens of all members with weight: so the gradient is that of the whole
    batch, and a step with few live groups is not silently scaled up.

    Args:
        prompts: G prompts, int ``[p_g]``, at least one token each.
        completions: G lists of S completions. advantages: of the same shape.
        micro_batch_groups: groups that share a row; one row is one micro-batch.

    Returns:
        The batch, or None when no group is live.

    Raises:
        ValueError: shapes that do not fit together.
    """
    _check(prompts, completions, advantages)
    lengths = np.array([[len(c.token_ids) for c in group] for group in completions])
    token_count = int(lengths[advantages.weight].sum())
    heavy = (advantages.weight & (lengths > 0)).any(axis=1)
    live = np.flatnonzero(advantages.live & heavy).tolist()
    if not live:
        return None
    live.sort(key=lambda g: tuple(prompts[g].tolist()))  # neighbours share their examples
    chunks = np.array_split(live, -(-len(live) // micro_batch_groups))
    rows = [_build_row(chunk.tolist(), prompts, completions, advantages) for chunk in chunks]
    capacity = bucket(-(-len(prompts) // micro_batch_groups), 1, 1)
    most = micro_batch_groups * advantages.weight.shape[1] * int(lengths.max())
    arrays, owner = _stack(rows, capacity, most, token_count)
    sequences = sum(len(path) for row in rows for path in row.tree.paths)
    nodes = sum(len(row.tree.tokens) for row in rows)
    stats = {
        "groups_packed": float(len(live)),
        "tokens_sequences": float(sequences),
        "tokens_packed": float(nodes),
        "tokens_padded": float(len(rows) * arrays.tokens.shape[1]),
    }
    return Packed(arrays, owner, stats)


def _stack(
    rows: Sequence[_Row], capacity: int, most: int, token_count: int
) -> tuple[PackedRows, np.ndarray]:
    """Rows as padded arrays; every size is rounded up to a bucket to bound recompilation."""
    nodes = bucket(max(len(row.tree.tokens) for row in rows), _MIN_TOKENS, 4)
    slots = bucket(max(len(row.head) for row in rows), _MIN_SLOTS, 2)
    wide = bucket(most, _MIN_SLOTS, 1)

    def padded(values: Sequence[np.ndarray], width: int, dtype: type) -> np.ndarray:
        out = np.zeros((capacity, width, *values[0].shape[1:]), dtype)
        for line, value in zip(out, values, strict=False):
            line[: len(value)] = value
        return out

    arrays = PackedRows(
        tokens=padded([row.tree.tokens for row in rows], nodes, np.int32),
        positions=padded([row.tree.positions for row in rows], nodes, np.int32),
        subtree_end=padded([row.tree.subtree_end for row in rows], nodes, np.int32),
        head=padded([row.head for row in rows], slots, np.int32),
        slot=padded([row.slot for row in rows], wide, np.int32),
        target=padded([row.target for row in rows], wide, np.int32),
        logp_rollout=padded([row.logp for row in rows], wide, np.float32),
        advantages=padded([row.advantages for row in rows], wide, np.float32),
        response_mask=padded([np.ones(len(row.slot), bool) for row in rows], wide, np.bool_),
        rows=np.array(len(rows), np.int32),
        token_count=np.array(token_count, np.float32),
    )
    return arrays, padded([row.owner for row in rows], wide, np.int32)
