from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evojax.errors import InputError
from evojax.grpo.advantages import ADVANTAGES, RewardTable, estimate

TOLERANCE = 1e-6
NAN = float("nan")
PLAIN = ["grpo", "dr_grpo", "rloo", "batch_std", "maxrl"]


def advantages(name, rewards, **more):
    return estimate(name, RewardTable(rewards, TOLERANCE, **more))


def parts(**tables):
    """One table of rewards from weighted contributions, all weights 1."""
    components = {name: np.array(table, float) for name, table in tables.items()}
    total = np.sum(list(components.values()), axis=0)
    return total, {"components": components, "weights": dict.fromkeys(components, 1.0)}


def test_one_success_in_eight_has_the_known_values():
    rewards = [[1, 0, 0, 0, 0, 0, 0, 0]]
    hand = {
        "grpo": (2.4748737, -0.35355339),  # (7/8) / sqrt(1/8): std with ddof 1
        "dr_grpo": (7 / 8, -1 / 8),
        "rloo": (1.0, -1 / 7),
        "batch_std": (2.4748737, -0.35355339),  # the batch is this group
        "maxrl": (7.0, -1.0),  # 1/p - 1 and -1
    }
    for name, (first, others) in hand.items():
        out = advantages(name, rewards).advantages[0]
        np.testing.assert_allclose(out[0], first, rtol=2e-5, err_msg=name)
        np.testing.assert_allclose(out[1:], others, rtol=2e-5, err_msg=name)


def test_batch_std_is_that_of_all_raw_rewards_dead_groups_included():
    out = advantages("batch_std", [[1, 0], [1, 1], [0, NAN]])
    # usable and compared: 1, 0, 1, 1 -> std 0.5; the group of one stays out
    np.testing.assert_allclose(out.advantages, [[1, -1], [0, 0], [0, 0]], rtol=1e-5)
    assert out.dead.tolist() == [False, True, False]
    assert out.dropped.tolist() == [False, False, True]


def test_maxrl_weighs_rare_success_by_one_over_its_rate_and_refuses_penalties():
    out = advantages("maxrl", [[1, 0, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_allclose(out.advantages[0], [3, -1, -1, -1], rtol=1e-5)
    np.testing.assert_allclose(out.advantages[1], [1 / 3, 1 / 3, 1 / 3, -1], rtol=1e-5)
    with pytest.raises(InputError, match="no reward is below 0"):
        advantages("maxrl", [[1.0, -0.5]])
    left_out = RewardTable(np.array([[1.0, 0.0, -5.0]]), TOLERANCE, np.array([[True, True, False]]))
    np.testing.assert_allclose(estimate("maxrl", left_out).advantages, [[1, -1, 0]], rtol=1e-5)


def test_gdpo_tells_apart_what_one_sum_cannot():
    rewards, more = parts(right=[[1, 0, 0, 0]], short=[[0, 1, 1, 0]])
    assert advantages("grpo", rewards, **more).advantages[0, 0] == pytest.approx(
        advantages("grpo", rewards, **more).advantages[0, 1]
    ), "rewards 1 and 1 are the same to grpo"
    out = advantages("gdpo", rewards, **more).advantages[0]
    right = np.array([0.75, -0.25, -0.25, -0.25]) / 0.5
    short = np.array([-0.5, 0.5, 0.5, -0.5]) / np.sqrt(1 / 3)
    total = right + short
    np.testing.assert_allclose(out, total / np.std(total, ddof=1), rtol=1e-4)
    assert out[0] > out[1]


def test_gdpo_weights_act_on_normalised_components_and_only_their_ratio_counts():
    right, short = np.array([[1.0, 0.0, 1.0, 0.0]]), np.array([[0.0, 3.0, 3.0, 0.0]])

    def run(w_right, w_short):
        return advantages(
            "gdpo",
            w_right * right + w_short * short,
            components={"right": w_right * right, "short": w_short * short},
            weights={"right": w_right, "short": w_short},
        ).advantages

    scaled = np.array([1, -1, 1, -1]) - 0.5 * np.array([-1, 1, 1, -1])
    np.testing.assert_allclose(run(2.0, -1.0)[0], scaled / np.std(scaled, ddof=1), rtol=1e-4)
    np.testing.assert_allclose(run(2.0, -1.0), run(4.0, -2.0), rtol=1e-4)
    assert not np.allclose(run(2.0, -1.0), run(2.0, 1.0))


def test_gdpo_a_constant_component_adds_nothing_and_cancelling_ones_are_dead():
    rewards, more = parts(right=[[1, 0, 0, 0]], format=[[0.1, 0.1, 0.1, 0.1]])
    one, alone = parts(right=[[1, 0, 0, 0]])
    with_constant = advantages("gdpo", rewards, **more).advantages
    np.testing.assert_array_equal(with_constant, advantages("gdpo", one, **alone).advantages)
    rewards, more = parts(right=[[1, 0, 1, 0]], wrong=[[0, 1, 0, 1]])
    out = advantages("gdpo", rewards, **more)
    assert out.dead.all() and not out.advantages.any() and out.weight.all()


def test_gdpo_batch_std_includes_dead_groups_which_stay_at_zero():
    rewards, more = parts(right=[[1, 0], [1, 1]])
    out = advantages("gdpo", rewards, **more)
    # sums s, -s, 0, 0 have the std s * sqrt(2 / 3)
    np.testing.assert_allclose(out.advantages[0], [np.sqrt(1.5), -np.sqrt(1.5)], rtol=1e-4)
    assert out.dead.tolist() == [False, True] and not out.advantages[1].any()


def test_gdpo_needs_components_with_weights_and_finite_values():
    with pytest.raises(ValueError, match="missing: all"):
        advantages("gdpo", [[1.0, 0.0]])
    with pytest.raises(ValueError, match="right"):
        advantages("gdpo", [[1.0, 0.0]], components={"right": [[1, 0]]})
    with pytest.raises(ValueError, match="not a finite number"):
        advantages("gdpo", [[1, 0]], components={"right": [[1, NAN]]}, weights={"right": 1.0})
    out = advantages(
        "gdpo", [[1, 0, NAN]], components={"right": [[1, 0, NAN]]}, weights={"right": 1.0}
    )
    assert np.isfinite(out.advantages).all() and out.weight.tolist() == [[True, True, False]]


def everyone(rewards):
    """Every estimator on the same rewards, ``gdpo`` with them as its only component."""
    table = np.array(rewards, dtype=np.float64)
    more = {"components": {"right": table}, "weights": {"right": 1.0}}
    return {name: advantages(name, table, **more) for name in ADVANTAGES}


def test_case_G01_equal_rewards_give_exact_zeros_and_are_counted():
    for name, out in everyone([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]).items():
        assert np.all(out.advantages[:2] == 0.0), name
        assert np.isfinite(out.advantages).all() and out.advantages[2, 0] > 0, name
        assert out.dead.tolist() == [True, True, False], name
        assert out.counts()["dead_share"] == pytest.approx(2 / 3)
        assert out.weight.all(), "dead groups stay in the token count"
    out = advantages("grpo", [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    np.testing.assert_allclose(out.advantages[2], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


def test_case_G01_group_of_one_is_dropped_without_nan():
    for name, out in everyone([[1.0], [0.0]]).items():
        assert np.all(out.advantages == 0.0), name
        assert out.dropped.all() and not out.weight.any() and not out.dead.any()
        assert out.counts()["dead_share"] == 0.0


@pytest.mark.parametrize("group", [np.full(8, 0.1, np.float32), np.full(11, 0.7, np.float32)])
def test_case_G02_equal_rewards_that_round_are_dead(group):
    for name, out in everyone(group[None]).items():
        assert out.dead[0] and np.all(out.advantages == 0.0), name


def test_case_G02_seven_of_one_value_against_one_is_live():
    group = np.full(8, 0.35, np.float32)
    group[0] = 0.0
    for name, out in everyone(group[None]).items():
        assert not out.dead[0], name
    np.testing.assert_allclose(
        everyone(group[None])["grpo"].advantages[0, 0], -2.4748737, rtol=1e-4
    )
    np.testing.assert_allclose(everyone(group[None])["rloo"].advantages[0, 0], -0.35, rtol=1e-6)


def test_case_G07_unscorable_members_are_left_out():
    rewards = [[1, None, 0, NAN], [None, None, None, None], [1, None, None, None]]
    for name, out in everyone(rewards).items():
        assert out.weight.tolist() == [[True, False, True, False], [False] * 4, [False] * 4]
        assert out.dropped.tolist() == [False, True, True]
        assert np.all(out.advantages[1:] == 0.0) and np.isfinite(out.advantages).all()
        assert out.advantages[0, 0] == pytest.approx(-out.advantages[0, 2]), name
        assert out.counts()["unscorable"] == 9.0
        assert out.counts()["unscorable_share"] == pytest.approx(9 / 12)
    grpo = everyone(rewards)["grpo"].advantages
    np.testing.assert_allclose(grpo[0], [0.7071058, 0, -0.7071058, 0], rtol=1e-5)


def test_a_filtered_member_leaves_the_statistics_but_stays_scorable():
    out = advantages("grpo", [[1.0, 0.0, 50.0]], include=np.array([[True, True, False]]))
    np.testing.assert_allclose(out.advantages[0], [0.7071058, -0.7071058, 0.0], rtol=1e-5)
    assert out.scorable.all() and out.weight.tolist() == [[True, True, False]]


def test_no_groups_at_all():
    for out in everyone(np.zeros((0, 4))).values():
        assert out.advantages.shape == (0, 4) and out.counts()["dead_share"] == 0.0


def test_clip_cuts_both_sides_and_must_be_positive():
    table = RewardTable(np.eye(1, 8), TOLERANCE)
    out = estimate("grpo", table, clip=0.3).advantages
    np.testing.assert_allclose(out[0], [0.3, *[-0.3] * 7], rtol=1e-6)
    assert np.array_equal(
        estimate("grpo", table, 9.0).advantages, estimate("grpo", table).advantages
    )
    with pytest.raises(ValueError, match="above 0"):
        estimate("grpo", table, clip=0.0)


def test_tables_that_do_not_fit_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="groups, samples"):
        RewardTable(np.array([1.0, 0.0]), TOLERANCE)
    with pytest.raises(ValueError, match="include"):
        RewardTable(np.ones((2, 2)), TOLERANCE, np.ones((2, 1), bool))
    with pytest.raises(ValueError, match="right"):
        RewardTable(np.ones((2, 2)), TOLERANCE, components={"right": np.ones(2)})
    with pytest.raises(ValueError, match="tolerance"):
        RewardTable(np.ones((2, 2)), -1.0)
    with pytest.raises(InputError, match="did you mean 'grpo'"):
        estimate("grop", RewardTable(np.ones((2, 2)), TOLERANCE))


def oracle_of_one(name, reward, group, pool):
    mean = sum(group) / len(group)
    return {
        "grpo": lambda: (reward - mean) / (np.std(group, ddof=1) + 1e-6),
        "dr_grpo": lambda: reward - mean,
        "rloo": lambda: reward - (sum(group) - reward) / (len(group) - 1),
        "batch_std": lambda: (reward - mean) / (np.std(pool, ddof=1) + 1e-6),
        "maxrl": lambda: (reward - mean) / (mean + 1e-6),
    }[name]()


def oracle(name, rewards):
    """Each estimator once more, member by member in plain Python numbers."""
    groups = [[r for r in row if np.isfinite(r)] for row in rewards]
    pool = [r for group in groups if len(group) > 1 for r in group]
    out = np.zeros(rewards.shape)
    for g, group in enumerate(groups):
        if len(group) < 2 or max(group) - min(group) <= TOLERANCE:
            continue
        for s in np.flatnonzero(np.isfinite(rewards[g])):
            out[g, s] = oracle_of_one(name, rewards[g, s], group, pool)
    return out


rewards_table = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 0.1, 1.0, NAN]), min_size=4, max_size=4),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", PLAIN)
@given(rewards=rewards_table)
def test_estimators_equal_their_oracle(name, rewards):
    table = np.array(rewards)
    out = advantages(name, table)
    np.testing.assert_allclose(out.advantages, oracle(name, table), rtol=1e-5, atol=1e-6)


@given(rewards_table, rewards_table, st.floats(-2, 2), st.floats(0.1, 2))
def test_gdpo_equals_its_oracle(first, second, w_first, w_second):
    rows = min(len(first), len(second))
    a, b = np.array(first[:rows]), np.array(second[:rows])
    both = np.isfinite(a) & np.isfinite(b)
    a, b = np.where(both, a, NAN), np.where(both, b, NAN)
    out = advantages(
        "gdpo",
        w_first * a + w_second * b,
        components={"a": w_first * a, "b": w_second * b},
        weights={"a": w_first, "b": w_second},
    )
    total = w_first * oracle("grpo", np.abs(w_first) * a)
    total = total + w_second * oracle("grpo", np.abs(w_second) * b)
    weighted = both & (both.sum(axis=1) > 1)[:, None]
    if weighted.any():
        total = total / (np.std(total[weighted], ddof=1) + 1e-6)
    live = out.live[:, None] & weighted
    np.testing.assert_allclose(out.advantages, np.where(live, total, 0.0), rtol=1e-4, atol=1e-4)


@given(rewards_table, st.floats(-5, 5), st.floats(0.5, 4))
def test_shift_and_scale_of_rewards(rewards, shift, scale):
    table = np.array(rewards)
    factors = {"grpo": 1.0, "batch_std": None, "dr_grpo": scale, "rloo": scale}
    for name, factor in factors.items():
        plain = advantages(name, table)
        moved = advantages(name, table * scale + shift)
        expected = plain.advantages * (1.0 if factor is None else factor)
        np.testing.assert_allclose(moved.advantages, expected, atol=5e-4, err_msg=name)
        assert (moved.dead == plain.dead).all() and (moved.weight == plain.weight).all()
        np.testing.assert_allclose(plain.advantages.sum(axis=1), 0.0, atol=1e-5)


@pytest.mark.parametrize("name", [*PLAIN, "gdpo"])
@given(rewards=rewards_table, seed=st.integers(0, 9))
def test_order_of_groups_and_members_does_not_matter(name, rewards, seed):
    table, rng = np.array(rewards), np.random.default_rng(seed)
    rows, columns = rng.permutation(len(table)), rng.permutation(4)
    plain = everyone(table)[name].advantages
    moved = everyone(table[rows][:, columns])[name].advantages
    np.testing.assert_allclose(moved, plain[rows][:, columns], rtol=1e-5, atol=1e-6)
