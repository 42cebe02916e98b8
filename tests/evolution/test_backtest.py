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
        "truncated": False, "refill_round": 0,
        "components": {"correct": float(right), "partial": partial, "format": 1.0},
    }  # fmt: skip
    return base | change


def table(groups: list[list[float]], **change: Any) -> pa.Table:
    rows = [row(g, s, v, **change) for g, vs in enumerate(groups) for s, v in enumerate(vs)]
    return of(rows)


def of(rows: list[dict[str, Any]]) -> pa.Table:
    ready = [r | {"components": list(r["components"].items())} for r in rows]
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
    found = backtest(change(filter__drop_truncated=True), of(rows), EvojaxConf())
    assert (found.live_before, found.live_after, found.killed) == (2, 1, 1)
    assert found.refused and "lost" in found.refusals[0]


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
