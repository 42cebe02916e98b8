"""Prefix trees: sequences of token ids merged wherever they begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class PrefixTree(NamedTuple):
    """Sequences merged by common prefix, nodes in depth-first order.

    Args:
        tokens, positions, subtree_end: int32 ``[nodes]``; the descendants of node s are the nodes
            ``s + 1 .. subtree_end[s] - 1``.
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


def chains(sequences: Sequence[list[int]]) -> PrefixTree:
    """The forest in which no two sequences share a node.

    >>> forest = chains([[5, 6], [5]])
    >>> forest.tokens.tolist(), forest.positions.tolist(), forest.subtree_end.tolist()
    ([5, 6, 5], [0, 1, 0], [2, 2, 3])
    """
    lengths = [len(sequence) for sequence in sequences]
    ends = np.cumsum(lengths)
    paths = [np.arange(end - n, end, dtype=np.int32) for end, n in zip(ends, lengths, strict=True)]
    tokens = np.array([token for sequence in sequences for token in sequence], np.int32)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    return PrefixTree(tokens, positions, np.repeat(ends, lengths).astype(np.int32), paths)
