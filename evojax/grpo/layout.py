"""Where the nodes of a row's prefix tree lie: shared nodes first, then private tails in lines.

A node that two sequences pass through is *shared*. What a sequence does not share is its *tail*:
a chain that hangs from one shared node (its parent) or from none. A tail token sees the shared
nodes that its parent sees, and its own chain so far. So the attention of a row with ``C`` shared
nodes, ``U`` lines and ``W`` places a line costs ``C^2 + U W (C + W)`` scores a head, not
``(C + U W)^2``. Short tails share a line, first fit, longest first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from evojax.grpo.tree import PrefixTree

_DENSE = 384  # a row of at most so many nodes is kept whole: less to lay out, nothing to gain


class Split(NamedTuple):
    """A tree in two parts.

    Args:
        shared: int ``[C]``, nodes in depth-first order.
        tails: node chains, one each. parents: index into ``shared``, -1 for none.
    """

    shared: np.ndarray
    tails: list[np.ndarray]
    parents: list[int]


class Sizes(NamedTuple):
    """Bucketed sizes that all rows of a batch have: shared nodes, lines, places a line."""

    shared: int
    lines: int
    width: int


class Placed(NamedTuple):
    """One row laid out; N = shared + lines * width places.

    Args:
        tokens, positions: int32 ``[N]``.
        shared_end: int32 ``[shared]``, end of each subtree within the shared nodes; 0 = padding.
        parent: int32 ``[lines * width]``, shared parent of the tail in each place; -1 for none.
        tail: int32 ``[lines, width]``, number of the tail in each place; 0 = padding.
        place: int ``[nodes]``, where each node of the tree went.
    """

    tokens: np.ndarray
    positions: np.ndarray
    shared_end: np.ndarray
    parent: np.ndarray
    tail: np.ndarray
    place: np.ndarray


def split(tree: PrefixTree, dense: bool) -> Split:
    """Cut a tree into shared nodes and tails; ``dense`` calls every node shared.

    >>> from evojax.grpo.tree import prefix_tree
    >>> shared, tails, parents = split(prefix_tree([[5, 6, 7], [5, 6, 8]]), dense=False)
    >>> shared.tolist(), [t.tolist() for t in tails], parents
    ([0, 1], [[2], [3]], [1, 1])
    """
    through = np.zeros(len(tree.tokens), int)
    for path in tree.paths:
        through[path] += 1
    is_shared = through > 1 if not dense else np.ones(len(through), bool)
    shared = np.flatnonzero(is_shared)
    index = np.cumsum(is_shared) - 1
    tails, parents = [], []
    for path in tree.paths:
        own = path[~is_shared[path]]
        if len(own):
            above = path[is_shared[path]]
            tails.append(own)
            parents.append(int(index[above[-1]]) if len(above) else -1)
    return Split(shared, tails, parents)


def first_fit(lengths: list[int], width: int) -> list[tuple[int, int]]:
    """Line and first place of each length, longest first into the first line with room.

    >>> first_fit([2, 4, 3, 1], 5)
    [(1, 3), (0, 0), (1, 0), (0, 4)]
    """
    places = [(0, 0)] * len(lengths)
    filled: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        line = next((n for n, used in enumerate(filled) if used + lengths[i] <= width), len(filled))
        if line == len(filled):
            filled.append(0)
        places[i] = (line, filled[line])
        filled[line] += lengths[i]
    return places


def is_dense(trees: list[PrefixTree]) -> bool:
    """Whether every row of the batch is small enough to be kept whole."""
    return max(len(tree.tokens) for tree in trees) <= _DENSE


def lay_out(tree: PrefixTree, parts: Split, sizes: Sizes) -> Placed:
    """Put a split tree into the places of a row.

    Args:
        sizes: room for all of it: at least ``len(parts.shared)`` shared nodes, and the lines that
            ``first_fit`` needs at this width.
    """
    total = sizes.shared + sizes.lines * sizes.width
    tokens, positions = np.zeros(total, np.int32), np.zeros(total, np.int32)
    shared_end = np.zeros(sizes.shared, np.int32)
    parent = np.full(sizes.lines * sizes.width, -1, np.int32)
    tail = np.zeros(sizes.lines * sizes.width, np.int32)
    place = np.zeros(len(tree.tokens), int)

    count = len(parts.shared)
    place[parts.shared] = np.arange(count)
    shared_end[:count] = np.searchsorted(parts.shared, tree.subtree_end[parts.shared])
    where = first_fit([len(t) for t in parts.tails], sizes.width)
    for number, (nodes, above, (line, first)) in enumerate(
        zip(parts.tails, parts.parents, where, strict=True), start=1
    ):
        begin = line * sizes.width + first
        here = slice(begin, begin + len(nodes))
        parent[here], tail[here] = above, number
        place[nodes] = sizes.shared + np.arange(begin, begin + len(nodes))
    tokens[place], positions[place] = tree.tokens, tree.positions
    tail = tail.reshape(sizes.lines, sizes.width)
    return Placed(tokens, positions, shared_end, parent, tail, place)
