"""Problems from a JSONL file, one object a line.

``{"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4", "domain": "math_rule",
"tag": "sums"}``

``messages`` end with the user's; ``answer`` is a text or a number; ``tag`` (optional) names the
item's task in tables; further keys are allowed and not read. The split sizes of the configuration
count for the file as a whole. Texts are brought to Unicode NFC.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evojax.config import DomainConf
from evojax.domains.math.graders import BoxedGrader
from evojax.domains.math.splits import deal, digest
from evojax.errors import InputError, Problem
from evojax.evidence.types import Item

MAX_LINE_BYTES = 1 << 20
SHOWN_PROBLEMS = 100
RULE = "math_rule"
ROLES = ("system", "user", "assistant")
PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})(?:\.\d{1,12})?")


@dataclass(frozen=True)
class LoadReport:
    """What was left out: duplicate prompts, and items whose reference cannot be used.

    Args:
        duplicates: lines whose prompt, blanks aside, was there before.
        unscorable: line number and reason each.
    """

    duplicates: int = 0
    unscorable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One sound line of the file."""

    line: int
    messages: tuple[dict[str, str], ...]
    answer: str
    tag: str

    def prompt(self, chat: bool) -> str:
        """Text that identifies the question: the last message, or with ``chat`` all of them."""
        if chat:
            return "\n".join(f"{m['role']}: {m['content']}" for m in self.messages)
        return self.messages[-1]["content"]


def load_jsonl(conf: DomainConf, grader: BoxedGrader) -> tuple[list[Item], LoadReport]:
    """Items of the file ``conf.path``, dealt into the three splits by the hash of their prompt.

    Args:
        grader: the boxed grader; its worker checks that every reference can be read.

    Raises:
        InputError: the file is missing, empty or too small, or lines are faulty (all are listed).
        UnavailableError: the grader cannot check any reference.
    """
    rows = read_rows(Path(str(conf.path)))
    unique: dict[str, Row] = {}
    conflicts: set[str] = set()
    duplicates = 0
    for row in rows:
        key = " ".join(row.prompt(conf.chat).split())
        first = unique.setdefault(key, row)
        duplicates += first is not row
        if first.answer != row.answer:
            conflicts.add(key)
    unscorable: list[str] = []
    pool: dict[str, Row] = {}
    for key, row in unique.items():
        why = "another line has the same prompt and a different answer"
        if key not in conflicts:
            plain = PLAIN_NUMBER.fullmatch(row.answer)
            why = None if plain else grader.reference_fault(row.answer)
        if why:
            unscorable.append(f"line {row.line}: {why}")
        else:
            pool[key] = row
    parts = deal(pool, "jsonl", conf)
    items = [
        Item(
            id=f"jsonl/{digest(row.prompt(conf.chat))[:16]}",
            task=row.tag,
            prompt=row.prompt(conf.chat),
            answer=row.answer,
            split=split,
            grader="boxed",
            stop=(),
            chat=row.messages if conf.chat else None,
        )
        for split, members in parts.items()
        for row in members
    ]
    return items, LoadReport(duplicates, tuple(unscorable))


def read_rows(path: Path) -> list[Row]:
    """All rows of the file.

    Raises:
        InputError: missing, unreadable or empty file, or faulty lines, all of them listed.
    """
    rows: list[Row] = []
    faults: list[tuple[int, str]] = []
    try:
        for number, raw in lines(path):
            try:
                row = parse_line(number, raw)
            except ValueError as error:
                faults.append((number, str(error)))
            else:
                rows += [row] if row else []
    except OSError as error:
        raise InputError.one(
            f"cannot be read: {error.strerror}", "domain.path", str(path), "name a readable file"
        ) from error
    if faults:
        raise InputError(fault_list(path, faults))
    if not rows:
        raise InputError.one(
            "the file has no item", "domain.path", str(path), "give one JSON object a line"
        )
    return rows


def fault_list(path: Path, faults: list[tuple[int, str]]) -> list[Problem]:
    """One problem per faulty line; from the hundredth on, the line numbers in one problem."""
    problems = [
        Problem(f"line {number}: {what}", "domain.path", str(path), "correct or remove the line")
        for number, what in faults[:SHOWN_PROBLEMS]
    ]
    if len(faults) > SHOWN_PROBLEMS:
        rest = ", ".join(str(number) for number, _ in faults[SHOWN_PROBLEMS:])
        more = f"{len(faults) - SHOWN_PROBLEMS} more faulty lines: {rest}"
        problems.append(Problem(more, "domain.path", str(path), "correct or remove them"))
    return problems


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without their ends; of a huge line only its first megabyte and a bit."""
    with path.open("rb") as file:
        number = 0
        while chunk := file.readline(MAX_LINE_BYTES + 2):
            number += 1
            tail = chunk
            while not tail.endswith(b"\n") and tail:
                tail = file.readline(MAX_LINE_BYTES)
            if number == 1:
                chunk = chunk.removeprefix(b"\xef\xbb\xbf")
            yield number, chunk.rstrip(b"\r\n")


def parse_line(number: int, raw: bytes) -> Row | None:
    """The row on one line, None for a blank line.

    Raises:
        ValueError: what is wrong with the line.
    """
    if not raw.strip():
        return None
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    try:
        data = json.loads(text, object_pairs_hook=unique_keys, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    faults: list[str] = []
    messages = read_messages(data.get("messages"), faults)
    answer = read_answer(data.get("answer"), faults)
    if data.get("domain") != RULE:
        faults.append(f"domain is {data.get('domain')!r}, not {RULE!r}")
    tag = data.get("tag") if data.get("tag") is not None else "jsonl"
    if not isinstance(tag, str) or not tag.strip():
        faults.append("tag is not a text")
    if faults:
        raise ValueError("; ".join(faults))
    return Row(number, messages, answer, clean(str(tag), "tag", []))


def read_messages(value: Any, faults: list[str]) -> tuple[dict[str, str], ...]:
    """The chat messages; what is wrong with them is added to ``faults``."""
    if not isinstance(value, list) or not value:
        faults.append("messages is not a non-empty list")
        return ()
    messages = []
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ROLES or not isinstance(content, str):
            faults.append(f"a message needs a role of {', '.join(ROLES)} and a content text")
            return ()
        messages.append({"role": role, "content": clean(content, "content", faults)})
    if messages[-1]["role"] != "user":
        faults.append("the last message is not the user's")
    elif not messages[-1]["content"].strip():
        faults.append("the user's message is empty")
    return tuple(messages)


def read_answer(value: Any, faults: list[str]) -> str:
    """The reference as text; an empty one passes, for it is unscorable rather than faulty."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        faults.append("answer is not a text or a number")
        return ""
    return clean(str(value), "answer", faults).strip()


def clean(text: str, name: str, faults: list[str]) -> str:
    """NFC form with plain line ends; NUL and lone surrogates are faults."""
    if "\x00" in text:
        faults.append(f"{name} holds a NUL character")
    if any("\ud800" <= char <= "\udfff" for char in text):
        faults.append(f"{name} holds half of a surrogate pair")
        return ""
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n"))


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different."""
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key occurs twice")
    return data


def no_constant(name: str) -> float:
    """NaN and Infinity are no JSON."""
    raise ValueError(f"{name} is not a JSON value")
