"""Where the nodes of a row lie, and that attention over both parts is attention over the tree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_grpo import TINY, random_batch, sharp_params
from hypothesis import given
from hypothesis import strategies as st

from evojax.config import AlgorithmConf
from evojax.grpo import layout
from evojax.grpo.advantages import RewardTable, estimate
from evojax.grpo.gradient import batch_gradient
from evojax.grpo.layout import Sizes, first_fit, lay_out, split
from evojax.grpo.pack import pack
from evojax.grpo.tree import prefix_tree
from evojax.grpo.tree_attention import tail_mask, tree_mask
from evojax.grpo.update import Updater

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)
gradient_of = jax.jit(batch_gradient, static_argnames=("cfg", "spec"))


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(9, 20))
def test_first_fit_never_overlaps_nor_overflows(lengths, width):
    taken = set()
    for length, (line, first) in zip(lengths, first_fit(lengths, width), strict=True):
        places = {(line, first + i) for i in range(length)}
        assert first + length <= width and not places & taken
        taken |= places
    lines = {line for line, _ in taken}
    assert lines == set(range(len(lines)))


@given(st.lists(tokens, min_size=1, max_size=6), st.booleans())
def test_every_node_sees_its_ancestors_and_nothing_else(sequences, dense):
    tree = prefix_tree(sequences)
    parts = split(tree, dense)
    width = 7
    lines = max((line for line, _ in first_fit([len(t) for t in parts.tails], width)), default=-1)
    sizes = Sizes(len(parts.shared) + 2, lines + 2, width)
    placed = lay_out(tree, parts, sizes)
    among_shared = np.asarray(tree_mask(jnp.asarray(placed.shared_end)[None]))[0]
    among_tail = np.asarray(tail_mask(jnp.asarray(placed.tail)))
    count, total = sizes.shared, sizes.shared + sizes.lines * width

    sees = np.zeros((total, total), bool)
    sees[:count, :count] = among_shared
    for line in range(sizes.lines):
        begin = count + line * width
        sees[begin : begin + width, begin : begin + width] = among_tail[line]
    for place, parent in enumerate(placed.parent):
        if parent >= 0:
            sees[count + place, :count] = among_shared[parent]

    expected = np.zeros((total, total), bool)
    for path in tree.paths:
        at = placed.place[path]
        for depth, node in enumerate(at):
            expected[node, at[: depth + 1]] = True
        assert placed.tokens[at].tolist() == tree.tokens[path].tolist()
        assert placed.positions[at].tolist() == list(range(len(path)))
    used = np.zeros(total, bool)
    used[placed.place] = True
    np.testing.assert_array_equal(sees[used], expected[used])
    assert len(set(placed.place.tolist())) == len(tree.tokens)


def packed_of(seed, per_row):
    prompts, completions, rewards = random_batch(seed, longest=6)
    advantages = estimate("grpo", RewardTable(rewards, 1e-6))
    return pack(prompts, completions, advantages, per_row, aggregation="token_mean", horizon=6)


@pytest.mark.parametrize(("seed", "per_row"), [(0, 2), (1, 4), (2, 1)])
def test_the_two_layouts_have_one_gradient(monkeypatch, seed, per_row):
    trainer = Updater(TINY, AlgorithmConf(entropy_coef=0.1), 0.7)
    whole = packed_of(seed, per_row)
    monkeypatch.setattr(layout, "_DENSE", 0)
    cut = packed_of(seed, per_row)
    assert whole is not None and cut is not None
    assert whole.rows.tail.size == 0 and cut.rows.tail.size > 0
    assert (cut.rows.tail > 0).sum() + (cut.rows.shared_end > 0).sum() == whole.stats[
        "tokens_packed"
    ]
    found = [
        gradient_of(sharp_params(), TINY, trainer.spec, trainer.hyper, packed.rows)
        for packed in (whole, cut)
    ]
    for name, value in found[0][1].items():
        np.testing.assert_allclose(value, found[1][1][name], rtol=2e-5, atol=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(found[0][0]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * largest),
        found[0][0],
        found[1][0],
    )
