"""Replays of hand-made evidence, with values worked out by hand."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from evojax.config import EvojaxConf
from evojax.evidence.schema import ROLLOUTS
from evojax.evolution.backtest import backtest
from evojax.evolution.intervention import Intervention, Predicts

TYPES = pa.schema(
    [
        ("split", pa.string()), ("step", pa.int32()), ("group", pa.int32()),
        ("sample", pa.int32()), ("item", pa.string()), ("task", pa.string()),
        ("grade_status", pa.string()), ("reward", pa.float64()), ("truncated", pa.bool_()),
        ("components", pa.map_(pa.string(), pa.float64())), ("refill_round", pa.int32()),
        ("response_tokens", pa.int32()), ("features", pa.map_(pa.string(), pa.float64())),
    ]
)  # fmt: skip


def test_the_columns_are_those_of_the_evidence() -> None:
    stored = {column.name: column.type for column in ROLLOUTS}
    assert {f.name: stored[f.name] for f in TYPES} == {f.name: f.type for f in TYPES}


def row(group: int, sample: int, partial: float, item: str = "", **change: Any) -> dict[str, Any]:
    right = partial == 1.0
    base = {
        "split": "train", "step": 0, "group": group, "sample": sample,
        "item": item or f"t/{group}", "task": "t",
        "grade_status": "correct" if right else "wrong", "reward": float(right),
        "truncated": False, "refill_round": 0, "response_tokens": 2, "features": {},
        "components": {"correct": float(right), "partial": partial, "format": 1.0},
    }  # fmt: skip
    return base | change


def table(groups: list[list[float]], **change: Any) -> pa.Table:
    rows = [row(g, s, v, **change) for g, vs in enumerate(groups) for s, v in enumerate(vs)]
    return of(rows)


def of(rows: list[dict[str, Any]]) -> pa.Table:
    ready = [r | {k: list(r[k].items()) for k in ("components", "features")} for r in rows]
    return pa.Table.from_pylist(ready, schema=TYPES)


def change(metric: str = "dead_group_share", direction: str = "down", **edits: Any) -> Intervention:
    keys = {k.replace("__", "."): v for k, v in edits.items()}
    return Intervention(
        rule="x", factor="reward", hypothesis="h", edits=keys, success_criterion="s",
        predicts=Predicts(metric=metric, direction=direction, at_least=0.0),  # type: ignore[arg-type]
        rollback="r", origin="rule",
    )  # fmt: skip


PARTIAL = change("dead_all_wrong_share", reward__components__partial=0.3)


def test_partial_credit_revives_the_all_wrong_group() -> None:
    found = backtest(PARTIAL, table([[1, 1], [0.4, 0.2], [1, 0.5], [0.1, 0.1]]), EvojaxConf())
    assert (found.live_before, found.live_after, found.revived, found.killed) == (1, 2, 1, 0)
    assert found.gain == 0.25 and found.sign_flips == 0 and found.violations == 0
    assert (found.metric_before, found.metric_after) == (0.5, 0.25)
    # Within-group variances: correct 1/4; partial 0.09 * (0.1^2 + 0.25^2).
    partial = 0.09 * (0.01 + 0.0625)
    assert found.variance_share["partial"] == pytest.approx(partial / (0.25 + partial))
    assert not found.refused and "1 revived" in found.words


def test_a_reward_that_ranks_wrong_above_right_is_refused() -> None:
    rows = [row(0, 0, 1.0, components={"correct": 1.0, "partial": 0.0, "format": 0.0}),
            row(0, 1, 0.9), row(0, 2, 0.0)]  # fmt: skip
    found = backtest(change(reward__components__partial=2.0), of(rows), EvojaxConf())
    assert found.violations == 1 and found.refused and "outrank" in found.refusals[0]
    assert found.sign_flips == 1  # rewards 1.0, 1.8, 0.0: the second rises above the mean 0.93


def test_a_component_that_was_not_stored_cannot_be_replayed() -> None:
    rows = [row(0, s, v, components={"correct": 0.0}) for s, v in enumerate([0.0, 0.1])]
    found = backtest(PARTIAL, of(rows), EvojaxConf())
    assert not found.replayable and "partial" in found.words


def test_unscorable_rollouts_are_left_out() -> None:
    rows = [row(0, 0, 0.2), row(0, 1, 0.2),
            row(0, 2, 0.0, grade_status="unscorable", reward=None)]  # fmt: skip
    assert backtest(PARTIAL, of(rows), EvojaxConf()).live_after == 0


def test_refill_in_expectation() -> None:
    data = table([[1, 1], [0, 0], [1, 0], [1, 0]])
    found = backtest(change("update_dead_share", filter__refill_rounds=2), data, EvojaxConf())
    assert found.live_before == 2 and found.live_after == pytest.approx(4 * (1 - 0.125))
    assert found.extra_rollouts == pytest.approx(0.5 + 0.25)
    assert (found.metric_before, found.metric_after) == (0.5, pytest.approx(0.125))
    assert found.gain == pytest.approx(0.375) and not found.refused
    cfg = EvojaxConf()
    cfg.filter.refill_rounds = 2
    off = backtest(change("update_dead_share", filter__refill_rounds=0), data, cfg)
    assert off.extra_rollouts == pytest.approx(-0.75) and off.refused


def test_refilled_groups_do_not_count_twice() -> None:
    first = [row(g, s, v) for g, vs in enumerate([[1, 1], [1, 0]]) for s, v in enumerate(vs)]
    later = [row(9, s, 1.0, refill_round=1) for s in range(2)]
    found = backtest(change(filter__refill_rounds=1), of(first + later), EvojaxConf())
    assert found.groups == 2 and found.live_before == 1


def test_dropping_truncated_rollouts() -> None:
    rows = [row(0, 0, 1.0), row(0, 1, 0.0, truncated=True), row(1, 0, 1.0), row(1, 1, 0.0),
            row(1, 2, 0.0, truncated=True)]  # fmt: skip
    found = backtest(change(filter__trajectory=["truncated"]), of(rows), EvojaxConf())
    assert (found.live_before, found.live_after, found.killed) == (2, 1, 1)
    assert found.refused and "lost" in found.refusals[0]


def test_overlong_is_replayed_from_the_stored_lengths() -> None:
    rows = [row(0, 0, 1.0, response_tokens=2), row(0, 1, 1.0, response_tokens=6),
            row(1, 0, 1.0, response_tokens=2), row(1, 1, 0.0, response_tokens=5)]  # fmt: skip
    edits = change(reward__components__overlong=0.5, reward__overlong_buffer=2)
    found = backtest(edits, of(rows), EvojaxConf())  # budget 6: 0, -1; 0, -0.5
    assert (found.live_before, found.live_after, found.revived) == (1, 2, 1)
    # within-group variances: correct 1/4; overlong (0.5 * 0.5)^2 + (0.5 * 0.25)^2
    overlong = 0.25**2 + 0.125**2
    assert found.variance_share["overlong"] == pytest.approx(overlong / (0.25 + overlong))
    assert not found.refused and "Not replayed" not in found.words


def test_a_reward_clip_is_replayed() -> None:
    cfg = EvojaxConf()
    cfg.reward.components = {"correct": 1.0, "partial": 2.0}
    data = table([[0.4, 0.2], [0.9, 0.6], [1.0, 0.1]])
    found = backtest(change(reward__clip=0.5), data, cfg)
    # 2 * partial: 0.8, 0.4 -> 0.5, 0.4; 1.8, 1.2 -> 0.5, 0.5; 3.0, 0.2 -> 0.5, 0.2
    assert (found.live_before, found.live_after, found.killed) == (3, 2, 1)
    cfg.reward.clip = 0.5
    assert backtest(change(reward__clip=5.0), data, cfg).revived == 1


GRADED = EvojaxConf()
GRADED.reward.components = {"correct": 1.0, "partial": 1.0}


def test_a_group_filter_is_replayed_over_the_stored_groups() -> None:
    # std: 2 / sqrt 2 = 1.41; 0.2 / sqrt 2 = 0.14; dead; 0.01 / sqrt 2 = 0.007
    data = table([[1, 0], [0.5, 0.3], [0.2, 0.2], [0.31, 0.3]])
    edits = change("update_dead_share", filter__group="absolute", filter__min_std=0.1)
    found = backtest(edits, data, GRADED)
    assert (found.live_before, found.live_after, found.killed) == (3, 2, 1)
    assert (found.metric_before, found.metric_after) == (0.25, 0.0)
    assert found.gain == pytest.approx(1 - 3 / 4)  # the batch that is left has live groups only
    assert "lost" in found.refusals[0]  # a third of the live groups
    mild = change("dead_group_share", filter__group="uncertainty", filter__keep=0.75)
    found = backtest(mild, data, GRADED)
    assert (found.live_after, found.metric_before, found.metric_after) == (3, 0.25, 0.25)
    assert not found.refused
    nothing = change(filter__group="absolute", filter__min_std=9.0)
    assert backtest(nothing, data, GRADED).gain == -0.75


def test_a_filter_with_memory_is_replayed_step_by_step() -> None:
    rows = [row(g, s, v, step=step) for step, groups in enumerate(
        [[[1, 0], [1, 0]], [[1, 0], [0.5, 0.3], [0.2, 0.2]]]
    ) for g, vs in enumerate(groups) for s, v in enumerate(vs)]  # fmt: skip

    def live_after(warmup: int) -> float:
        edits = change(filter__group="ema_quantile", filter__ema_warmup=warmup,
                       filter__ema_decay=0.5, filter__min_keep=0.0)  # fmt: skip
        return backtest(edits, of(rows), GRADED).live_after

    # Two groups of std 1.41 in step 0 set the threshold at 1.41; in step 1 it takes 0.14.
    assert (live_after(warmup=2), live_after(warmup=3)) == (3, 4)


def test_rules_are_replayed_when_their_features_are_stored() -> None:
    busy, lazy = {"turns": 9.0, "edits": 2.0}, {"turns": 2.0, "edits": 0.0}
    rows = [row(0, 0, 1.0, features=busy), row(0, 1, 0.0, features=lazy),
            row(1, 0, 1.0, features=busy), row(1, 1, 0.0, features=busy)]  # fmt: skip
    found = backtest(change(filter__trajectory=["idle"]), of(rows), EvojaxConf())
    assert (found.live_before, found.live_after, found.killed) == (2, 1, 1)
    bare = backtest(change(filter__trajectory=["idle"]), table([[1, 0]]), EvojaxConf())
    assert not bare.replayable and "edits" in bare.words


def test_refills_replace_what_a_filter_takes_too() -> None:
    cfg = EvojaxConf()
    cfg.reward.components = dict(GRADED.reward.components)
    cfg.filter.group = "uncertainty"
    cfg.filter.keep = 0.25
    data = table([[1, 0], [0.5, 0.3], [0.2, 0.2], [0.31, 0.3]])
    found = backtest(change("update_dead_share", filter__refill_rounds=1), data, cfg)
    assert found.live_before == 1 and found.live_after == pytest.approx(4 * (1 - 0.75**2))


def test_difficulty_selection_prefers_live_items() -> None:
    rates = {"always": 8, "never": 0, "half": 4, "some": 2}
    rows = [
        row(g, s, float(s < right), item=f"t/{name}")
        for g, (name, right) in enumerate(rates.items())
        for s in range(8)
    ]
    found = backtest(change(data__selection="difficulty"), of(rows), EvojaxConf())
    # Shrunk rates (c + 2 m) / 10 with the task's mean m = 14/32.
    p = [(c + 0.875) / 10 for c in rates.values()]
    uniform = sum(1 - x**8 - (1 - x) ** 8 for x in p) / 4
    assert found.live_before == pytest.approx(4 * uniform)
    assert found.gain > 0.02 and not found.refused
    assert found.metric_after is not None and found.metric_after < 1 - uniform


@pytest.mark.parametrize("key", ["sampling.temperature", "algorithm.lr", "algorithm.epochs"])
def test_what_cannot_be_replayed_is_said(key: str) -> None:
    edits: dict[str, Any] = {key.replace(".", "__"): 1}
    found = backtest(change(**edits), table([[1, 0]]), EvojaxConf())
    assert not found.replayable and not found.refused and key in found.words
    assert found.groups == 1


def test_no_rollouts_and_thresholds() -> None:
    assert not backtest(PARTIAL, table([[1, 0]], split="eval"), EvojaxConf()).replayable
    cfg = EvojaxConf()
    cfg.evolution.min_backtest_gain = 0.3
    found = backtest(PARTIAL, table([[1, 1], [0.4, 0.2], [1, 0.5], [0.1, 0.1]]), cfg)
    assert found.refused and "+0.300 is asked for" in found.refusals[0]


def test_a_replay_does_not_depend_on_row_order() -> None:
    data = table([[1, 1], [0.4, 0.2], [1, 0.5]])
    rows = data.to_pylist()
    random.Random(0).shuffle(rows)
    mixed = pa.Table.from_pylist(rows, schema=TYPES)
    assert backtest(PARTIAL, data, EvojaxConf()) == backtest(PARTIAL, mixed, EvojaxConf())
