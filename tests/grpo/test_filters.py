"""Group filters against hand-computed values, an independent oracle, and their invariants."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.errors import InputError
from evojax.grpo.filters import GROUP_FILTERS, Filtered, FilterRule, FilterState
from evojax.grpo.filters.ema_quantile import updated

RULE = FilterRule(keep=0.9, min_std=0.01, ema_decay=0.1, ema_warmup=20, min_keep=0.5)
Z90 = 1.2815515655446004  # Phi^-1(0.9)
WARM = FilterState(mean=0.4, variance=0.01, seen=100)


def apply(
    name: str,
    std: list[float] | np.ndarray,
    state: FilterState | None = None,
    live: np.ndarray | None = None,
    **change: float,
) -> Filtered:
    values = np.asarray(std, dtype=np.float64)
    rule = RULE._replace(**change)
    live = values > 0 if live is None else live
    return GROUP_FILTERS.get(name, "filter.group")(values, live, state or FilterState(), rule)


def test_none_keeps_dead_groups_too():
    found = apply("none", [0.0, 0.5])
    assert found.keep.tolist() == [True, True] and math.isnan(found.threshold)


def test_absolute_keeps_from_the_limit_upwards_and_may_keep_nothing():
    found = apply("absolute", [0.0, 0.009, 0.01, 0.5])
    assert found.keep.tolist() == [False, False, True, True] and found.threshold == 0.01
    assert not apply("absolute", [0.2, 0.3], min_std=0.4).keep.any()


def test_uncertainty_keeps_the_share_of_all_groups_drawn():
    std = [0.1, 0.5, 0.0, 0.4, 0.3, 0.2, 0.0, 0.0]
    found = apply("uncertainty", std, keep=0.25)  # floor(0.25 * 8) = 2
    assert np.flatnonzero(found.keep).tolist() == [1, 3] and found.threshold == 0.4
    assert np.flatnonzero(apply("uncertainty", std, keep=0.05).keep).tolist() == [1]
    # three quarters would be six, but only five are live
    assert np.flatnonzero(apply("uncertainty", std, keep=0.75).keep).tolist() == [0, 1, 3, 4, 5]


def test_top_p_mass_keeps_the_smallest_prefix_of_the_std():
    # total 2.0; 0.9 * 2.0 - 0.01 = 1.79: 0.8 + 0.6 = 1.4 is short of it, + 0.4 = 1.8 is not
    found = apply("top_p_mass", [0.05, 0.6, 0.0, 0.4, 0.8, 0.15])
    assert np.flatnonzero(found.keep).tolist() == [1, 3, 4] and found.threshold == 0.4
    # std: 0.9 of 1.1 asks for all three; variance would stop at 0.25 + 0.16 >= 0.9 * 0.45 - 0.01
    assert apply("top_p_mass", [0.5, 0.4, 0.2]).keep.tolist() == [True, True, True]


def test_top_p_mass_at_its_edges():
    assert apply("top_p_mass", [0.5, 0.001], keep=1.0).keep.tolist() == [True, True]
    assert not apply("top_p_mass", [0.004, 0.006]).keep.any()  # 0.9 * 0.01 - 0.01 < 0
    assert not apply("top_p_mass", [0.0, 0.0]).keep.any()
    assert apply("top_p_mass", []).keep.shape == (0,)


def test_ema_quantile_threshold_of_a_narrow_spread():
    found = apply("ema_quantile", [0.0, 0.27, 0.28, 0.5], WARM)
    assert found.threshold == pytest.approx(0.4 - Z90 * 0.1)  # 0.2718
    assert found.keep.tolist() == [False, False, True, True]


def test_ema_quantile_with_a_wide_spread_is_only_the_zero_rule():
    """The threshold m - z sd falls below 0 as soon as sd > m / z."""
    wide = FilterState(mean=0.2, variance=0.04, seen=100)
    found = apply("ema_quantile", [0.0, 1e-4, 0.5], wide)
    assert found.threshold == pytest.approx(0.2 * (1 - Z90)) and found.threshold < 0
    assert found.keep.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("seen", "decay", "acts"),
    [(19, 0.1, False), (20, 0.1, True), (20, 0.02, False), (49, 0.02, False), (50, 0.02, True)],
)
def test_ema_quantile_rests_during_the_warm_up(seen: int, decay: float, acts: bool):
    state = FilterState(0.4, 0.0001, seen)
    found = apply("ema_quantile", [0.1, 0.4, 0.4, 0.0], state, ema_decay=decay)
    assert found.keep.tolist() == [not acts, True, True, False]
    assert (found.threshold == 0.0) != acts


def test_ema_quantile_never_keeps_fewer_than_the_floor():
    high = FilterState(mean=5.0, variance=1e-6, seen=100)
    found = apply("ema_quantile", [0.1, 0.3, 0.0, 0.2, 0.4, 0.5], high)
    assert np.flatnonzero(found.keep).tolist() == [1, 4, 5]  # ceil(0.5 * 5)
    assert not apply("ema_quantile", [0.1, 0.3], high, min_keep=0.0).keep.any()


def test_dead_groups_do_not_enter_the_running_statistics():
    alone = apply("ema_quantile", [0.3, 0.5], WARM)
    among = apply("ema_quantile", [0.0, 0.3, 0.0, 0.5, 0.0], WARM)
    assert alone.state == among.state and among.state.seen == 102
    assert apply("ema_quantile", [0.0, 0.0], WARM).state == WARM


def test_one_new_value_is_the_usual_exponential_average():
    out = updated(WARM, np.array([0.9]), 0.1)
    assert out.mean == pytest.approx(0.9 * 0.4 + 0.1 * 0.9)
    assert out.variance == pytest.approx(0.9 * 0.01 + 0.1 * 0.9 * 0.5**2)


def test_the_first_values_are_a_plain_average():
    values = np.array([0.1, 0.7, 0.3, 0.5, 0.2])
    out = updated(updated(FilterState(), values[:2], 0.1), values[2:], 0.1)
    assert out.mean == pytest.approx(values.mean()) and out.variance == pytest.approx(values.var())


def test_a_batch_is_the_mixture_of_old_and_new():
    """Oracle: moments of weighted samples, 0.9^3 on the old two-point distribution."""
    new = np.array([0.2, 0.5, 0.6])
    old = np.array([0.4 - 0.1, 0.4 + 0.1])  # mean 0.4, variance 0.01
    weight = 1 - 0.9**3
    points = np.concatenate([old, new])
    mass = np.array([(1 - weight) / 2] * 2 + [weight / 3] * 3)
    out = updated(WARM, new, 0.1)
    mean = float(mass @ points)
    assert out.mean == pytest.approx(mean)
    assert out.variance == pytest.approx(float(mass @ (points - mean) ** 2))


def test_state_survives_json_and_two_sessions_equal_one():
    rng = np.random.default_rng(0)
    steps = [np.where(rng.random(8) < 0.3, 0.0, rng.random(8)) for _ in range(12)]

    def go_on(state: FilterState, batches: list[np.ndarray]) -> tuple[FilterState, list[list]]:
        kept = []
        for std in batches:
            found = apply("ema_quantile", std, state)
            state = found.state
            kept.append(found.keep.tolist())
        return state, kept

    whole, kept = go_on(FilterState(), steps)
    half, first = go_on(FilterState(), steps[:5])
    restored = FilterState.from_dict(json.loads(json.dumps(half.to_dict())))
    assert restored == half
    end, second = go_on(restored, steps[5:])
    assert end == whole and first + second == kept
    assert sum(map(sum, kept)) < sum(int((std > 0).sum()) for std in steps)  # it did filter


@pytest.mark.parametrize(
    "stored",
    [{}, {"mean": 0.1, "variance": 0.1}, {"mean": "x", "variance": 0, "seen": 0},
     {"mean": math.nan, "variance": 0.0, "seen": 0}, {"mean": 0.0, "variance": -1.0, "seen": 0},
     {"mean": 0.0, "variance": 0.0, "seen": -1}],
)  # fmt: skip
def test_a_damaged_state_is_refused(stored: dict):
    with pytest.raises(InputError, match="checkpoint"):
        FilterState.from_dict(stored)


NAMES = sorted(set(GROUP_FILTERS) - {"none"})
STDS = st.lists(st.just(0.0) | st.floats(1e-3, 2.0), max_size=16)
STATES = st.builds(FilterState, st.floats(0, 1), st.floats(0, 1), st.integers(0, 60))
KEEPS = st.floats(0.05, 0.99)


@settings(max_examples=60, deadline=None)
@given(std=STDS, state=STATES, keep=KEEPS, seed=st.integers(0, 99))
@pytest.mark.parametrize("name", NAMES)
def test_zeros_go_and_the_order_of_the_groups_does_not_matter(name, std, state, keep, seed):
    values = np.array(std, dtype=np.float64)
    order = np.random.default_rng(seed).permutation(len(values))
    one, two = (apply(name, v, state, keep=keep) for v in (values, values[order]))
    assert not one.keep[values == 0].any()
    assert sorted(values[one.keep]) == sorted(values[order][two.keep])
    if len(set(std)) == len(std):  # of equal ones, the first drawn stay
        assert one.keep[order].tolist() == two.keep.tolist()
    assert one.state == two.state


@settings(max_examples=60, deadline=None)
@given(std=STDS, extra=st.just(0.0) | st.floats(1e-3, 2.0), state=STATES, keep=KEEPS)
@pytest.mark.parametrize("name", NAMES)
def test_one_more_group_keeps_at_most_one_more(name, std, extra, state, keep):
    """Hence refills that ask for what is missing never end with too many groups."""
    before = apply(name, std, state, keep=keep).keep.sum()
    assert apply(name, [*std, extra], state, keep=keep).keep.sum() <= before + 1


@settings(max_examples=60, deadline=None)
@given(std=STDS, state=STATES, keep=KEEPS, floor=st.floats(0, 0.95))
def test_ema_quantile_keeps_its_floor_and_the_strongest(std, state, keep, floor):
    values = np.array(std, dtype=np.float64)
    found = apply("ema_quantile", values, state, keep=keep, min_keep=floor)
    live = values[values > 0]
    assert found.keep.sum() >= floor * len(live) - 1e-6
    gone = values[(values > 0) & ~found.keep]
    assert not gone.size or not found.keep.any() or gone.max() <= values[found.keep].min()
