"""Errors that end a run, each with the exit code a caller can rely on.

Exit codes: 0 finished; 2 the user's configuration or input is wrong; 3 an engine, sandbox or
grader is unavailable (state saved, resumable); 130 interrupted (state saved, resumable).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_OK = 0
EXIT_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the input.

    Args:
        what: the fault in one sentence.
        where: the config key or file that set it.
        value: the value seen (shown with ``repr``).
        remedy: what to do about it.

    >>> print(Problem("learning rate must be above 0", "algorithm.lr", -1.0, "set e.g. 1e-5"))
    algorithm.lr = -1.0: learning rate must be above 0. Remedy: set e.g. 1e-5
    """

    what: str
    where: str
    value: object
    remedy: str

    def __str__(self) -> str:
        return f"{self.where} = {self.value!r}: {self.what}. Remedy: {self.remedy}"


class EvojaxError(Exception):
    """Base of every error that evojax raises on purpose."""

    exit_code = EXIT_INPUT


class InputError(EvojaxError):
    """The user's configuration or input is wrong; carries *every* problem found (exit 2)."""

    exit_code = EXIT_INPUT

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))

    @classmethod
    def one(cls, what: str, where: str, value: object, remedy: str) -> InputError:
        """Shorthand for a single problem."""
        return cls([Problem(what, where, value, remedy)])


class UnavailableError(EvojaxError):
    """An engine, grader, sandbox or the disk failed; the run's state is saved (exit 3)."""

    exit_code = EXIT_UNAVAILABLE


class TrainingFailed(UnavailableError):
    """A version could not be trained (its updates stay non-finite); a failed arm has no score."""


class Interrupted(EvojaxError):
    """Ctrl-C or SIGTERM arrived; the run's state is saved (exit 130)."""

    exit_code = EXIT_INTERRUPTED
