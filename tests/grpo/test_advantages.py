from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evojax.errors import InputError
from evojax.grpo.advantages import ADVANTAGES, group_normalised

TOLERANCE = 1e-6


def test_one_success_in_eight_has_the_known_value():
    out = group_normalised([[1, 0, 0, 0, 0, 0, 0, 0]], tolerance=TOLERANCE)
    # mean 1/8, ddof-1 std sqrt(1/8): (7/8) / sqrt(1/8)
    np.testing.assert_allclose(out.advantages[0, 0], 2.4748737, rtol=1e-5)
    np.testing.assert_allclose(out.advantages[0, 1:], -0.35355339, rtol=1e-5)


def test_case_G01_equal_rewards_give_exact_zeros_and_are_counted():
    out = group_normalised([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]], tolerance=TOLERANCE)
    assert np.all(out.advantages[:2] == 0.0)
    np.testing.assert_allclose(out.advantages[2], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    assert out.dead.tolist() == [True, True, False]
    assert out.counts()["dead_share"] == pytest.approx(2 / 3)
    assert out.weight.all(), "dead groups stay in the token count"


def test_case_G01_group_of_one_is_dropped_without_nan():
    out = group_normalised([[1.0], [0.0]], tolerance=TOLERANCE)
    assert np.all(out.advantages == 0.0)
    assert out.dropped.all() and not out.weight.any() and not out.dead.any()
    assert out.counts()["dead_share"] == 0.0


@pytest.mark.parametrize("group", [np.full(8, 0.1, np.float32), np.full(11, 0.7, np.float32)])
def test_case_G02_equal_rewards_that_round_are_dead(group):
    out = group_normalised(group[None], tolerance=TOLERANCE)
    assert out.dead[0] and np.all(out.advantages == 0.0)


def test_case_G02_seven_of_one_value_against_one_is_live():
    group = np.full(8, 0.35, np.float32)
    group[0] = 0.0
    out = group_normalised(group[None], tolerance=TOLERANCE)
    assert not out.dead[0]
    np.testing.assert_allclose(out.advantages[0, 0], -2.4748737, rtol=1e-4)


def test_case_G07_unscorable_members_are_left_out():
    rewards = [[1, None, 0, float("nan")], [None, None, None, None], [1, None, None, None]]
    out = group_normalised(rewards, tolerance=TOLERANCE)
    np.testing.assert_allclose(out.advantages[0], [0.7071058, 0, -0.7071058, 0], rtol=1e-5)
    assert out.weight.tolist() == [[True, False, True, False], [False] * 4, [False] * 4]
    assert out.dropped.tolist() == [False, True, True]
    assert np.all(out.advantages[1:] == 0.0) and np.isfinite(out.advantages).all()
    assert out.counts()["unscorable"] == 9.0
    assert out.counts()["unscorable_share"] == pytest.approx(9 / 12)


def test_a_filtered_member_leaves_the_statistics_but_stays_scorable():
    include = np.array([[True, True, False]])
    out = group_normalised([[1.0, 0.0, 50.0]], tolerance=TOLERANCE, include=include)
    np.testing.assert_allclose(out.advantages[0], [0.7071058, -0.7071058, 0.0], rtol=1e-5)
    assert out.scorable.all() and out.weight.tolist() == [[True, True, False]]


def test_no_groups_at_all():
    out = group_normalised(np.zeros((0, 4)), tolerance=TOLERANCE)
    assert out.advantages.shape == (0, 4) and out.counts()["dead_share"] == 0.0


def test_shape_is_checked_and_names_are_registered():
    with pytest.raises(ValueError, match="groups, samples"):
        group_normalised([1.0, 0.0], tolerance=TOLERANCE)
    assert ADVANTAGES.get("grpo", where="algorithm.advantage") is group_normalised
    with pytest.raises(InputError, match="did you mean 'grpo'"):
        ADVANTAGES.get("grop", where="algorithm.advantage")


rewards_table = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 0.1, 1.0, float("nan")]), min_size=4, max_size=4),
    min_size=1,
    max_size=5,
)


@given(rewards_table, st.floats(-5, 5), st.floats(0.5, 4))
def test_shift_and_scale_of_rewards_change_nothing(rewards, shift, scale):
    table = np.array(rewards)
    plain = group_normalised(table, tolerance=TOLERANCE)
    moved = group_normalised(table * scale + shift, tolerance=TOLERANCE)
    np.testing.assert_allclose(moved.advantages, plain.advantages, atol=2e-4)
    assert (moved.dead == plain.dead).all() and (moved.weight == plain.weight).all()
    np.testing.assert_allclose(plain.advantages.sum(axis=1), 0.0, atol=1e-5)
