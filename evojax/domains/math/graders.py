"""Graders by name: each judges completions as correct, wrong or unscorable.

Unscorable means that the judge failed, never that the answer did; it carries no reward at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from evojax.domains.math.final_answer import final_answer
from evojax.domains.math.verify_client import Verifier
from evojax.errors import UnavailableError
from evojax.evidence.types import FinishReason, Grade, Item
from evojax.registry import Registry

TRUNCATED = "truncated"
ABORTED = Grade("unscorable", detail="the engine aborted this sample")


class Grader(Protocol):
    """Judges a batch: one grade per completion, in order."""

    def grade(
        self, items: Sequence[Item], texts: Sequence[str], finish_reasons: Sequence[FinishReason]
    ) -> list[Grade]: ...

    def describe(self) -> dict[str, int]: ...

    def close(self) -> None: ...


GRADERS: Registry[Callable[[float], Grader]] = Registry("grader")


class LineGrader:
    """The text up to the stop, without outer blanks, must be the answer, letter for letter.

    So ``07`` and ``+7`` are not 7: there is one right text, and no drift into odd spellings pays.
    An item with stop texts whose completion ran out of tokens has no final answer: wrong.
    Without stop texts a completion is complete at its length.

    Args:
        timeout_s: not needed, comparing two texts takes no time worth a limit.
    """

    def __init__(self, timeout_s: float):
        del timeout_s

    def grade(
        self, items: Sequence[Item], texts: Sequence[str], finish_reasons: Sequence[FinishReason]
    ) -> list[Grade]:
        """One grade per completion, in order."""
        return [self._one(*row) for row in zip(items, texts, finish_reasons, strict=True)]

    def _one(self, item: Item, text: str, reason: FinishReason) -> Grade:
        if reason == "abort":
            return ABORTED
        cuts = [text.find(stop) for stop in item.stop if stop in text]
        answer = (text[: min(cuts)] if cuts else text).strip()
        if item.stop and not cuts and reason == "length":
            return Grade("wrong", answer, TRUNCATED)
        if answer == item.answer:
            return Grade("correct", answer)
        return Grade("wrong", answer, "different answer" if answer else "empty")

    def describe(self) -> dict[str, int]:
        """Nothing to count."""
        return {}

    def close(self) -> None:
        """Nothing to stop."""


class BoxedGrader:
    """The last complete box after the thinking section must equal the reference mathematically.

    Args:
        timeout_s: limit of one comparison, seconds.
    """

    def __init__(self, timeout_s: float):
        self.verifier = Verifier(timeout_s)

    def grade(
        self, items: Sequence[Item], texts: Sequence[str], finish_reasons: Sequence[FinishReason]
    ) -> list[Grade]:
        """One grade per completion, in order.

        Raises:
            UnavailableError: every comparison of the batch failed and the grader is to blame: the
                batch holds several items, or 1 = 1 cannot be decided either.
        """
        grades = [self._one(*row) for row in zip(items, texts, finish_reasons, strict=True)]
        compared = [
            (item.id, grade) for item, grade in zip(items, grades, strict=True) if grade.extracted
        ]
        failed = {name for name, grade in compared if grade.status == "unscorable"}
        if compared and all(grade.status == "unscorable" for _, grade in compared):
            if len(failed) > 1 or not self.verifier.works():
                raise UnavailableError(
                    f"the math grader failed on all {len(compared)} answers of a batch, the last "
                    f"time with: {compared[-1][1].detail} (counters: {self.describe()})"
                )
        return grades

    def reference_fault(self, answer: str) -> str | None:
        """Why a reference cannot serve to score answers, or None.

        Raises:
            UnavailableError: the grader does not work at all.
        """
        result, detail = self.verifier.compare(answer, answer)
        if result == "failed" and not self.verifier.works():
            raise UnavailableError(f"the math grader does not work: {detail}")
        if result == "correct":
            return None
        return f"reference {answer[:60]!r}: {detail or 'does not equal itself'}"

    def _one(self, item: Item, text: str, reason: FinishReason) -> Grade:
        if reason == "abort":
            return ABORTED
        answer = final_answer(text)
        if answer is None:
            return Grade("wrong", "", TRUNCATED if reason == "length" else "no final box")
        result, detail = self.verifier.compare(item.answer, answer)
        if result == "correct":
            return Grade("correct", answer)
        if result == "wrong":
            return Grade("wrong", answer, detail or "different answer")
        return Grade("unscorable", answer, detail)

    def describe(self) -> dict[str, int]:
        """Counters of the worker."""
        return self.verifier.describe()

    def close(self) -> None:
        """End the worker."""
        self.verifier.close()


GRADERS.register("line")(LineGrader)
GRADERS.register("boxed")(BoxedGrader)
