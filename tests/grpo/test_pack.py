from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_grpo import TINY, completion, packed_of, random_batch, sharp_params
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.evidence.types import Completion
from evojax.grpo.aggregation import AGGREGATIONS
from evojax.grpo.logprobs import score
from evojax.grpo.pack import bucket, carry_scores
from evojax.grpo.tree import prefix_tree
from evojax.grpo.tree_attention import tree_mask
from evojax.policy.decoder import hidden_states, lm_logits

sequences_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8
)


@settings(deadline=None)
@given(sequences_strategy)
def test_every_sequence_reads_back_from_its_path_and_sees_only_itself(sequences):
    tree = prefix_tree(sequences)
    mask = np.asarray(tree_mask(jnp.asarray(tree.subtree_end)[None]))[0]
    prefixes = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
    assert len(tree.tokens) == len(prefixes), "equal prefixes are stored once"
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == sequence
        assert tree.positions[path].tolist() == list(range(len(sequence)))
        for depth, node in enumerate(path):
            assert np.flatnonzero(mask[node]).tolist() == path[: depth + 1].tolist()


@given(st.integers(1, 10_000), st.sampled_from([1, 2, 4]))
def test_buckets_hold_the_size_and_are_few(size, parts):
    assert bucket(size, 16, parts) >= size
    ladder = {bucket(n, 16, parts) for n in range(1, 1025)}
    assert len(ladder) <= 1 + 6 * parts


def test_small_batch_by_hand():
    prompts = [np.array([7, 8]), np.array([7, 9])]
    completions = [
        [completion([1, 2, 3]), completion([1, 4])],
        [completion([5]), completion([6, 6])],
    ]
    packed = packed_of(prompts, completions, [[1, 0], [0, 1]])
    assert packed is not None
    rows = packed.rows
    # 7 -> 8 -> 1 -> 2 and 7 -> 9 -> 6; the last token of a sample is only a target
    assert rows.tokens[0, 0, :6].tolist() == [7, 8, 1, 2, 9, 6]
    assert rows.positions[0, 0, :6].tolist() == [0, 1, 2, 3, 1, 2]
    assert rows.shared_end[0, 0, :7].tolist() == [6, 4, 4, 4, 6, 6, 0]
    assert rows.tail.size == rows.parent.size == 0  # a small row is kept whole
    assert rows.head[0, 0, :5].tolist() == [1, 2, 3, 4, 5]
    assert packed.owner[0, 0].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert rows.target.shape == (1, 1, 4, 8) and rows.rows == 1
    assert rows.target[0, 0, :, :3].tolist() == [[1, 2, 3], [1, 4, 0], [5, 0, 0], [6, 6, 0]]
    assert rows.slot[0, 0, :, :3].tolist() == [[0, 1, 2], [0, 1, 0], [3, 0, 0], [3, 4, 0]]
    assert rows.response_mask.sum(-1).tolist() == [[[3, 2, 1, 2]]]
    np.testing.assert_allclose(rows.weight[rows.response_mask], 1 / 8)
    assert (rows.weight[~rows.response_mask] == 0).all()
    assert (rows.logp_old == rows.logp_rollout).all() and (rows.logp_ref == 0).all()
    assert packed.stats["tokens_sequences"] == 4 + 3 + 2 + 3
    assert packed.stats["tokens_packed"] == 6


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 8] * 4),
        ("seq_mean_token_mean", [1 / 12, 1 / 8, 1 / 4, 1 / 8]),
        ("seq_mean_token_sum", [1 / 4] * 4),
        ("seq_mean_token_sum_norm", [1 / 4 / 8] * 4),
    ],
)
def test_weights_by_hand(aggregation, expected):
    completions = [
        [completion([1, 2, 3]), completion([1, 4])],
        [completion([5]), completion([6, 6])],
    ]
    prompts = [np.array([7]), np.array([8])]
    packed = packed_of(prompts, completions, [[1, 0], [0, 1]], 1, aggregation=aggregation)
    assert packed is not None and packed.rows.rows == 2
    found = packed.rows.weight[packed.rows.response_mask].tolist()
    assert found == pytest.approx(np.repeat(expected, [3, 2, 1, 2]).tolist())


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_dead_groups_are_not_packed_but_stay_in_the_denominators(aggregation):
    prompts, completions, rewards = random_batch(0)
    packed = packed_of(prompts, completions, rewards, aggregation=aggregation)
    everything = packed_of(
        prompts, completions, rewards, aggregation=aggregation, include_dead=True
    )
    assert packed is not None and everything is not None
    assert packed.stats["groups_packed"] == 3 and everything.stats["groups_packed"] == 4
    assert 1 not in packed.owner[..., 0] and 1 in everything.owner[..., 0]

    def by_owner(found):
        places = np.argwhere(found.owner[..., 0] >= 0)
        return {tuple(found.owner[*at]): found.rows.weight[*at, 0] for at in places}

    left, right = by_owner(packed), by_owner(everything)
    assert left == {owner: right[owner] for owner in left}
    if aggregation == "token_mean":
        total = sum(len(c.token_ids) for g in completions for c in g)
        assert set(right.values()) == {np.float32(1 / total)}


def test_unscorable_members_are_neither_packed_nor_counted():
    prompts, completions, rewards = random_batch(0)
    rewards[0, 1] = np.nan
    rewards[0, 2] = 0
    packed = packed_of(prompts, completions, rewards)
    assert packed is not None
    owners = {tuple(o) for o in packed.owner.reshape(-1, 2).tolist()}
    assert (0, 1) not in owners and (0, 0) in owners
    everything = sum(len(c.token_ids) for g in completions for c in g)
    counted = everything - len(completions[0][1].token_ids)
    np.testing.assert_allclose(packed.rows.weight[packed.rows.response_mask], 1 / counted)


def test_a_minibatch_has_its_own_denominators_and_keeps_the_batch_s_numbers():
    prompts, completions, rewards = random_batch(0)
    packed = packed_of(prompts, completions, rewards, groups=[3, 1])
    assert packed is not None
    assert set(packed.owner[..., 0].ravel().tolist()) == {-1, 3}
    count = sum(len(c.token_ids) for g in (1, 3) for c in completions[g])
    np.testing.assert_allclose(packed.rows.weight[packed.rows.response_mask], 1 / count)
    assert packed_of(prompts, completions, rewards, groups=[1]) is None


def test_scores_travel_from_the_batch_to_its_minibatches():
    prompts, completions, rewards = random_batch(0, groups=5)
    full = packed_of(prompts, completions, rewards, 3)
    part = packed_of(prompts, completions, rewards, 1, groups=[4, 0, 2])
    assert full is not None and part is not None
    code = full.owner[..., :1] * 100 + full.owner[..., 1:] * 10 + np.arange(8)
    rows = full.rows._replace(logp_old=-code.astype(np.float32), logp_ref=code.astype(np.float32))
    carried = carry_scores(type(full)(rows, full.owner, full.stats), part).rows
    expected = part.owner[..., :1] * 100 + part.owner[..., 1:] * 10 + np.arange(8)
    valid = part.rows.response_mask
    np.testing.assert_array_equal(carried.logp_old[valid], -expected[valid])
    np.testing.assert_array_equal(carried.logp_ref[valid], expected[valid])


def test_no_live_group_gives_none():
    prompts, completions, rewards = random_batch(0)
    assert packed_of(prompts, completions, rewards * 0) is None
    assert packed_of(prompts, completions, rewards * 0, include_dead=True) is not None
    assert packed_of(prompts, completions, rewards * np.nan, include_dead=True) is None


def test_a_completion_without_tokens_is_harmless():
    packed = packed_of([np.array([3])], [[completion([]), completion([4])]], [[0, 1]], 1)
    assert packed is not None and packed.rows.response_mask.sum() == 1


def test_inputs_that_do_not_fit_are_refused():
    prompts, completions, rewards = random_batch(0)
    with pytest.raises(ValueError, match="prompts"):
        packed_of(prompts[:-1], completions, rewards)
    with pytest.raises(ValueError, match="without tokens"):
        packed_of([prompts[0][:0], *prompts[1:]], completions, rewards)
    completions[0][0] = completion([1, 2], [-1.0])
    with pytest.raises(ValueError, match="one logprob"):
        packed_of(prompts, completions, rewards)


def test_case_G09_the_mask_comes_from_lengths_and_not_from_token_ids():
    """pad == eos == 2: the first 2 was sampled and is trained, what would pad it is not there."""
    done = Completion(np.array([5, 6, 2]), np.zeros(3), np.zeros(3), "stop", "v0")
    cut = Completion(np.array([5, 6, 7, 8, 9]), np.zeros(5), np.zeros(5), "length", "v0")
    packed = packed_of([np.array([1, 2])], [[done, cut]], [[1, 0]], 1)
    assert packed is not None
    assert packed.rows.response_mask[0, 0, :, :5].astype(int).tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert packed.rows.target[0, 0, :, :5].tolist() == [[5, 6, 2, 0, 0], [5, 6, 7, 8, 9]]


@jax.jit
def causal_logprobs(params, ids, temperature):
    """The plain form: one sequence alone, a causal mask, logits[t - 1] score token t."""
    length = ids.shape[0]
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    hidden = hidden_states(params, TINY, ids[None], jnp.arange(length)[None], mask)
    logits = lm_logits(params, TINY, hidden)[0] / temperature
    logp = logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
    return logp[jnp.arange(length - 1), ids[1:]]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_case_G10_packed_scores_equal_the_sequence_alone(temperature):
    params = sharp_params()
    prompts, completions, rewards = random_batch(3)
    packed = packed_of(prompts, completions, rewards, 3)
    assert packed is not None
    scores = np.asarray(score(params, TINY, packed.rows, temperature))
    seen = 0
    for at in np.argwhere(packed.owner[..., 0] >= 0):
        g, s = packed.owner[*at]
        ids = np.concatenate([prompts[g], completions[g][s].token_ids])
        alone = causal_logprobs(params, ids, temperature)[len(prompts[g]) - 1 :]
        np.testing.assert_allclose(scores[*at, : len(alone)], alone, rtol=1e-5, atol=1e-5)
        assert (scores[*at, len(alone) :] == 0).all()
        seen += len(alone)
    assert seen == packed.rows.response_mask.sum() > 10


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 100), st.sampled_from([1, 2, 4]))
def test_all_live_members_are_packed_once_whatever_the_rows(seed, per_row):
    prompts, completions, rewards = random_batch(seed)
    packed = packed_of(prompts, completions, rewards, per_row)
    assert packed is not None
    owners = [tuple(o) for o in packed.owner.reshape(-1, 2).tolist() if o[0] >= 0]
    assert sorted(owners) == [(g, s) for g in (0, 2, 3) for s in range(3)]
    for at in np.argwhere(packed.owner[..., 0] >= 0):
        g, s = packed.owner[*at]
        assert packed.rows.response_mask[*at].sum() == len(completions[g][s].token_ids)


@pytest.mark.parametrize("shards", [2, 4])
def test_rows_side_by_side_hold_the_same_sequences(shards):
    prompts, completions, rewards = random_batch(0, groups=6)
    alone = packed_of(prompts, completions, rewards, 2)
    packed = packed_of(prompts, completions, rewards, 2, shards=shards)
    assert alone is not None and packed is not None
    assert packed.rows.tokens.shape[:2] == (packed.rows.rows, shards)
    filled = np.any(packed.owner[: packed.rows.rows, ..., 0] >= 0, axis=-1)
    assert filled.sum() == 4, "five live groups, spread over all shards"

    def by_owner(found):
        places = np.argwhere(found.owner[..., 0] >= 0)
        return {
            tuple(found.owner[*at]): (found.rows.target[*at].tolist(), found.rows.weight[*at].sum())
            for at in places
        }

    assert by_owner(alone) == by_owner(packed)
    params = sharp_params()
    scores = [np.asarray(score(params, TINY, p.rows, 0.7)) for p in (alone, packed)]
    for found, values in zip((alone, packed), scores, strict=True):
        assert values.shape == found.rows.slot.shape
    left, right = (
        {tuple(p.owner[*at]): s[*at] for at in np.argwhere(p.owner[..., 0] >= 0)}
        for p, s in zip((alone, packed), scores, strict=True)
    )
    for owner, values in left.items():
        np.testing.assert_allclose(values, right[owner], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shards", [1, 2])
def test_without_sharing_every_sequence_is_a_tail_of_its_own(shards):
    prompts, completions, rewards = random_batch(3, groups=5)
    shared = packed_of(prompts, completions, rewards, 3)
    packed = packed_of(prompts, completions, rewards, 3, shards=shards, share=False)
    assert shared is not None and packed is not None
    rows = packed.rows
    assert rows.shared_end.shape[-1] == 0 and (rows.parent == -1)[: rows.rows].any()
    assert packed.stats["tokens_packed"] == packed.stats["tokens_sequences"]
    for m, a in np.ndindex(int(rows.rows), shards):
        numbers = rows.tail[m, a]
        owners = packed.owner[m, a][packed.owner[m, a, :, 0] >= 0]
        assert set(numbers.ravel().tolist()) - {0} == set(range(1, len(owners) + 1))
        for number, (g, s) in enumerate(owners, start=1):
            places = np.flatnonzero(numbers.ravel() == number)
            text = [*prompts[g], *completions[g][s].token_ids[:-1]]
            assert rows.tokens[m, a, places].tolist() == text
            assert (np.diff(places) == 1).all() and len(
                {p // numbers.shape[1] for p in places}
            ) == 1
    params = sharp_params()
    scores = [np.asarray(score(params, TINY, p.rows, 0.7)) for p in (shared, packed)]
    left, right = (
        {tuple(p.owner[*at]): s[*at] for at in np.argwhere(p.owner[..., 0] >= 0)}
        for p, s in zip((shared, packed), scores, strict=True)
    )
    assert left.keys() == right.keys()
    for owner, values in left.items():
        np.testing.assert_allclose(values, right[owner], rtol=1e-5, atol=1e-5)
