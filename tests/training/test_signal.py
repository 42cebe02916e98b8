"""From rewards to what is trained on: rules, advantages, group filters and refills, by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest

from evojax.config import EvojaxConf
from evojax.evidence.types import Completion, Grade, Item, Trajectory
from evojax.grpo.filters import FilterState
from evojax.training.signal import judge

ITEM = Item("t/0", "t", "0=", "1", "train", "line")


def rollout(reward: float | None, cut: bool = False, **parts: float) -> Trajectory:
    """A rollout with this reward; None is unscorable."""
    status = "unscorable" if reward is None else "correct" if reward > 0 else "wrong"
    done = Completion(
        np.zeros(1, np.int32), np.zeros(1), np.zeros(1), "length" if cut else "stop", "v@0"
    )
    components = {} if reward is None else {"correct": reward} | parts
    known = math.nan if reward is None else sum(components.values())
    return Trajectory(
        ITEM, np.zeros(1, np.int32), done, "", Grade(status), known, 0, 0, 0, 0, components
    )


def table(rows: Sequence[Sequence[float | None]]) -> list[list[Trajectory]]:
    return [[rollout(r) for r in row] for row in rows]


def config(**filters: object) -> EvojaxConf:
    cfg = EvojaxConf(experiment="test")
    for name, value in filters.items():
        setattr(cfg.filter, name, value)
    return cfg


def test_case_G01_dead_groups_teach_nothing_and_stay_in_the_divisor():
    out = judge(table([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]), config(), FilterState())
    assert np.all(out.advantages.advantages[:2] == 0.0)
    np.testing.assert_allclose(out.advantages.advantages[2], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    assert out.kept.tolist() == [False, False, True] and out.advantages.weight.all()
    assert out.advantages.counts()["dead_share"] == pytest.approx(2 / 3)
    single = judge(table([[1], [0]]), config(), FilterState())
    assert not single.kept.any() and np.all(single.advantages.advantages == 0.0)


@pytest.mark.parametrize("group", ["none", "ema_quantile", "top_p_mass", "uncertainty", "absolute"])
def test_case_G02_rewards_that_differ_by_rounding_are_dead_under_every_filter(group: str):
    residue = [float(np.float32(0.1)) + 1e-9 * i for i in range(8)]
    out = judge(table([residue, [0.7] * 8]), config(group=group), FilterState())
    assert np.all(out.advantages.advantages == 0.0) and not out.kept.any()
    assert out.advantages.weight.all() if group == "none" else not out.advantages.weight.any()


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "batch_std", "gdpo"])
def test_case_G07_unscorable_rollouts_have_no_part_in_anything(advantage: str):
    cfg = config(group="top_p_mass")
    cfg.algorithm.advantage = advantage
    out = judge(table([[1, None, 0, None], [None] * 4, [1, None, None, None]]), cfg, FilterState())
    assert out.kept.tolist() == [True, False, False]
    assert out.advantages.weight.tolist() == [[True, False, True, False], [False] * 4, [False] * 4]
    assert np.isfinite(out.advantages.advantages).all()
    assert out.advantages.advantages[0, 0] == -out.advantages.advantages[0, 2] > 0
    assert out.threshold == pytest.approx(math.sqrt(0.5)) and not out.emptied


def test_a_group_that_a_filter_takes_leaves_the_divisor():
    rows = table([[1, 0, 1, 0], [0.5, 0.5, 0.5, 0.51], [1, 1, 1, 1]])
    out = judge(rows, config(group="absolute", min_std=0.1), FilterState())
    assert out.kept.tolist() == [True, False, False]
    assert out.advantages.weight.any(axis=1).tolist() == [True, False, False]
    assert np.all(out.advantages.advantages[1:] == 0.0)
    assert (out.groups_filtered, out.emptied, out.threshold) == (1, False, 0.1)


def test_a_filter_that_leaves_nothing_is_told_apart_from_a_dead_batch():
    strict = config(group="absolute", min_std=3.0)
    out = judge(table([[1, 0], [1, 1]]), strict, FilterState())
    assert out.emptied and out.groups_filtered == 1 and not out.advantages.weight.any()
    dead = judge(table([[1, 1], [0, 0]]), strict, FilterState())
    assert not dead.emptied and dead.groups_filtered == 0


def test_rules_come_before_the_filter_and_count_each_rollout_once():
    # Without its truncated member the first group is dead, so that the filter has one group left.
    rows = [[rollout(1), rollout(0, cut=True), rollout(1)], [rollout(1), rollout(0), rollout(0)]]
    cfg = config(trajectory=["truncated"], group="uncertainty", keep=0.5)
    out = judge(rows, cfg, FilterState())
    assert out.kept.tolist() == [False, True]
    assert out.trajectories_filtered == {"truncated": 1}
    assert out.advantages.dead.tolist() == [True, False]
    assert judge(rows, config(), FilterState()).trajectories_filtered == {}


def test_gdpo_gets_each_components_weighted_contribution():
    cfg = config()
    cfg.algorithm.advantage = "gdpo"
    cfg.reward.components = {"correct": 1.0, "partial": 0.5, "format": 0.0}
    rows = [[rollout(1.0, partial=0.0, format=9.0), rollout(0.0, partial=1.0, format=0.0)]]
    out = judge(rows, cfg, FilterState())
    # Each component is +-sqrt(1/2) in units of its std; weights 1 and 0.5 leave half of the first.
    assert out.advantages.advantages[0, 0] == -out.advantages.advantages[0, 1] > 0
    cfg.reward.components["partial"] = 1.0
    assert judge(rows, cfg, FilterState()).advantages.dead.all()  # now the two cancel


def test_advantages_are_clipped():
    cfg = config()
    cfg.algorithm.advantage_clip = 1.0
    out = judge(table([[1, 0, 0, 0, 0, 0, 0, 0]]), cfg, FilterState())
    assert out.advantages.advantages[0, 0] == 1.0


def test_the_filters_memory_goes_on_over_steps_and_through_a_checkpoint():
    cfg = config(group="ema_quantile", ema_warmup=4, ema_decay=0.5, min_keep=0.0)
    strong, weak = [1.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.6]
    first = judge(table([strong] * 4), cfg, FilterState())
    assert first.kept.all() and first.threshold == 0.0 and first.state.seen == 4
    restored = FilterState.from_dict(json.loads(json.dumps(first.state.to_dict())))
    second = judge(table([strong, weak]), cfg, restored)
    std = math.sqrt(1 / 3)
    assert second.threshold == pytest.approx(std) and second.kept.tolist() == [True, False]
    assert second.state == judge(table([strong, weak]), cfg, first.state).state
    assert second.state.mean < std and second.state.seen == 6
