"""Finds the final boxed answer of a completion. One pass over the text, no backtracking.

Strict rule: only a complete, non-empty box after the end of the thinking section counts, and of
those the last. Boxes joined by nothing but "and", "or" or a comma form one answer of several parts:
a multi-part reference accepts them, and listing candidates does not match a single-valued one.
There is no fall-back to a bare number in the text.
"""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
BARE_NUMBER = re.compile(r"\s++(-?\d++(?:\.\d++)?+)(?![\w^\\])")
DELIMITERS = (r"\(", r"\)", r"\[", r"\]")
JOINS = ("", "and", "or")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def after_thinking(text: str) -> str:
    """The part after the last thinking section; "" while that section is still open.

    >>> after_thinking("<think>5?</think> It is 4.")
    ' It is 4.'
    >>> after_thinking("<think>still at it")
    ''
    """
    close = text.rfind(THINK_CLOSE)
    rest = text[close + len(THINK_CLOSE) :] if close >= 0 else text
    return "" if THINK_OPEN in rest else rest


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""All complete, non-empty boxes as (start, end, content), outermost only.

    ``\boxed{...}``, ``\fbox{...}`` and ``\boxed 2`` (a plain number without braces) are boxes.
    A box that is never closed is none.

    >>> [content for _, _, content in boxes(r"\boxed{\frac{1}{3}} \boxed 2 \boxed{} \boxed{7")]
    ['\\frac{1}{3}', '2']
    """
    closing = matching_braces(text)
    found: list[tuple[int, int, str]] = []
    end = 0
    for match in BOX.finditer(text):
        start, at = match.span()
        if start < end:
            continue
        brace = at
        while brace < len(text) and text[brace] in " \t":
            brace += 1
        if brace in closing:
            content = text[brace + 1 : closing[brace]].strip()
            if content:
                end = closing[brace] + 1
                found.append((start, end, content))
        elif bare := BARE_NUMBER.match(text, at):
            end = bare.end()
            found.append((start, end, bare[1]))
    return found


def joins(between: str) -> bool:
    r"""Whether the text between two boxes only links them: "and", "or", a comma, dollar signs.

    >>> joins(" and "), joins(r"$, $"), joins(", no: "), joins("\n")
    (True, True, False, False)
    """
    for mark in DELIMITERS:
        between = between.replace(mark, "$")
    return bool(between.strip()) and between.strip(" \t\r\n,;$") in JOINS


def matching_braces(text: str) -> dict[int, int]:
    r"""Index of the closing brace for each opening one; ``\{`` and ``\}`` are plain characters."""
    closing: dict[int, int] = {}
    open_at: list[int] = []
    escaped = False
    for i, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            open_at.append(i)
        elif char == "}" and open_at:
            closing[open_at.pop()] = i
    return closing


def final_answer(text: str) -> str | None:
    r"""Content of the final box, or None when there is no complete one.

    >>> final_answer(r"first \boxed{5}, no: \boxed{3}")
    '3'
    >>> final_answer(r"\boxed{2} and \boxed{3}")
    '2, 3'
    >>> final_answer("I cannot decide: 1, 2, 3") is None
    True
    """
    visible = after_thinking(text)
    found = boxes(visible)
    if not found:
        return None
    parts = [found[-1][2]]
    for left, right in zip(reversed(found[:-1]), reversed(found[1:]), strict=True):
        between = visible[left[1] : right[0]]
        if not joins(between):
            break
        parts.append(left[2])
    return ", ".join(reversed(parts))
