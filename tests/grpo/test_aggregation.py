from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evojax.errors import InputError
from evojax.grpo.aggregation import AGGREGATIONS, token_weights

HORIZON = 8
NAMES = list(AGGREGATIONS)


def oracle(name, losses):
    """The four means as their papers write them, over sequences of any length."""
    filled = [line for line in losses if len(line)]
    if not filled:
        return 0.0
    return {
        "token_mean": lambda: float(np.mean(np.concatenate(filled))),
        "seq_mean_token_mean": lambda: float(np.mean([np.mean(line) for line in filled])),
        "seq_mean_token_sum": lambda: float(np.mean([np.sum(line) for line in filled])),
        "seq_mean_token_sum_norm": lambda: float(np.mean([np.sum(line) / 8 for line in filled])),
    }[name]()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", 10 / 4),  # (1 + 2 + 3 + 4) / 4
        ("seq_mean_token_mean", (2 + 4) / 2),  # means 2 and 4
        ("seq_mean_token_sum", (6 + 4) / 2),
        ("seq_mean_token_sum_norm", (6 + 4) / 2 / 8),
    ],
)
def test_means_by_hand(name, expected):
    weights = token_weights(name, [3, 1, 0], HORIZON)
    total = weights[0] * (1 + 2 + 3) + weights[1] * 4
    assert total == pytest.approx(expected)
    assert weights[2] == 0.0, "an empty sequence is not counted"
    assert oracle(name, [[1, 2, 3], [4], []]) == pytest.approx(expected)


def test_horizon_is_a_constant_and_only_one_scheme_reads_it():
    for name in NAMES:
        short, long = (token_weights(name, [3, 1], h) for h in (8, 16))
        assert np.allclose(short / long, 2.0 if name.endswith("norm") else 1.0), name
    few = token_weights("seq_mean_token_sum_norm", [1, 1], HORIZON)
    many = token_weights("seq_mean_token_sum_norm", [7, 5], HORIZON)
    np.testing.assert_array_equal(few, many)


lines = st.lists(st.lists(st.floats(-3, 3), max_size=6), min_size=1, max_size=7)


@pytest.mark.parametrize("name", NAMES)
@given(losses=lines, rows=st.integers(1, 4), width=st.integers(6, 9), seed=st.integers(0, 99))
def test_any_split_padding_and_order_give_the_mean_of_the_whole_batch(
    name, losses, rows, width, seed
):
    weights = token_weights(name, [len(line) for line in losses], HORIZON)
    order = np.random.default_rng(seed).permutation(len(losses))
    total = 0.0
    for micro_batch in np.array_split(order, rows):
        padded = np.full((len(micro_batch), width), 1e6)
        weight = np.zeros((len(micro_batch), width))
        for place, i in enumerate(micro_batch):
            padded[place, : len(losses[i])] = losses[i]
            weight[place, : len(losses[i])] = weights[i]
        total += float((weight * padded).sum())
    assert total == pytest.approx(oracle(name, losses), rel=1e-9, abs=1e-9)


def test_the_mean_of_micro_batch_means_is_something_else():
    losses = [[1.0, 1.0, 1.0], [0.0]]
    means = [oracle("token_mean", [line]) for line in losses]
    assert np.mean(means) == 0.5 and oracle("token_mean", losses) == 0.75


def test_nothing_at_all_weighs_nothing():
    for name in NAMES:
        assert token_weights(name, [], HORIZON).shape == (0,)
        assert token_weights(name, [0, 0], HORIZON).tolist() == [0.0, 0.0]


def test_what_cannot_be_aggregated_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        token_weights("token_mean", [3, -1], HORIZON)
    with pytest.raises(ValueError, match="lengths"):
        token_weights("token_mean", np.ones((2, 2), int), HORIZON)
    with pytest.raises(ValueError, match="horizon"):
        token_weights("token_mean", [3], 0)
    with pytest.raises(InputError, match="did you mean 'token_mean'"):
        token_weights("token_meen", [3], HORIZON)
