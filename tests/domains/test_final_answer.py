"""The strict final-answer rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.domains.math.final_answer import after_thinking, boxes, final_answer, matching_braces


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"),
        (r"\boxed 2", "2"),
        (r"\fbox{42}", "42"),
        (r"\boxed{\text{a {b}}}", r"\text{a {b}}"),
        (r"\boxed{7", None),
    ],
)
def test_case_M08_braces_are_matched(text: str, content: str | None) -> None:
    assert final_answer(text) == content


@pytest.mark.parametrize("text", ["I cannot decide: 1, 2, 3", "7 ... maybe 3", "", r"\boxed{"])
def test_case_M03_without_a_box_there_is_no_answer(text: str) -> None:
    assert final_answer(text) is None


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"first \boxed{5}, no: \boxed{3}", "3"),
        (r"<think>\boxed{3}</think> so \boxed{4}", "4"),
        (r"Mark with \boxed . Answer \boxed{3}", "3"),
        (r"\boxed{2} and \boxed{3}", "2, 3"),
        (r"$\boxed{2}$, $\boxed{3}$", "2, 3"),
        (r"\boxed{1}, \boxed{2} or \boxed{3}", "1, 2, 3"),
        (r"\boxed{5} \boxed{}", "5"),
        (r"\boxed{5} then \boxed{7", "5"),
        (r"\boxed{3} <think>hm", None),
        (r"so it goes </think> \boxed{4}", "4"),
        (r"\boxed{4} </think> so", None),
        (r"put it in \boxed format", None),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {6}", "6"),
        (r"\boxed 2x", None),
        (r"\boxed 3.", "3"),
        (r"\boxed 3.5.", "3.5"),
        (r"\boxedtext{3}", None),
        (r"\boxed 3", "3"),
        ("\\boxed{\n 9 \n}", "9"),
    ],
)
def test_case_M07_the_last_complete_box_after_thinking_counts(
    text: str, content: str | None
) -> None:
    assert final_answer(text) == content


def test_thinking_is_cut_at_its_last_end() -> None:
    assert after_thinking("<think>a</think>b<think>c</think>d") == "d"
    assert after_thinking("plain") == "plain"


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="\\boxed{} 12,$<think>/and.\n", max_size=80))
def test_any_text_gives_none_or_a_closed_box(text: str) -> None:
    answer = final_answer(text)
    assert answer is None or answer.strip()
    for start, end, content in boxes(text):
        assert 0 <= start < end <= len(text) and content in text[start:end]


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab12{} ^_", max_size=40))
def test_content_of_a_closed_box_comes_back(content: str) -> None:
    closed = content.count("{") == content.count("}") == len(matching_braces(content))
    if closed and content.strip():
        assert final_answer("so \\boxed{" + content + "} .") == content.strip()


def test_case_M08_a_hostile_text_takes_linear_work() -> None:
    blanks = " " * 50_000
    for text in (
        "\\boxed{" * 50_000,
        "\\boxed " * 50_000,
        "{" * 200_000,
        "\\boxed{1}, " * 20_000,
        "\\boxed " + "1" * 50_000 + "x",
        "\\boxed" + blanks + "x",
        "\\boxed{1}" + blanks + "x" + blanks + "\\boxed{2}",
    ):
        final_answer(text)
