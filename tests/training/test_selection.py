from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.config import DataConf
from evojax.errors import InputError
from evojax.evidence.types import Item
from evojax.training.selection import SELECTORS, ItemStats, selection_weights, uniform


def pool(per_task: int, tasks: tuple[str, ...] = ("add", "gcd")) -> list[Item]:
    return [
        Item(f"{t}/{i}", t, f"{i} =", str(i), "train", "line")
        for t in tasks
        for i in range(per_task)
    ]


def draw(items: list[Item], step: int, count: int, seed: int = 0) -> list[str]:
    return [x.id for x in uniform(items, step, count, seed, ItemStats(), DataConf(), 0)]


def test_tasks_take_turns() -> None:
    tasks = [x.split("/")[0] for x in draw(pool(5), 0, 4)]
    assert tasks == ["add", "gcd", "add", "gcd"]


@settings(max_examples=20)
@given(st.integers(1, 7), st.integers(1, 6), st.integers(0, 99))
def test_every_item_once_per_pass(per_task: int, count: int, seed: int) -> None:
    items = pool(per_task, ("only",))
    seen: list[str] = []
    for step in range(math.ceil(2 * per_task / count)):
        seen += draw(items, step, count, seed)
    assert sorted(seen[:per_task]) == sorted(x.id for x in items)
    assert sorted(seen[per_task : 2 * per_task]) == sorted(x.id for x in items)


def test_selection_has_no_hidden_state() -> None:
    items = pool(9)
    straight = [draw(items, s, 4) for s in range(6)]
    assert [draw(items, s, 4) for s in reversed(range(6))] == straight[::-1]


def test_refill_draws_from_its_own_stream() -> None:
    items = pool(50)
    main = uniform(items, 3, 8, 0, ItemStats(), DataConf(), 0)
    extra = uniform(items, 3, 8, 0, ItemStats(), DataConf(), 1)
    assert [x.id for x in main] != [x.id for x in extra]


def test_difficulty_weights_by_hand() -> None:
    items = pool(2, ("add",))
    stats = ItemStats()
    stats.add("add/0", 8, 8)
    stats.add("add/1", 4, 8)
    # task rate 12/16 = .75; shrunk: (8 + 1.5) / 10 = .95 and (4 + 1.5) / 10 = .55
    raw = np.exp([-2 * 0.45 / 0.5, -2 * 0.05 / 0.5])
    got = selection_weights(items, stats, DataConf("difficulty", 0.5, 2.0))
    np.testing.assert_allclose(got, raw / raw.sum(), rtol=1e-12)


def test_difficulty_draws_without_replacement_and_prefers_the_target() -> None:
    items = pool(20, ("add",))
    stats = ItemStats()
    for i in range(20):
        stats.add(f"add/{i}", 8 if i < 10 else 4, 8)
    conf = DataConf("difficulty", 0.5, 8.0)
    select = SELECTORS.get("difficulty", "data.selection")
    hard = 0
    for step in range(50):
        ids = [x.id for x in select(items, step, 5, 0, stats, conf, 0)]
        assert len(set(ids)) == 5
        hard += sum(int(x.split("/")[1]) >= 10 for x in ids)
    assert hard > 0.9 * 250


def test_unknown_selection_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'difficulty'"):
        SELECTORS.get("dificulty", "data.selection")
