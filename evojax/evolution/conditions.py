"""A small, safe subset of SQL expressions over named numbers: the language of triggers.

Grammar, keywords in any case: OR, AND, NOT, comparisons (= <> != < <= > >=), + - * /, unary
minus, parentheses, numbers, names. A name is a metric (``entropy``) or a config key
(``algorithm.epochs``). There are no functions, no strings and no way to reach anything else.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping

from evojax.errors import InputError

MAX_LENGTH = 500
MAX_DEPTH = 30
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)"
    r"|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)"
    r"|(?P<op><=|>=|<>|!=|[-+*/()<>=]))"
)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq, "<>": operator.ne, "!=": operator.ne, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
Tokens = list[tuple[str, str]]


class MissingValue(Exception):
    """A name in the expression has no finite value; ``names`` lists every such name."""

    def __init__(self, names: list[str]):
        self.names = names
        super().__init__(f"no value for {', '.join(names)}")


def names_in(expression: str) -> list[str]:
    """Names an expression refers to, in order, each once."""
    found = [text for kind, text in _tokens(expression) if kind == "name"]
    return list(dict.fromkeys(found))


def evaluate(expression: str, values: Mapping[str, float | None]) -> float | bool:
    """Value of ``expression``: a bool for a condition, a float for arithmetic.

    A name without a finite value is never taken for 0.

    Raises:
        MissingValue: some names have no finite value.
        InputError: not in the grammar, or a division by zero.

    >>> evaluate("dead > 0.3 AND NOT epochs = 2", {"dead": 0.5, "epochs": 1})
    True
    """
    missing = [n for n in names_in(expression) if not _finite(values.get(n))]
    if missing:
        raise MissingValue(missing)
    parser = _Parser(expression, values)
    result = parser.disjunction(0)
    parser.end()
    return result


def check(expression: str, kind: type = bool) -> None:
    """Refuse an expression outside the grammar, or of the other kind (bool or float).

    Raises:
        InputError: with the place of the fault.
    """
    result = _Parser(expression, dict.fromkeys(names_in(expression), 1.0), dry=True)
    value = result.disjunction(0)
    result.end()
    if isinstance(value, bool) != (kind is bool):
        want = "a condition such as x > 0.3" if kind is bool else "a number such as x - 0.3"
        raise _fault(expression, f"expected {want}")


def _finite(value: object) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


def _tokens(expression: str) -> Tokens:
    if len(expression) > MAX_LENGTH:
        raise _fault(expression, f"longer than {MAX_LENGTH} characters")
    found, at = [], 0
    text = expression.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _fault(expression, f"cannot read {text[at : at + 12]!r}")
        kind = str(match.lastgroup)
        word = match.group(kind)
        if kind == "name" and word.upper() in ("AND", "OR", "NOT"):
            kind, word = "op", word.upper()
        found.append((kind, word))
        at = match.end()
    return found


def _fault(expression: str, what: str) -> InputError:
    remedy = "use names, numbers, comparisons, AND, OR, NOT, + - * / and parentheses"
    return InputError.one(what, "expression", expression[:120], remedy)


class _Parser:
    """Recursive descent over the tokens, evaluating as it goes."""

    def __init__(self, expression: str, values: Mapping[str, float | None], dry: bool = False):
        self.expression = expression
        self.values = values
        self.dry = dry
        self.tokens = _tokens(expression)
        self.at = 0

    def peek(self) -> str:
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")
        return text if kind == "op" else ""

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][1]

    def end(self) -> None:
        if self.at != len(self.tokens):
            raise _fault(self.expression, f"unexpected {self.tokens[self.at][1]!r}")

    def disjunction(self, depth: int) -> float | bool:
        value = self.conjunction(depth)
        while self.peek() == "OR":
            self.take()
            other = self.truth(self.conjunction(depth))
            value = self.truth(value) or other
        return value

    def conjunction(self, depth: int) -> float | bool:
        value = self.negation(depth)
        while self.peek() == "AND":
            self.take()
            other = self.truth(self.negation(depth))
            value = self.truth(value) and other
        return value

    def negation(self, depth: int) -> float | bool:
        if depth > MAX_DEPTH:
            raise _fault(self.expression, "nested too deep")
        if self.peek() == "NOT":
            self.take()
            return not self.truth(self.negation(depth + 1))
        value = self.sum(depth)
        if self.peek() in _COMPARE:
            compare = _COMPARE[self.take()]
            return compare(self.number(value), self.number(self.sum(depth)))
        return value

    def sum(self, depth: int) -> float | bool:
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            sign = 1.0 if self.take() == "+" else -1.0
            value = self.number(value) + sign * self.number(self.product(depth))
        return value

    def product(self, depth: int) -> float | bool:
        value = self.atom(depth)
        while self.peek() in ("*", "/"):
            times = self.take() == "*"
            other = self.number(self.atom(depth))
            if times:
                value = self.number(value) * other
            elif other != 0.0:
                value = self.number(value) / other
            elif self.dry:
                value = self.number(value)
            else:
                raise _fault(self.expression, "division by zero")
        return value

    def atom(self, depth: int) -> float | bool:
        if depth > MAX_DEPTH:
            raise _fault(self.expression, "nested too deep")
        if self.at >= len(self.tokens):
            raise _fault(self.expression, "ends too early")
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return float(text)
        if kind == "name":
            return float(self.values[text] or 0.0)
        if text == "-":
            return -self.number(self.atom(depth + 1))
        if text == "(":
            value = self.disjunction(depth + 1)
            if self.peek() != ")":
                raise _fault(self.expression, "a parenthesis is not closed")
            self.take()
            return value
        raise _fault(self.expression, f"unexpected {text!r}")

    def truth(self, value: float | bool) -> bool:
        if not isinstance(value, bool):
            raise _fault(self.expression, "AND, OR and NOT join conditions, not numbers")
        return value

    def number(self, value: float | bool) -> float:
        if isinstance(value, bool):
            raise _fault(self.expression, "a condition stands where a number is needed")
        return value
