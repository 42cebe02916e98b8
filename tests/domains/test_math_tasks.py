"""Generated tasks: right answers, twins, splits."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.config import DomainConf
from evojax.domains.base import load_domain
from evojax.domains.math.splits import deal, fingerprint, task_items
from evojax.domains.math.tasks import TASKS, Task
from evojax.domains.math.tasks.base import Problem
from evojax.errors import InputError

SMALL = DomainConf(tasks=["parity"], train_items=30, eval_items=8, audit_items=8)
ALPHABET = set("0123456789+-=? \n")


def solve(name: str, question: str) -> str:
    """An independent solver that reads the question's text."""
    numbers = [int(n) for n in re.findall(r"\d+", question)]
    words = re.findall(r"[a-z]+", question)
    solvers = {
        "add_sub": lambda: str(sum(numbers) if "+" in question else numbers[0] - numbers[1]),
        "gcd": lambda: str(max(d for d in range(1, 31) if all(n % d == 0 for n in numbers))),
        "letter_count": lambda: str(sum(c == words[2] for c in words[1])),
        "first_alphabetical": lambda: sorted(words)[0],
        "next_number": lambda: str(2 * numbers[2] - numbers[1]),
        "parity": lambda: ["even", "odd"][numbers[0] % 2],
        "remainder": lambda: str(numbers[0] - numbers[1] * (numbers[0] // numbers[1])),
        "max_of_two": lambda: str(sorted(numbers)[-1]),
        "times": lambda: str(sum([numbers[0]] * numbers[1])),
        "tiny_copy": lambda: question[1],
        "tiny_succ": lambda: "1234567890"[int(question[1])],
    }
    return solvers[name]()


@pytest.mark.parametrize("name", list(TASKS))
def test_every_answer_is_right_and_no_shot_is_asked(name: str) -> None:
    task = TASKS.get(name, "t")
    pool = task.distinct()
    assert len(pool) >= 90
    assert not {shot.key for shot in task.shots} & set(pool)
    for problem in [*task.shots, *pool.values()]:
        assert solve(name, problem.question) == problem.answer, problem
        assert not problem.question.endswith(" ")


@pytest.mark.parametrize("name", list(TASKS))
def test_splits_are_disjoint_by_key_and_by_twin(name: str) -> None:
    conf = replace(SMALL, eval_items=20, audit_items=20, train_items=400)
    items = task_items(name, TASKS.get(name, "t"), conf)
    assert len({i.id for i in items}) == len(items)
    seen: dict[tuple, str] = {}
    for item in items:
        question = item.prompt.rsplit("\n", 1)[-1]
        twin = tuple(sorted(re.findall(r"\w+", question)))
        if "-" in question:
            twin = (question,)
        assert seen.setdefault(twin, item.split) == item.split, "a twin is in another split"
    counts = {s: sum(i.split == s for i in items) for s in ("train", "eval", "audit")}
    assert counts["eval"] == counts["audit"] == 20


def test_twins_share_a_key() -> None:
    from evojax.domains.math.tasks import add_sub, first_alphabetical, gcd, max_of_two, times

    assert add_sub.problem(3, "+", 4).key == add_sub.problem(4, "+", 3).key
    assert add_sub.problem(3, "-", 4).key != add_sub.problem(4, "-", 3).key
    for module in (gcd, max_of_two, times):
        assert module.problem(12, 18).key == module.problem(18, 12).key
    one, other = ["tree", "fox", "moon"], ["moon", "tree", "fox"]
    assert first_alphabetical.problem(one).key == first_alphabetical.problem(other).key


def test_add_sub_prompt_ends_before_the_answer() -> None:
    domain = load_domain(replace(SMALL, tasks=["add_sub"]))
    prompt = domain.items("train")[0].prompt
    assert re.fullmatch(r"(\d [+-] \d = -?\d+\n){4}\d [+-] \d =", prompt)


def test_tiny_tasks_use_the_small_alphabet_and_need_no_stop() -> None:
    for name in ("tiny_copy", "tiny_succ"):
        for item in task_items(name, TASKS.get(name, "t"), SMALL):
            assert set(item.prompt + item.answer) <= ALPHABET
            assert len(item.answer) == 1 and item.stop == ()


def test_letter_count_has_no_winning_constant() -> None:
    answers = [p.answer for p in TASKS.get("letter_count", "t").distinct().values()]
    shares = {a: answers.count(a) / len(answers) for a in set(answers)}
    assert max(shares.values()) < 0.4 and set(shares) == {"0", "1", "2", "3"}


def test_the_split_is_deterministic_and_seeded() -> None:
    one, again = load_domain(SMALL), load_domain(SMALL)
    other = load_domain(replace(SMALL, split_seed=8))
    assert one.describe() == again.describe()
    assert one.describe()["sha256"] != other.describe()["sha256"]
    assert [i.id for i in one.items("train")] == [i.id for i in again.items("train")]


def test_adding_a_task_changes_no_other_items() -> None:
    alone = load_domain(SMALL)
    both = load_domain(replace(SMALL, tasks=["times", "parity"]))
    for split in ("train", "eval", "audit"):
        assert [i for i in both.items(split) if i.task == "parity"] == alone.items(split)


def test_more_training_items_leave_eval_and_audit_alone() -> None:
    small, large = load_domain(SMALL), load_domain(replace(SMALL, train_items=60))
    assert large.items("train")[:30] == small.items("train")
    for split in ("eval", "audit"):
        assert large.items(split) == small.items(split)


def test_too_few_items_names_how_many_there_are() -> None:
    conf = replace(SMALL, tasks=["tiny_copy", "tiny_succ"], eval_items=60, audit_items=40)
    with pytest.raises(InputError) as caught:
        load_domain(conf)
    assert len(caught.value.problems) == 2
    assert "tiny_copy has 100 distinct items" in str(caught.value)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(InputError) as caught:
        load_domain(replace(SMALL, tasks=["parityy", "parity", "parity", "gdc"]))
    text = str(caught.value)
    assert "did you mean 'parity'" in text and "named twice" in text and "gdc" in text
    with pytest.raises(InputError) as caught:
        load_domain(replace(SMALL, tasks=[], eval_items=0, train_items=-1, grader_timeout_s=0.0))
    keys = {p.where for p in caught.value.problems}
    assert keys == {"domain.eval_items", "domain.train_items", "domain.grader_timeout_s"}
    with pytest.raises(InputError, match="no task is chosen"):
        load_domain(replace(SMALL, tasks=[]))
    with pytest.raises(InputError, match="unknown domain"):
        load_domain(replace(SMALL, name="maths"))


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(3, 60),
    eval_items=st.integers(1, 30),
    audit_items=st.integers(1, 30),
    seed=st.integers(0, 2**31),
)
def test_deal_is_a_partition(size: int, eval_items: int, audit_items: int, seed: int) -> None:
    pool = {f"k{i}": i for i in range(size)}
    conf = replace(
        SMALL, eval_items=eval_items, audit_items=audit_items, split_seed=seed, train_items=1000
    )
    if size <= eval_items + audit_items:
        with pytest.raises(InputError):
            deal(pool, "t", conf)
        return
    parts = deal(pool, "t", conf)
    assert sorted(v for part in parts.values() for v in part) == list(range(size))
    assert len(parts["eval"]) == eval_items and len(parts["audit"]) == audit_items
    backwards = dict(reversed(pool.items()))
    assert deal(backwards, "t", conf) == parts


def test_fingerprint_ignores_order_and_sees_every_field() -> None:
    items = load_domain(SMALL).items("eval")
    assert fingerprint(items) == fingerprint(items[::-1])
    assert fingerprint(items) != fingerprint([replace(items[0], answer="x"), *items[1:]])


def test_first_form_of_a_key_stands_for_its_twins() -> None:
    twins = [Problem("k", "a", "1"), Problem("k", "b", "1"), Problem("shot", "c", "2")]
    task = Task(lambda: twins, shots=(twins[2],))
    assert list(task.distinct().values()) == [twins[0]]


def test_gcd_solver_agrees_with_the_library() -> None:
    for problem in TASKS.get("gcd", "t").distinct().values():
        low, high = map(int, problem.key.split(","))
        assert 2 <= low < high <= 30 and problem.answer == str(math.gcd(low, high))
