"""Reward components and their composition, on values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evojax.errors import InputError
from evojax.evidence.types import Grade, Item
from evojax.rewards.base import REWARDS
from evojax.rewards.compose import compose, weight_problems


def item(answer: str, grader: str = "line") -> Item:
    return Item("q", "t", "?", answer, "train", grader)


def value(name: str, answer: str, grade: Grade, grader: str = "line") -> float:
    return REWARDS.get(name, "t")(item(answer, grader), grade.extracted, grade)


def wrong(text: str, detail: str = "different answer") -> Grade:
    return Grade("wrong", text, detail)


def test_correct() -> None:
    assert value("correct", "7", Grade("correct", "7")) == 1.0
    assert value("correct", "7", wrong("8")) == 0.0


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("7", "8", 0.45),
        ("7", "-2", 0.09),
        ("7", "07", 0.9),
        ("7", "seven", 0.0),
        ("7", "", 0.0),
        ("7", "9" * 400, 0.0),
        ("apple", "apply", 0.72),
        ("apple", "apples", 0.75),
        ("apple", "pear", 0.0),
        ("apple", "3", 0.0),
        ("odd", "even", 0.0),
        (r"\frac{1}{2}", r"\frac{1}{3}", 0.0),
    ],
)
def test_partial(answer: str, text: str, expected: float) -> None:
    assert value("partial", answer, wrong(text)) == pytest.approx(expected)


def test_partial_of_a_right_answer_is_one() -> None:
    assert value("partial", "7", Grade("correct", "7")) == 1.0


@pytest.mark.parametrize(
    ("answer", "grade", "expected"),
    [
        ("7", wrong("8"), 1.0),
        ("7", wrong("8 or 9"), 0.0),
        ("7", wrong("eight"), 0.0),
        ("7", wrong("7", "truncated"), 0.0),
        ("7", wrong("", "empty"), 0.0),
        ("apple", wrong("pear"), 1.0),
        ("apple", wrong("pear tree"), 0.0),
        ("apple", wrong("3"), 0.0),
    ],
)
def test_format(answer: str, grade: Grade, expected: float) -> None:
    assert value("format", answer, grade) == expected


def test_format_of_a_box() -> None:
    assert value("format", "7", wrong(r"\frac{1}{2}"), "boxed") == 1.0
    assert value("format", "7", wrong("", "no final box"), "boxed") == 0.0


def test_compose_weighs_and_keeps_every_component() -> None:
    reward, parts = compose({"correct": 1.0, "partial": 0.2}, item("7"), "8", wrong("8"))
    assert reward == pytest.approx(0.09)
    assert parts == {"correct": 0.0, "partial": 0.45, "format": 1.0}


def test_unscorable_has_no_reward_and_no_components() -> None:
    reward, parts = compose({"correct": 1.0}, item("7"), "", Grade("unscorable"))
    assert math.isnan(reward) and parts == {}


def test_bad_weights_are_all_listed() -> None:
    with pytest.raises(InputError) as caught:
        compose({"corect": 1.0, "format": math.nan}, item("7"), "7", Grade("correct", "7"))
    wheres = [p.where for p in caught.value.problems]
    assert wheres == ["reward.components", "reward.components.format"]
    assert "did you mean 'correct'" in str(caught.value)
    for weights in ({}, {"correct": 0.0}):
        assert [p.where for p in weight_problems(weights)] == ["reward.components"]
    assert weight_problems({"correct": 1.0, "format": -0.5}) == []


GRADES = st.builds(
    Grade,
    status=st.sampled_from(["correct", "wrong"]),
    extracted=st.text(max_size=12),
    detail=st.sampled_from(["", "truncated", "different answer"]),
)
WEIGHTS = st.dictionaries(
    st.sampled_from(["correct", "partial", "format"]), st.floats(-2, 2), min_size=1
).filter(lambda w: any(w.values()))


@given(weights=WEIGHTS, grade=GRADES, answer=st.sampled_from(["7", "-3", "0.5", "apple", "r"]))
def test_components_are_bounded_and_the_sum_is_linear(weights, grade, answer) -> None:
    reward, parts = compose(weights, item(answer), grade.extracted, grade)
    assert set(parts) == set(REWARDS)
    assert all(0.0 <= v <= 1.0 for v in parts.values())
    assert parts["partial"] < 1.0 or grade.status == "correct"
    assert reward == pytest.approx(sum(w * parts[n] for n, w in weights.items()))
    double, _ = compose({n: 2 * w for n, w in weights.items()}, item(answer), "", grade)
    assert double == pytest.approx(2 * reward)


@given(st.integers(-1000, 1000), st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_nearer_numbers_never_earn_less(want: int, a: int, b: int) -> None:
    near, far = sorted((a, b), key=lambda n: abs(n - want))
    near_value, far_value = (value("partial", str(want), wrong(str(n))) for n in (near, far))
    assert near_value >= far_value
