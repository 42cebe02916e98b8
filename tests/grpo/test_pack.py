from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_grpo import TINY, completion, random_batch, sharp_params
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.grpo.advantages import group_normalised
from evojax.grpo.logprobs import score, tree_mask
from evojax.grpo.pack import bucket, pack, prefix_tree
from evojax.policy.decoder import hidden_states, lm_logits

sequences_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8
)


def advantages_of(rewards):
    return group_normalised(rewards, tolerance=1e-6)


@settings(deadline=None)
@given(sequences_strategy)
def test_every_sequence_reads_back_from_its_path_and_sees_only_itself(sequences):
    tree = prefix_tree(sequences)
    mask = np.asarray(tree_mask(jnp.asarray(tree.subtree_end)))
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
    packed = pack(prompts, completions, advantages_of([[1, 0], [0, 1]]), micro_batch_groups=2)
    assert packed is not None
    rows = packed.rows
    # 7 -> 8 -> 1 -> 2 and 7 -> 9 -> 6; the last token of a sample is only a target
    assert rows.tokens[0, :6].tolist() == [7, 8, 1, 2, 9, 6]
    assert rows.positions[0, :6].tolist() == [0, 1, 2, 3, 1, 2]
    assert rows.subtree_end[0, :7].tolist() == [6, 4, 4, 4, 6, 6, 0]
    assert rows.head[0, :5].tolist() == [1, 2, 3, 4, 5]
    assert rows.target[0, :8].tolist() == [1, 2, 3, 1, 4, 5, 6, 6]
    assert rows.slot[0, :8].tolist() == [0, 1, 2, 0, 1, 3, 3, 4]
    assert rows.response_mask.sum() == 8 and rows.token_count == 8 and rows.rows == 1
    assert packed.owner[0, :8].tolist() == [
        [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1],
    ]  # fmt: skip
    assert packed.stats["tokens_sequences"] == 4 + 3 + 2 + 3
    assert packed.stats["tokens_packed"] == 6


def test_dead_groups_are_not_packed_but_counted():
    prompts, completions, rewards = random_batch(0)
    packed = pack(prompts, completions, advantages_of(rewards), 2)
    assert packed is not None
    assert 1 not in packed.owner[..., 0][packed.rows.response_mask]
    assert packed.rows.token_count == sum(len(c.token_ids) for g in completions for c in g)


def test_unscorable_members_are_neither_packed_nor_counted():
    prompts, completions, rewards = random_batch(0)
    rewards[0, 1] = np.nan
    rewards[0, 2] = 0
    packed = pack(prompts, completions, advantages_of(rewards), 2)
    assert packed is not None
    owners = {tuple(o[:2]) for o in packed.owner[packed.rows.response_mask].tolist()}
    assert (0, 1) not in owners and (0, 0) in owners
    everything = sum(len(c.token_ids) for g in completions for c in g)
    assert packed.rows.token_count == everything - len(completions[0][1].token_ids)


def test_no_live_group_gives_none():
    prompts, completions, rewards = random_batch(0)
    assert pack(prompts, completions, advantages_of(rewards * 0), 2) is None


def test_a_completion_without_tokens_is_harmless():
    packed = pack([np.array([3])], [[completion([]), completion([4])]], advantages_of([[0, 1]]), 1)
    assert packed is not None and packed.rows.response_mask.sum() == 1


def test_inputs_that_do_not_fit_are_refused():
    prompts, completions, rewards = random_batch(0)
    with pytest.raises(ValueError, match="prompts"):
        pack(prompts[:-1], completions, advantages_of(rewards), 2)
    with pytest.raises(ValueError, match="without tokens"):
        pack([prompts[0][:0], *prompts[1:]], completions, advantages_of(rewards), 2)
    completions[0][0] = completion([1, 2], [-1.0])
    with pytest.raises(ValueError, match="one logprob"):
        pack(prompts, completions, advantages_of(rewards), 2)


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
    packed = pack(prompts, completions, advantages_of(rewards), 3)
    assert packed is not None
    scores = np.asarray(score(params, TINY, packed.rows, temperature))
    valid = packed.rows.response_mask
    packed_scores = {
        tuple(owner): value
        for owner, value in zip(packed.owner[valid].tolist(), scores[valid], strict=True)
    }
    seen = 0
    for g, s in sorted({owner[:2] for owner in packed_scores}):
        ids = np.concatenate([prompts[g], completions[g][s].token_ids])
        alone = causal_logprobs(params, ids, temperature)[len(prompts[g]) - 1 :]
        together = [packed_scores[g, s, t] for t in range(len(alone))]
        np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)
        seen += len(alone)
    assert seen == valid.sum() > 10


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 100), st.sampled_from([1, 2, 4]))
def test_all_live_members_are_packed_once_whatever_the_rows(seed, per_row):
    prompts, completions, rewards = random_batch(seed)
    advantages = advantages_of(rewards)
    packed = pack(prompts, completions, advantages, per_row)
    assert packed is not None
    owners = [tuple(o) for o in packed.owner[packed.rows.response_mask].tolist()]
    expected = [
        (g, s, t)
        for g in np.flatnonzero(advantages.live).tolist()
        for s, sample in enumerate(completions[g])
        for t in range(len(sample.token_ids))
    ]
    assert sorted(owners) == expected
    np.testing.assert_allclose(
        packed.rows.advantages[packed.rows.response_mask],
        [advantages.advantages[g, s] for g, s, _ in owners],
    )
