"""Packing: the samples of several groups as prefix trees, so that no token is computed twice.

A row of the packed batch holds whole groups; the rows of a micro-batch lie side by side, one a
shard of the batch. All sequences of a row (prompt + completion) are merged into a forest of prefix
trees laid out in depth-first order: a prompt is there once for its S samples, few-shot examples
once for all groups of the row, and equal beginnings of completions once. A token may attend to its
ancestors and itself, and its position is its depth, so every sequence sees exactly what it would
see alone. ``evojax.grpo.layout`` says where the nodes lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from evojax.evidence.types import Completion
from evojax.grpo.advantages import GroupAdvantages
from evojax.grpo.aggregation import token_weights
from evojax.grpo.layout import Sizes, Split, first_fit, is_dense, lay_out, split
from evojax.grpo.tree import PrefixTree, chains, prefix_tree

# Small rows come in few sizes: there a compilation costs more than padding ever will.
_MIN_TOKENS = 64
_MIN_SLOTS = 64
_MIN_WIDTH = 32
_SMALL = 256
_MIN_RESPONSE = 8
Array = Any  # numpy on the host, jax.Array inside jit


class PackedRows(NamedTuple):
    """Arrays of one batch: M micro-batches of A rows.

    Micro-batches are computed one after the other, the rows of one together: A is the number of
    shards of the batch. A row has N nodes, C shared ones and U lines of W places, N = C + U W; K
    head slots; and B sequences of T tokens each.

    Everything that is scored lies one sequence a line, so objectives work on ``[B, T]`` and a
    mask; lines without a sequence have a mask that is False throughout.

    Args:
        tokens, positions: int32 ``[M, A, N]``; position = depth in the tree.
        shared_end: int32 ``[M, A, C]``. parent: int32 ``[M, A, U * W]``.
            tail: int32 ``[M, A, U, W]``: what the attention needs, see
            ``evojax.grpo.layout.Placed``.
        head: int32 ``[M, A, K]``, nodes whose next-token distribution is wanted.
        slot: int32 ``[M, A, B, T]``, which head slot predicts the response token.
        target: int32 ``[M, A, B, T]``, the sampled token.
        logp_rollout: float32 ``[M, A, B, T]``, nats under the sampling distribution.
        logp_old: float32 ``[M, A, B, T]``, nats under the policy that the ratio is against.
        logp_ref: float32 ``[M, A, B, T]``, nats under the KL reference; 0 until it is scored.
        advantages: float32 ``[M, A, B, T]``.
        response_mask: bool ``[M, A, B, T]``, False for padding.
        weight: float32 ``[M, A, B, T]``, of the token in the loss: the aggregation's weight with
            the denominators of the whole batch in it; 0 off the mask. Rows, micro-batches and
            devices only add.
        rows: int32 ``[]``, micro-batches in use; those after it are empty and never computed.
    """

    tokens: Array
    positions: Array
    shared_end: Array
    parent: Array
    tail: Array
    head: Array
    slot: Array
    target: Array
    logp_rollout: Array
    logp_old: Array
    logp_ref: Array
    advantages: Array
    response_mask: Array
    weight: Array
    rows: Array


@dataclass(frozen=True)
class Packed:
    """A packed batch and what packing did to it.

    Args:
        rows: the arrays.
        owner: int32 ``[M, A, B, 2]``: group and sample of every line, -1 for lines without one.
        stats: for the log: ``groups_packed``, ``tokens_sequences`` (prompt and response tokens of
            the packed samples), ``tokens_packed`` (nodes), ``tokens_padded`` (nodes and padding).
    """

    rows: PackedRows
    owner: np.ndarray
    stats: dict[str, float]


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


def _rounded(size: int, minimum: int) -> int:
    """A bucket of ``size``: two to a doubling while it is small, four from there on."""
    return bucket(size, minimum, 2 if size <= _SMALL else 4)


class _Row(NamedTuple):
    """One row: its tree, the head's nodes and, per sequence, its owner and head slots."""

    tree: PrefixTree
    head: np.ndarray
    slots: list[np.ndarray]
    members: list[tuple[int, int]]


def _build_row(
    groups: Sequence[int],
    prompts: Sequence[np.ndarray],
    completions: Sequence[Sequence[Completion]],
    weight: np.ndarray,
    share: bool,
) -> _Row:
    """One row: the weighted samples of ``groups``; the last token of each is only a target."""
    members = [
        (g, s)
        for g in groups
        for s, completion in enumerate(completions[g])
        if weight[g, s] and len(completion.token_ids)
    ]
    tree = (prefix_tree if share else chains)(
        [[*prompts[g].tolist(), *completions[g][s].token_ids[:-1].tolist()] for g, s in members]
    )
    nodes = [path[len(prompts[g]) - 1 :] for (g, _), path in zip(members, tree.paths, strict=True)]
    head, slot = np.unique(np.concatenate(nodes), return_inverse=True)
    slots = np.split(slot, np.cumsum([len(n) for n in nodes])[:-1])
    return _Row(tree, head, slots, members)


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
    *,
    aggregation: str,
    horizon: int,
    include_dead: bool = False,
    groups: Sequence[int] | None = None,
    shards: int = 1,
    share: bool = True,
) -> Packed | None:
    """Pack a batch of rollouts, or some of its groups, for one optimizer step.

    Only live groups are packed: a dead group has advantage 0 throughout, so its tokens add exactly
    nothing to the gradient and computing them would be waste. They *are* in the denominators of
    ``weight``: so the gradient is that of the whole batch, and a step with few live groups is not
    silently scaled up.

    Args:
        prompts: G prompts, int ``[p_g]``, at least one token each.
        completions: G lists of S completions. advantages: of the same shape.
        micro_batch_groups: groups that share a row, at most.
        aggregation: name in ``AGGREGATIONS``. horizon: its constant, most tokens of a response.
        include_dead: pack dead groups too: a KL or entropy term gives them a gradient.
        groups: the groups of this optimizer step (a minibatch), all by default; the denominators
            are theirs alone.
        shards: A, rows computed together; few groups are spread over all of them.
        share: merge equal beginnings. Otherwise every sequence is a tail of its own, as layers
            with a memory need it: those of a line follow one another, numbered in ``tail``.

    Returns:
        The batch, or None when no group carries a gradient.

    Raises:
        ValueError: shapes that do not fit together.
    """
    _check(prompts, completions, advantages)
    chosen = np.arange(len(prompts)) if groups is None else np.asarray(groups, dtype=int)
    lengths = np.array([[len(c.token_ids) for c in group] for group in completions])
    counted = np.zeros_like(advantages.weight)
    counted[chosen] = advantages.weight[chosen]
    heavy = (counted & (lengths > 0)).any(axis=1)
    wanted = heavy & (advantages.live | (advantages.dead & include_dead))
    order = sorted(  # neighbours share their examples
        np.flatnonzero(wanted).tolist(), key=lambda g: tuple(prompts[g].tolist())
    )
    if not order:
        return None
    together = micro_batch_groups * shards
    turns = -(-len(order) // together)
    chunks = np.array_split(order, min(turns * shards, len(order)))
    rows = [_build_row(chunk.tolist(), prompts, completions, counted, share) for chunk in chunks]
    weight = np.zeros(lengths.shape)
    weight[counted] = token_weights(aggregation, lengths[counted], horizon)
    lines = _Lines(
        completions, advantages.advantages, weight, micro_batch_groups * lengths.shape[1]
    )
    frame = bucket(-(-len(prompts) // together), 1, 1), shards
    width = bucket(int(lengths.max()), _MIN_RESPONSE, 1)
    arrays, owner = _stack(rows, frame, width, lines, share)
    nodes = sum(len(row.tree.tokens) for row in rows)
    stats = {
        "groups_packed": float(len(order)),
        "tokens_sequences": float(sum(len(path) for row in rows for path in row.tree.paths)),
        "tokens_packed": float(nodes),
        "tokens_padded": float(turns * arrays.tokens[0].size),
    }
    return Packed(arrays, owner, stats)


class _Lines(NamedTuple):
    """What the lines of a row are filled from: ``[G, S]`` tables, and how many lines a row has."""

    completions: Sequence[Sequence[Completion]]
    advantages: np.ndarray
    weight: np.ndarray
    per_row: int


def _sizes(parts: Sequence[Split], share: bool) -> Sizes:
    """Room for the largest row, each size rounded up to a bucket."""
    shared = _rounded(max(len(part.shared) for part in parts), _MIN_TOKENS) if share else 0
    longest = max((len(tail) for part in parts for tail in part.tails), default=0)
    if not longest:
        return Sizes(shared, 0, 0)
    width = bucket(longest, _MIN_WIDTH, 2)
    lines = [first_fit([len(tail) for tail in part.tails], width) for part in parts]
    most = max(max((line for line, _ in found), default=0) + 1 for found in lines)
    return Sizes(shared, bucket(most, 1, 4), width)


def _stack(
    rows: Sequence[_Row], frame: tuple[int, int], width: int, source: _Lines, share: bool
) -> tuple[PackedRows, np.ndarray]:
    """Rows as padded arrays ``[*frame, ...]``; sizes are buckets, to bound recompilation."""
    slots = _rounded(max(len(row.head) for row in rows), _MIN_SLOTS)
    trees = [row.tree for row in rows]
    dense = share and is_dense(trees)
    parts = [split(tree, dense) for tree in trees]
    sizes = _sizes(parts, share)
    placed = [lay_out(tree, part, sizes) for tree, part in zip(trees, parts, strict=True)]
    heads = [found.place[row.head] for found, row in zip(placed, rows, strict=True)]
    in_lines = sizes.lines * sizes.width

    def padded(values: Sequence[np.ndarray], size: int) -> np.ndarray:
        out = np.zeros((*frame, size), np.int32)
        for r, value in enumerate(values):
            out[*divmod(r, frame[1]), : len(value)] = value
        return out

    shape = (*frame, source.per_row, width)
    slot, target = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    logp, advantages = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    weight, mask = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    owner = np.full((*shape[:3], 2), -1, np.int32)
    for r, row in enumerate(rows):
        for b, (member, places) in enumerate(zip(row.members, row.slots, strict=True)):
            at = (*divmod(r, frame[1]), b)
            line = (*at, slice(len(places)))
            sample = source.completions[member[0]][member[1]]
            slot[line], target[line], logp[line] = places, sample.token_ids, sample.logprobs
            advantages[line], weight[line] = source.advantages[member], source.weight[member]
            mask[line] = True
            owner[at] = member
    arrays = PackedRows(
        tokens=padded([row.tokens for row in placed], len(placed[0].tokens)),
        positions=padded([row.positions for row in placed], len(placed[0].tokens)),
        shared_end=padded([row.shared_end for row in placed], sizes.shared),
        parent=padded([row.parent for row in placed], in_lines),
        tail=padded([row.tail.reshape(-1) for row in placed], in_lines).reshape(
            *frame, sizes.lines, sizes.width
        ),
        head=padded(heads, slots),
        slot=slot,
        target=target,
        logp_rollout=logp,
        logp_old=logp,
        logp_ref=np.zeros(shape, np.float32),
        advantages=advantages,
        response_mask=mask,
        weight=weight,
        rows=np.array(-(-len(rows) // frame[1]), np.int32),
    )
    return arrays, owner


def carry_scores(source: Packed, target: Packed) -> Packed:
    """``target`` with the ``logp_old`` and ``logp_ref`` that ``source`` holds for its sequences.

    Scores are made once a batch, at the weights that sampled; every minibatch of every epoch,
    packed in another order, takes them from here.

    Args:
        source: pack of the whole batch, scored. target: pack of some of the same groups.
    """
    lines = map(tuple, np.argwhere(source.owner[..., 0] >= 0))
    at = {tuple(source.owner[line]): line for line in lines}
    old, ref = np.asarray(source.rows.logp_old), np.asarray(source.rows.logp_ref)
    new_old, new_ref = np.zeros_like(target.rows.logp_old), np.zeros_like(target.rows.logp_ref)
    for line in map(tuple, np.argwhere(target.owner[..., 0] >= 0)):
        place = at[tuple(target.owner[line])]
        new_old[line], new_ref[line] = old[place], ref[place]
    rows = target.rows._replace(logp_old=new_old, logp_ref=new_ref)
    return Packed(rows, target.owner, target.stats)
