from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evojax.rollout.prefix import plan_prefixes


def ids(*parts: Iterable[int]) -> np.ndarray:
    return np.array([i for part in parts for i in part], np.int32)


def test_families_are_found_and_a_lone_prompt_keeps_a_short_rest():
    first = [ids(range(40), [90 + i, 91]) for i in range(3)]
    second = [ids(range(50, 80), [7, i]) for i in range(2)]
    lone = ids(range(200, 230))
    plan = plan_prefixes([first[0], second[0], lone, first[1], second[1], first[2]])
    assert sorted(map(len, plan.prefixes)) == [14, 31, 40]
    assert [len(r) for r in plan.rests] == [2, 1, 16, 2, 1, 2]
    assert plan.which[0] == plan.which[3] == plan.which[5]


def test_equal_prompts_keep_one_token_each():
    plan = plan_prefixes([ids(range(20))] * 3)
    assert [len(r) for r in plan.rests] == [1, 1, 1] and len(plan.prefixes) == 1


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=12))
def test_prefix_and_rest_always_give_the_prompt_back(texts):
    prompts = [np.array(t, np.int32) for t in texts]
    plan = plan_prefixes(prompts)
    for prompt, which, rest in zip(prompts, plan.which, plan.rests, strict=True):
        assert len(rest) >= 1
        np.testing.assert_array_equal(np.concatenate([plan.prefixes[which], rest]), prompt)
