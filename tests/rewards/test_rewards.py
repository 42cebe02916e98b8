"""Reward components and their composition, on values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evojax.errors import InputError
from evojax.evidence.types import Grade, Item
from evojax.rewards.base import REWARDS, Scored
from evojax.rewards.compose import compose, contributions, weight_problems
from evojax.rewards.overlong import length_penalty


def item(answer: str, grader: str = "line") -> Item:
    return Item("q", "t", "?", answer, "train", grader)


def scored(answer: str, grade: Grade, grader: str = "line", tokens: int = 2) -> Scored:
    """A completion of ``tokens`` of at most 10 tokens, the penalty rising over the last 4."""
    return Scored(item(answer, grader), grade.extracted, grade, tokens, 10, 4)


def value(name: str, answer: str, grade: Grade, grader: str = "line") -> float:
    return REWARDS.get(name, "t")(scored(answer, grade, grader))


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
    reward, parts = compose({"correct": 1.0, "partial": 0.2}, scored("7", wrong("8")))
    assert reward == pytest.approx(0.09)
    assert parts == {"correct": 0.0, "partial": 0.45, "format": 1.0, "overlong": 0.0}


def test_unscorable_has_no_reward_and_no_components() -> None:
    reward, parts = compose({"correct": 1.0}, scored("7", Grade("unscorable")), 2.0)
    assert math.isnan(reward) and parts == {}


def test_bad_weights_are_all_listed() -> None:
    with pytest.raises(InputError) as caught:
        compose({"corect": 1.0, "format": math.nan}, scored("7", Grade("correct", "7")))
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
    st.sampled_from(["correct", "partial", "format", "overlong"]), st.floats(-2, 2), min_size=1
).filter(lambda w: any(w.values()))


@given(
    weights=WEIGHTS,
    grade=GRADES,
    answer=st.sampled_from(["7", "-3", "0.5", "apple", "r"]),
    tokens=st.integers(0, 12),
)
def test_components_are_bounded_and_the_sum_is_linear(weights, grade, answer, tokens) -> None:
    one = scored(answer, grade, tokens=tokens)
    reward, parts = compose(weights, one)
    assert set(parts) == set(REWARDS)
    assert -1.0 <= parts["overlong"] <= 0.0
    assert all(0.0 <= v <= 1.0 for name, v in parts.items() if name != "overlong")
    assert parts["partial"] < 1.0 or grade.status == "correct"
    assert reward == pytest.approx(sum(w * parts[n] for n, w in weights.items()))
    assert reward == pytest.approx(sum(contributions(weights, parts).values()))
    double, _ = compose({n: 2 * w for n, w in weights.items()}, one)
    assert double == pytest.approx(2 * reward)
    assert compose(weights, one, 0.3)[0] == min(max(reward, -0.3), 0.3)


def test_a_clip_cuts_the_sum_and_leaves_the_components() -> None:
    right = scored("7", Grade("correct", "7"))
    assert compose({"correct": 3.0}, right, 2.0)[0] == 2.0
    assert compose({"correct": -3.0}, right, 2.0) == (-2.0, compose({"correct": 1.0}, right)[1])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20479, -4095 / 4096),
     (20480, -1.0), (20481, -1.0), (10**6, -1.0)],
)  # fmt: skip
def test_overlong_penalty_with_the_numbers_of_the_paper(tokens: int, expected: float) -> None:
    assert length_penalty(tokens, 20480, 4096) == expected


def test_overlong_is_measured_in_tokens_not_characters() -> None:
    long_text = wrong("9" * 400)
    assert REWARDS.get("overlong", "t")(scored("7", long_text, tokens=6)) == 0.0
    assert REWARDS.get("overlong", "t")(scored("7", wrong("9"), tokens=8)) == -0.5


@given(st.integers(0, 50), st.integers(1, 40), st.integers(0, 40))
def test_overlong_never_rises_with_length(tokens: int, budget: int, buffer: int) -> None:
    buffer = min(buffer, budget)
    here, longer = (length_penalty(n, budget, buffer) for n in (tokens, tokens + 1))
    assert -1.0 <= longer <= here <= 0.0
    assert here == (-1.0 if tokens >= budget else here)
    if buffer:
        exact = min(0.0, max(-1.0, ((budget - buffer) - tokens) / buffer))
        assert here == pytest.approx(exact)


@given(st.integers(-1000, 1000), st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_nearer_numbers_never_earn_less(want: int, a: int, b: int) -> None:
    near, far = sorted((a, b), key=lambda n: abs(n - want))
    near_value, far_value = (value("partial", str(want), wrong(str(n))) for n in (near, far))
    assert near_value >= far_value
