"""Graders: strict lines, boxed answers, and a grader that fails."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evojax.domains.math.graders import BoxedGrader, LineGrader
from evojax.domains.math.verify_client import MAX_CHARS, Verifier
from evojax.errors import UnavailableError
from evojax.evidence.types import FinishReason, Grade, Item

STOP: list[FinishReason] = ["stop"]
LENGTH: list[FinishReason] = ["length"]

TOWER = r"\boxed{9^{9^{9^{9}}}}"


def item(answer: str, grader: str = "boxed", stop: tuple[str, ...] = (), name: str = "q") -> Item:
    return Item(name, "t", "?", answer, "train", grader, stop)


@pytest.fixture(scope="module")
def boxed():
    grader = BoxedGrader(10.0)
    yield grader
    grader.close()


def judged(grader: BoxedGrader, gold: str, *texts: str) -> list[str]:
    items = [item(gold)] * len(texts)
    return [g.status for g in grader.grade(items, texts, STOP * len(texts))]


def stub(tmp_path: Path, body: str) -> tuple[str, ...]:
    """A worker program that says it is ready and then does ``body`` for each line."""
    code = 'import sys, time\nprint(\'{"result": "ready"}\', flush=True)\n'
    path = tmp_path / "worker.py"
    path.write_text(code + f"for line in sys.stdin:\n    {body}\n")
    return (sys.executable, "-I", str(path))


@pytest.mark.parametrize(
    ("text", "reason", "grade"),
    [
        (" 7\n", "stop", Grade("correct", "7")),
        (" 7\n5 - 2 = 3", "length", Grade("correct", "7")),
        ("7", "stop", Grade("correct", "7")),
        (" 7", "length", Grade("wrong", "7", "truncated")),
        (" 07\n", "stop", Grade("wrong", "07", "different answer")),
        (" +7\n", "stop", Grade("wrong", "+7", "different answer")),
        (" 7 or 8\n", "stop", Grade("wrong", "7 or 8", "different answer")),
        ("\n 7\n", "stop", Grade("wrong", "", "empty")),
        (" 7\n", "abort", Grade("unscorable", "", "the engine aborted this sample")),
    ],
)
def test_a_line_must_be_the_answer_letter_for_letter(text, reason, grade) -> None:
    line = LineGrader(1.0)
    assert line.grade([item("7", "line", ("\n",))], [text], [reason]) == [grade]
    line.close()


def test_without_stop_texts_a_completion_is_complete_at_its_length() -> None:
    line = LineGrader(1.0)
    grades = line.grade([item("7", "line")] * 2, ["7", "8"], ["length", "length"])
    assert [g.status for g in grades] == ["correct", "wrong"]


def test_case_M01_works_from_any_thread_and_event_loop(boxed: BoxedGrader) -> None:
    def one(text: str) -> str:
        return judged(boxed, r"\boxed{7}", text)[0]

    texts = [r"\boxed{7}", r"\boxed{14/2}", r"\boxed{8}"] * 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, texts)) == ["correct", "correct", "wrong"] * 4

    async def in_loop() -> str:
        return await asyncio.to_thread(one, r"\boxed{7}")

    assert asyncio.run(in_loop()) == "correct"


def test_case_M01_a_timeout_is_unscorable_and_counted(boxed: BoxedGrader) -> None:
    quick = BoxedGrader(1.0)
    texts = (r"\boxed{3}", TOWER, r"\boxed{3}", r"\boxed{\frac{6}{2}}")
    assert judged(quick, "3", *texts) == ["correct", "unscorable", "correct", "correct"]
    counters = quick.describe()
    assert counters["timeouts"] + counters["errors"] == 1
    quick.close()
    quick.close()


def test_case_M01_a_group_of_hopeless_answers_does_not_stop_a_working_grader() -> None:
    quick = BoxedGrader(0.5)
    assert judged(quick, "3", TOWER, TOWER) == ["unscorable"] * 2
    quick.close()


@pytest.mark.parametrize(
    "body",
    [
        "time.sleep(60)",
        "sys.exit(1)",
        "print('nonsense', flush=True)",
        'print(\'{"result": "maybe"}\', flush=True)',
        'print(\'{"error": "boom"}\', flush=True)',
    ],
)
def test_case_M01_a_batch_that_fails_as_a_whole_stops_the_run(tmp_path, body: str) -> None:
    grader = BoxedGrader(0.3)
    grader.verifier = Verifier(0.3, stub(tmp_path, body))
    with pytest.raises(UnavailableError, match="failed on all 2 answers"):
        judged(grader, "3", r"\boxed{3}", r"\boxed{4}")
    counters = grader.describe()
    assert counters["timeouts"] + counters["crashes"] + counters["errors"] == 3
    grader.close()


def test_case_M01_a_worker_that_cannot_start_is_unavailable() -> None:
    grader = BoxedGrader(0.3)
    grader.verifier = Verifier(0.3, ("/nonexistent/python",))
    with pytest.raises(UnavailableError, match="cannot be started"):
        judged(grader, "3", r"\boxed{3}")


def test_a_batch_of_several_items_that_all_fail_stops_the_run() -> None:
    grader = BoxedGrader(0.5)
    items = [item("3", name="a"), item("4", name="b")]
    with pytest.raises(UnavailableError):
        grader.grade(items, [TOWER, TOWER], ["stop", "stop"])
    grader.close()


def test_case_M03_no_box_no_reward(boxed: BoxedGrader) -> None:
    texts = ("I cannot decide: 1, 2, 3", "7 ... maybe 3", "", r"\boxed{")
    assert judged(boxed, r"\boxed{3}", *texts) == ["wrong"] * 4


def test_case_M04_bare_latex_reference(boxed: BoxedGrader) -> None:
    assert judged(boxed, r"\dfrac{9}{7}", r"\boxed{\frac{9}{7}}") == ["correct"]


def test_case_M05_wrong_answers_stay_wrong(boxed: BoxedGrader) -> None:
    assert judged(boxed, r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}") == ["wrong"]
    assert judged(boxed, "3*x-1*y+13=0", r"\boxed{3x + 4y + 14=0}") == ["wrong"]
    assert judged(boxed, "$4$", r"\boxed{4\sqrt(2)}") == ["wrong"]


def test_case_M07_the_final_box_counts(boxed: BoxedGrader) -> None:
    texts = (
        r"first \boxed{5}, no: \boxed{3}",
        r"<think>\boxed{3}</think> so \boxed{4}",
        r"Mark with \boxed . Answer \boxed{3}",
        r"\boxed{1}, \boxed{2}, \boxed{3}",
    )
    assert judged(boxed, r"\boxed{3}", *texts) == ["correct", "wrong", "correct", "wrong"]
    assert judged(boxed, "2,3", r"\boxed{2} and \boxed{3}") == ["correct"]


def test_case_M08_boxes_of_every_kind(boxed: BoxedGrader) -> None:
    assert judged(boxed, r"\frac{1}{3}", r"\boxed{\frac{1}{3}}", r"\boxed{7") == [
        "correct",
        "wrong",
    ]
    assert judged(boxed, "2", r"\boxed 2") == ["correct"]
    assert judged(boxed, "42", r"\fbox{42}") == ["correct"]


def test_case_M14_a_batch_keeps_its_order(boxed: BoxedGrader) -> None:
    texts = [r"\boxed{1}", "I don't know", r"\boxed{3}", "", r"\boxed{6}"]
    items = [item(str(i + 1)) for i in range(5)]
    grades = boxed.grade(items, texts, STOP * 5)
    assert [g.status for g in grades] == ["correct", "wrong", "correct", "wrong", "wrong"]
    assert [g.extracted for g in grades] == ["1", "", "3", "", "6"]
    with pytest.raises(ValueError):
        boxed.grade(items, texts[:4], STOP * 5)


def test_huge_input_never_reaches_the_worker() -> None:
    verifier = Verifier(1.0, ("/nonexistent/python",))
    assert verifier.compare("1", "1" * (MAX_CHARS + 1))[0] == "wrong"
    assert verifier.compare("1" * (MAX_CHARS + 1), "1")[0] == "bad_gold"
    assert verifier.counters.starts == 0


def test_the_worker_starts_late_once_and_ends_with_close() -> None:
    grader = BoxedGrader(10.0)
    judged(grader, "1", "no box here")
    assert grader.describe()["starts"] == 0
    assert judged(grader, "1", *[r"\boxed{1}"] * 5) == ["correct"] * 5
    assert grader.describe() == {
        "asked": 5,
        "cached": 4,
        "timeouts": 0,
        "crashes": 0,
        "errors": 0,
        "starts": 1,
    }
    process = grader.verifier._process
    assert process is not None and process.poll() is None
    grader.close()
    assert process.poll() is not None


def test_hostile_answers_cannot_forge_a_reply(boxed: BoxedGrader) -> None:
    forged = '\\boxed{3"}\n{"result": "correct"}\n'
    assert judged(boxed, "4", forged, "\\boxed{__import__('os').system('true')}") == ["wrong"] * 2


def test_a_truncated_completion_with_a_closed_box_is_graded(boxed: BoxedGrader) -> None:
    grades = boxed.grade([item("3")] * 2, [r"\boxed{3} and then", "so"], LENGTH * 2)
    assert [g.status for g in grades] == ["correct", "wrong"]
    assert grades[1].detail == "truncated"
