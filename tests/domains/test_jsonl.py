"""Problems from a JSONL file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from evojax.config import DomainConf
from evojax.domains.base import load_domain
from evojax.domains.math.jsonl import MAX_LINE_BYTES, SHOWN_PROBLEMS
from evojax.errors import InputError
from evojax.evidence.types import Split


def row(question: str, answer: object = "4", **more: object) -> dict:
    message = {"role": "user", "content": question}
    return {"messages": [message], "answer": answer, "domain": "math_rule", "tag": "t"} | more


def write(tmp_path: Path, *rows: object, end: str = "\n") -> DomainConf:
    path = tmp_path / "data.jsonl"
    texts = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_bytes(end.join(texts).encode())
    return DomainConf(path=str(path), eval_items=1, audit_items=1)


def faults(conf: DomainConf) -> list[str]:
    with pytest.raises(InputError) as caught:
        load_domain(conf)
    assert {p.where for p in caught.value.problems} == {"domain.path"}
    return [p.what for p in caught.value.problems]


def test_items_are_split_by_their_prompt_and_keep_their_tag(tmp_path) -> None:
    rows = [row(f"{i} + 1?", i + 1, tag=f"t{i % 2}") for i in range(6)]
    domain = load_domain(write(tmp_path, *rows))
    splits = {s: domain.items(s) for s in get_args(Split)}
    assert {s: len(v) for s, v in splits.items()} == {"train": 4, "eval": 1, "audit": 1}
    shuffled = load_domain(write(tmp_path, *rows[::-1]))
    assert {s: shuffled.items(s) for s in splits} == splits
    one = splits["train"][0]
    assert one.grader == "boxed" and one.stop == () and one.chat is None
    assert one.answer == str(int(one.prompt.split()[0]) + 1)
    assert one.task == f"t{int(one.prompt.split()[0]) % 2}"


def test_chat_keeps_all_messages(tmp_path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    conf = write(tmp_path, row("a", messages=talk), row("b"), row("c"))
    conf.chat = True
    domain = load_domain(conf)
    items = [i for s in ("train", "eval", "audit") for i in domain.items(s)]
    chats = [i.chat for i in items]
    assert tuple(talk) in chats and all(chats)
    conf.chat = False
    domain = load_domain(conf)
    prompts = {i.prompt for s in ("train", "eval", "audit") for i in domain.items(s)}
    assert prompts == {"2 + 2?", "b", "c"}


def test_all_faulty_lines_are_listed_with_their_numbers(tmp_path) -> None:
    conf = write(
        tmp_path,
        row("fine"),
        "{not json",
        "[1, 2]",
        "",
        row("", domain="math_rule"),
        row("a", answer=None),
        row("b", domain="code"),
        row("c", messages=[]),
        row("d", messages=[{"role": "robot", "content": "x"}]),
        row("e", messages=[{"role": "assistant", "content": "x"}]),
        row("f", tag=3),
        '{"answer": 1, "answer": 2}',
        '{"answer": NaN}',
        row("g\x00"),
        row("\ud800"),
        "\x00\x00",
        "[" * 200_000,
    )
    found = faults(conf)
    numbers = [int(w.split(":")[0].removeprefix("line ")) for w in found]
    assert numbers == [2, 3, *range(5, 18)]
    assert "NUL" in found[11] and "surrogate" in found[12] and "twice" in found[9]


def test_many_faulty_lines_are_all_named(tmp_path) -> None:
    found = faults(write(tmp_path, *["x"] * (SHOWN_PROBLEMS + 3)))
    assert len(found) == SHOWN_PROBLEMS + 1
    assert found[-1] == "3 more faulty lines: 101, 102, 103"


def test_a_huge_line_and_bad_utf8_are_faults(tmp_path) -> None:
    conf = write(tmp_path, row("x" * (2 * MAX_LINE_BYTES)), row("fine"))
    assert faults(conf) == [f"line 1: longer than {MAX_LINE_BYTES} bytes"]
    path = Path(str(conf.path))
    path.write_bytes(b"\xff\xfe\n" + json.dumps(row("fine")).encode())
    assert faults(conf) == ["line 1: not UTF-8 at byte 0"]


@pytest.mark.parametrize("text", ["", "\n\n", "\ufeff", "   \r\n"])
def test_an_empty_file_is_an_error(tmp_path, text: str) -> None:
    assert faults(write(tmp_path, text)) == ["the file has no item"]


def test_missing_file_and_directory(tmp_path) -> None:
    conf = DomainConf(path=str(tmp_path / "none.jsonl"))
    assert "No such file" in faults(conf)[0]
    assert "directory" in faults(DomainConf(path=str(tmp_path)))[0]


def test_bom_crlf_and_nfc(tmp_path) -> None:
    rows = ["\ufeff" + json.dumps(row("cafe\u0301?\r\nWell?")), row("b"), row("c")]
    domain = load_domain(write(tmp_path, *rows, end="\r\n"))
    prompts = {i.prompt for s in ("train", "eval", "audit") for i in domain.items(s)}
    assert prompts == {"caf\u00e9?\nWell?", "b", "c"}


def test_duplicates_are_removed_and_counted(tmp_path) -> None:
    rows = [row("2  + 2?"), row("2 + 2? "), row("2 + 2?"), row("b"), row("c")]
    domain = load_domain(write(tmp_path, *rows))
    assert domain.describe()["duplicates_removed"] == 2
    assert sum(domain.describe()["counts"].values()) == 3


def test_one_prompt_with_two_answers_is_unscorable(tmp_path) -> None:
    rows = [row("a", 1), row("a", 2), row("b"), row("c"), row("d")]
    report = load_domain(write(tmp_path, *rows)).describe()
    assert report["unscorable_at_load"] == 1 and sum(report["counts"].values()) == 3
    assert "line 1" in report["unscorable_lines"][0]


def test_case_M04_an_unreadable_reference_is_left_out_at_load(tmp_path) -> None:
    golds = ["see the proof above", "", r"\dfrac{9}{7}", r"\frac{1}{2}", "x+1", "7"]
    domain = load_domain(write(tmp_path, *[row(f"q{i}", g) for i, g in enumerate(golds)]))
    report = domain.describe()
    assert report["unscorable_at_load"] == 2 and sum(report["counts"].values()) == 4
    assert [line.split(":")[0] for line in report["unscorable_lines"]] == ["line 1", "line 2"]
    items = [i for s in ("train", "eval", "audit") for i in domain.items(s)]
    (odd,) = [i for i in items if i.answer == r"\dfrac{9}{7}"]
    (grade,) = domain.grade([odd], [r"\boxed{\frac{9}{7}}"], ["stop"])
    assert grade.status == "correct"
    domain.close()


def test_too_few_usable_items(tmp_path) -> None:
    conf = write(tmp_path, row("a"), row("b", "see the proof above"))
    with pytest.raises(InputError, match="jsonl has 1 distinct items"):
        load_domain(conf)
