"""The language of triggers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evojax.errors import InputError
from evojax.evolution.conditions import MissingValue, check, evaluate, names_in

VALUES = {"a": 0.5, "b": 2.0, "algorithm.epochs": 1.0, "zero": 0.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a > 0.3", True), ("a > 0.3 AND b < 1", False), ("a > 0.3 or b < 1", True),
        ("NOT a > 0.3", False), ("NOT (a > 1) and b = 2", True), ("a + b * 2", 4.5),
        ("(a + b) * 2", 5.0), ("-a - -b", 1.5), ("b / a", 4.0), ("algorithm.epochs <> 1", False),
        ("a >= .5 AND a <= 5e-1", True), ("a != b", True), ("a > 1 AND b > 1 OR a < 1", True),
        ("1 - a - a", 0.0),
    ],
)  # fmt: skip
def test_values(text: str, value: float | bool) -> None:
    got = evaluate(text, VALUES)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "text",
    ["", "a >", "a b", "(a > 1", "a > 1)", "a AND b > 1", "NOT a", "(a > 1) + 2", "a < b < 1",
     "__import__(1)", "a; DROP TABLE x", "read_csv('x')", "a > 1 -- x", "a[0]", "a.b.", "a > 1 AND",
     "zero / zero", "(" * 200 + "a" + ")" * 200, "a + " * 200 + "a", "NOT " * 60 + "a > 1"],
)  # fmt: skip
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises((InputError, MissingValue)):
        check(text, bool)
        evaluate(text, VALUES)


def test_a_missing_value_is_named_and_never_zero() -> None:
    with pytest.raises(MissingValue) as caught:
        evaluate("gone < 0.5 OR a > 0 OR nan < 1", VALUES | {"nan": float("nan")})
    assert caught.value.names == ["gone", "nan"]
    assert names_in("x > 1 AND x < y.z OR NOT w = 1") == ["x", "y.z", "w"]


def test_kinds() -> None:
    check("a > 1", bool)
    check("1 / (a - 1)", float)
    for text, kind in (("a + 1", bool), ("a > 1", float)):
        with pytest.raises(InputError):
            check(text, kind)


@given(st.text(max_size=40))
def test_any_text_is_a_value_or_a_clean_error(text: str) -> None:
    try:
        evaluate(text, VALUES)
    except (InputError, MissingValue):
        pass
