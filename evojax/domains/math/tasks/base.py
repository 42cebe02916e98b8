"""A task: one family of generated problems with a few-shot prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from evojax.registry import Registry


@dataclass(frozen=True)
class Problem:
    """One question of a task.

    Args:
        key: canonical name; twins such as 3 + 4 and 4 + 3 have the same key.
        question: the line to complete, up to and without the space before the answer.
        answer: the one right answer as text.
    """

    key: str
    question: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A family of problems.

    Args:
        problems: all problems the family offers, in a fixed order; a key may come twice.
        shots: worked examples shown before every question; their keys are in no split.
        stop: texts that end an answer; () when the answer has a fixed number of tokens.

    >>> shot, asked = Problem("2+2", "2 + 2 =", "4"), Problem("1+4", "1 + 4 =", "5")
    >>> Task(lambda: [asked], shots=(shot,)).prompt(asked)
    '2 + 2 = 4\\n1 + 4 ='
    """

    problems: Callable[[], Iterable[Problem]]
    shots: tuple[Problem, ...] = ()
    stop: tuple[str, ...] = ("\n",)

    def prompt(self, problem: Problem) -> str:
        """Text that the policy completes: the shots, one a line, then the open question."""
        lines = [f"{shot.question} {shot.answer}\n" for shot in self.shots]
        return "".join(lines) + problem.question

    def distinct(self) -> dict[str, Problem]:
        """Problems by key without the shots; the first form of a key stands for its twins."""
        shown = {shot.key for shot in self.shots}
        found: dict[str, Problem] = {}
        for problem in self.problems():
            if problem.key not in shown:
                found.setdefault(problem.key, problem)
        return found


TASKS: Registry[Task] = Registry("task")
