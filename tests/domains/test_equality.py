"""When two mathematical answers are equal."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.domains.math.equality import Unparsed, judge, parse


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        ("3*x-1*y+13=0", "3x + 4y + 14=0"),
        ("$4$", r"4\sqrt(2)"),
        ("4210", "4210_5"),
        (r"\{1, \frac{1}{2^{99}}\}", r"\{1, \frac{1}{2^{98}}\}"),
        (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}"),
        (r"10^{50}", r"10^{50}+1"),
    ],
)
def test_case_M05_no_absolute_tolerance_and_no_partial_reading(gold: str, answer: str) -> None:
    assert judge(gold, answer) == "wrong"
    assert judge(gold, gold) == "correct"


def test_case_M04_bare_latex_is_read_and_prose_is_not() -> None:
    assert judge(r"\dfrac{9}{7}", r"\frac{9}{7}") == "correct"
    for gold in ("see the proof above", "", "4210_5", "7 8", r"3 \text{ or so, see 4}", "5 }{ 6"):
        assert judge(gold, "7") == "bad_gold"


@pytest.mark.parametrize(
    ("gold", "answer", "result"),
    [
        ("33.3", r"\frac{100}{3}", "correct"),
        ("33.3", "33.4", "wrong"),
        (r"\frac13", "0.333333", "correct"),
        (r"\frac13", "0.33", "wrong"),
        ("10", "10.0000001", "wrong"),
        ("10", "10.0", "correct"),
        ("0.5", "0.46", "wrong"),
        ("0.5", r"\frac12", "correct"),
        (r"\frac{1}{3000}", "0.000333333", "correct"),
        (r"\sqrt{2}", "1.41421", "correct"),
        (r"\sqrt{2}", "1.4142", "wrong"),
        ("0", "0.0000001", "wrong"),
        ("1000000", "999999.9", "wrong"),
    ],
)
def test_case_M13_decimals_are_treated_by_the_form_of_the_reference(
    gold: str, answer: str, result: str
) -> None:
    assert judge(gold, answer) == result


@pytest.mark.parametrize(
    ("gold", "answer", "result"),
    [
        ("2,3", "3, 2", "correct"),
        ("2,3", "2", "wrong"),
        ("3", "1, 2, 3", "wrong"),
        ("x=3", "3", "correct"),
        ("3", "x=3", "correct"),
        ("3", "1=3", "wrong"),
        ("3", "1=2=3", "wrong"),
        ("1,000", "1000", "correct"),
        (r"10\,000", "10000", "correct"),
        (r"50\%", "50", "correct"),
        (r"90^\circ", "90", "correct"),
        (r"10\text{ inches}", "10", "correct"),
        ("3", r"3 \text{ or 4}", "wrong"),
        (r"\sqrt{8}", r"2\sqrt{2}", "correct"),
        ("(x+1)^2", "x^2+2x+1", "correct"),
        ("y=2x+1", "y=1+2x", "correct"),
        ("y=2x+1", "y=2x+2", "wrong"),
        ("3<x", "x>3", "correct"),
        ("[0,1]", "(0,1)", "wrong"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", "correct"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}", "wrong"),
        (r"\infty", r"-\infty", "wrong"),
        ("1+i", "1-i", "wrong"),
        ("3", r"\frac{1}{0}", "wrong"),
        (r"\text{Monday}", "monday", "correct"),
        ("A", "B", "wrong"),
        ("7", "7.", "correct"),
        ("5", "5^", "wrong"),
    ],
)
def test_forms_of_answers(gold: str, answer: str, result: str) -> None:
    assert judge(gold, answer) == result


@settings(max_examples=40, deadline=None)
@given(a=st.integers(-(10**20), 10**20), b=st.integers(1, 10**20), k=st.integers(1, 50))
def test_fractions_are_compared_exactly(a: int, b: int, k: int) -> None:
    sign = "-" if a < 0 else ""
    gold = rf"{sign}\frac{{{abs(a)}}}{{{b}}}"
    assert judge(gold, rf"{sign}\frac{{{abs(a) * k}}}{{{b * k}}}") == "correct"
    moved = Fraction(a, b) + Fraction(1, b)
    sign = "-" if moved < 0 else ""
    other = rf"{sign}\frac{{{abs(moved.numerator)}}}{{{moved.denominator}}}"
    assert judge(gold, other) == "wrong"


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="0123x+-*/=^_{}(),.\\ fracsqt$%", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse(text)
    except Unparsed:
        assert judge(text, "1") == "bad_gold"


def test_case_M16_hydra_and_the_latex_parser_share_one_process() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    override = OverridesParser.create().parse_override("algorithm.lr=1e-5")
    assert override.value() == 1e-5
    assert OmegaConf.create({"a": "${b}", "b": 2}).a == 2
    assert judge(r"\boxed{\frac12}", "0.5") == "correct"
    assert importlib.metadata.version("antlr4-python3-runtime") == "4.9.3"


@pytest.mark.slow
def test_case_M16_installed_packages_fit_together() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_words_and_numbers_are_never_equal() -> None:
    assert judge("even", "2") == "wrong" and judge("2", "even") == "wrong"
