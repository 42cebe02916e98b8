"""When two mathematical answers are equal: exact first, tolerance only by the reference's form.

It runs in the worker process that may be killed at any time, on math-verify's expression types.
The library compares with an absolute tolerance, which makes 1/2^99 equal 1/2^98; its comparison of
scalars is therefore replaced by :func:`scalar_equal`, also inside sets, matrices and equations.

- exact against exact: the same number (rational arithmetic, or 50 significant digits);
- exact reference, decimal answer: equal, or for a non-integer 6 significant digits agree;
- decimal reference of 3 or more significant digits: the answer rounds to its digits;
- shorter decimal reference (0.5): the very value.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

import math_verify.grader as library
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from sympy import Float, Integer, MatrixBase, Rational, floor, log, nan, simplify, zoo
from sympy.core.relational import Equality, Relational

NORMAL_FORM = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none"
)
DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
SPACING = re.compile(r"\\[,;:! ]|~")
SUFFIX = re.compile(r"(?:\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*$")
UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|mathrm|mbox)\s*\{[A-Za-z .]{1,20}\}(?:\^\{?\d\}?)?\s*$")
COMMAND = re.compile(r"\\(?:begin|end|operatorname)\s*\{[A-Za-z]+\*?\}|\\[A-Za-z]+")
TEXT = re.compile(r"\\text(?:rm|bf|it)?\s*\{\s*([A-Za-z]{2,})\s*\}|([A-Za-z]{4,})")
PROSE = re.compile(r"[A-Za-z]{4,}|[A-Za-z]{2,}[\s,]+[A-Za-z]{2,}")
INNER_TEXT = re.compile(r"\\(?:text|mathrm|mbox)[a-z]*\s*\{(?!\s*(?:[A-Za-z]|and|or)\s*\})")
DIGIT_GAP = re.compile(r"\d\s+\d")
BASE_SUFFIX = re.compile(r"\d\s*_")
RELATIVE_DIGITS = 50
ROUNDING_DIGITS = 3


class Unparsed(ValueError):
    """The text is not wholly one mathematical answer."""


@lru_cache(maxsize=256)
def parse(text: str) -> Any:
    r"""A sympy expression for the whole of ``text``, or a lower-case word.

    Both sides of a comparison go through here: one pair of delimiters or a box is taken off,
    ``%``, degree signs and a trailing unit are dropped. Prose, or a text of which only a part can
    be read, raises.

    Raises:
        Unparsed: the text is not wholly mathematics.
    """
    bare = undelimited(text)
    word = TEXT.fullmatch(bare)
    if word:
        return (word[1] or word[2]).lower()
    reason = refusal(bare)
    if reason:
        raise Unparsed(reason)
    normal = normalize_latex(bare, NORMAL_FORM)
    if not normal.strip():
        raise Unparsed("nothing is left after normalisation")
    is_real = not library.should_treat_as_complex(normal)
    try:
        value = latex2sympy(
            normal, is_real=is_real, convert_degrees=False, normalization_config=None
        )
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        raise Unparsed(f"not readable as mathematics: {type(error).__name__}") from error
    if value in (zoo, nan):
        raise Unparsed("undefined value")
    return value


def undelimited(text: str) -> str:
    """``text`` without its outer box, dollar signs, thin spaces and unit signs."""
    bare = text.strip()
    for left, right in DELIMITERS:
        if len(bare) > len(left) + len(right) and bare.startswith(left) and bare.endswith(right):
            bare = bare[len(left) : -len(right)].strip()
            break
    boxed = BOXED.fullmatch(bare)
    bare = boxed[1].strip() if boxed else bare
    bare = SPACING.sub("", bare).replace(r"\$", "")
    bare = UNIT.sub("", SUFFIX.sub("", bare))
    return bare.strip().removesuffix(".").strip()


def refusal(bare: str) -> str | None:
    """Why the text cannot be an answer that is read to its end, or None."""
    depth = 0
    for char in bare.replace(r"\{", "").replace(r"\}", ""):
        depth += (char == "{") - (char == "}")
        if depth < 0:
            break
    checks = (
        (not bare, "empty"),
        (bool(PROSE.search(COMMAND.sub("*", bare))), "prose"),
        (bool(INNER_TEXT.search(bare)), "text inside a formula"),
        (depth != 0, "unbalanced braces"),
        ("$" in bare, "more than one formula"),
        (bool(DIGIT_GAP.search(bare)), "two numbers side by side"),
        (bool(BASE_SUFFIX.search(bare)), "number in another base"),
    )
    return next((reason for bad, reason in checks if bad), None)


def equal(gold: Any, answer: Any) -> bool:
    """Whether two parsed answers are the same; ``gold`` decides how decimals are treated."""
    if isinstance(gold, str) or isinstance(answer, str):
        return isinstance(gold, str) and isinstance(answer, str) and gold == answer
    if not isinstance(gold, Relational) and isinstance(answer, library.And):
        return False
    if isinstance(answer, Equality) and not isinstance(gold, (Relational, library.And)):
        if not answer.lhs.free_symbols or answer.rhs.free_symbols & answer.lhs.free_symbols:
            return False
    return bool(library.sympy_expr_eq(gold, answer, float_rounding=6, numeric_precision=15))


def scalar_equal(
    gold: Any, answer: Any, float_rounding: int = 6, numeric_precision: int = 15
) -> bool:
    """Equality of two numbers, or of two matrices of numbers, under the rules of this module.

    The last two arguments are the library's absolute tolerances; they are not used.
    """
    if isinstance(gold, MatrixBase) or isinstance(answer, MatrixBase):
        if not (isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase)):
            return False
        pairs = zip(gold.flat(), answer.flat(), strict=False)
        return gold.shape == answer.shape and all(
            library.sympy_expr_eq(a, b, float_rounding, numeric_precision) for a, b in pairs
        )
    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return False
    gold, answer = gold.doit(), answer.doit()
    if gold in (zoo, nan) or answer in (zoo, nan):
        return False
    if gold.is_finite is False or answer.is_finite is False:
        return bool(gold == answer)
    if gold.has(Float):
        return decimal_gold(gold, answer)
    if answer.has(Float):
        return decimal_answer(gold, answer)
    if isinstance(gold, Rational) and isinstance(answer, Rational):
        return bool(gold == answer)
    return close(gold, answer, RELATIVE_DIGITS)


def symbolic_equal(gold: Any, answer: Any) -> bool:
    """Whether the difference simplifies to zero; running out of memory or stack is no answer.

    Raises:
        MemoryError, RecursionError: the comparison could not be made.
    """
    try:
        difference = simplify(gold - answer)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the two cannot be subtracted, or sympy does not know how to simplify them
        return False
    if isinstance(difference, MatrixBase):
        return bool(difference.is_zero_matrix)
    return bool(getattr(difference, "is_zero", False))


def decimal_gold(gold: Any, answer: Any) -> bool:
    """A decimal reference: the answer rounds to its digits if it has at least three."""
    if not isinstance(gold, Float):
        return close(gold, answer, 6)
    exact = rational(gold)
    digits, places = shown_digits(exact)
    value = rational(answer) if isinstance(answer, (Float, Rational)) else answer.evalf(40)
    if digits < ROUNDING_DIGITS:
        return bool(value == exact) or close(exact, answer, RELATIVE_DIGITS)
    if not value.is_real:
        return False
    return bool(abs(value - exact) <= Rational(1, 2 * 10**places))


def decimal_answer(gold: Any, answer: Any) -> bool:
    """A decimal answer to an exact reference: equal, or 6 digits of a non-integer agree."""
    value = rational(answer) if isinstance(answer, Float) else answer
    if isinstance(gold, Integer) or not gold.is_real:
        return bool(value == gold)
    size = abs(gold.evalf(20))
    if size == 0:
        return bool(value == 0)
    exponent = int(floor(log(size, 10)))
    unit = Rational(10) ** (exponent - 5)
    return bool(abs(value - gold.evalf(40)) <= unit / 2)


def close(a: Any, b: Any, digits: int) -> bool:
    """Relative agreement of two finite numbers to ``digits`` significant digits."""
    x, y = a.evalf(digits + 15), b.evalf(digits + 15)
    return bool(abs(x - y) <= Rational(1, 2 * 10 ** (digits - 1)) * max(abs(x), abs(y)))


def rational(number: Any) -> Any:
    """The decimal that a Float was written as, exactly (a Rational is returned as it is)."""
    return number if isinstance(number, Rational) else Rational(str(number))


def shown_digits(exact: Rational) -> tuple[int, int]:
    """Significant digits and decimal places of a terminating decimal, trailing zeros left out.

    >>> shown_digits(Rational("33.3")), shown_digits(Rational("0.5"))
    ((3, 1), (1, 1))
    """
    places = 0
    while (exact * 10**places).q != 1:
        places += 1
    return len(str(abs((exact * 10**places).p))), places


library.sympy_numeric_eq = scalar_equal
library.sympy_symbolic_eq = symbolic_equal
logging.getLogger("math_verify").disabled = True


def judge(gold: str, answer: str) -> str:
    """``correct``, ``wrong`` or ``bad_gold`` (the reference itself cannot be read)."""
    try:
        reference = parse(gold)
    except Unparsed:
        return "bad_gold"
    try:
        return "correct" if equal(reference, parse(answer)) else "wrong"
    except Unparsed:
        return "wrong"
