"""The math domain: generated few-shot tasks, or problems from a JSONL file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from evojax.config import DomainConf
from evojax.domains.base import DOMAINS
from evojax.domains.math.final_answer import boxes
from evojax.domains.math.graders import GRADERS, BoxedGrader, Grader
from evojax.domains.math.jsonl import LoadReport, load_jsonl
from evojax.domains.math.splits import fingerprint, generated_items, size_problems
from evojax.errors import InputError
from evojax.evidence.types import FinishReason, Grade, Item, Split

SPLITS: tuple[Split, ...] = ("train", "eval", "audit")


@DOMAINS.register("math")
class MathDomain:
    """Arithmetic and word puzzles, or mathematics from a file.

    Args:
        conf: tasks or path, split sizes and seed, time limit of the grader.

    Raises:
        InputError: every problem of the configuration or of the file.
    """

    feature_names: ClassVar[frozenset[str]] = frozenset(
        {"tokens", "chars", "answer_chars", "digits_share", "boxes", "thinks"}
    )

    def __init__(self, conf: DomainConf):
        problems = size_problems(conf)
        if problems:
            raise InputError(problems)
        self._conf = conf
        self._graders: dict[str, Grader] = {}
        self._report = LoadReport()
        try:
            if conf.path is None:
                items = generated_items(conf)
            else:
                boxed = BoxedGrader(conf.grader_timeout_s)
                self._graders["boxed"] = boxed
                items, self._report = load_jsonl(conf, boxed)
        except BaseException:
            self.close()
            raise
        self._items = {split: [i for i in items if i.split == split] for split in SPLITS}

    def items(self, split: Split) -> list[Item]:
        """Items of a split in a fixed order: task by task, as configured."""
        return list(self._items[split])

    def grade(
        self, items: Sequence[Item], texts: Sequence[str], finish_reasons: Sequence[FinishReason]
    ) -> list[Grade]:
        """One grade per completion, in the order given.

        Raises:
            ValueError: the three sequences differ in length (a bug of the caller).
            UnavailableError: the grader failed on the whole batch.
        """
        if not len(items) == len(texts) == len(finish_reasons):
            raise ValueError(f"{len(items)} items, {len(texts)} texts, {len(finish_reasons)} ends")
        grades: dict[int, Grade] = {}
        for name in sorted({item.grader for item in items}):
            rows = [i for i, item in enumerate(items) if item.grader == name]
            judged = self._grader(name).grade(
                [items[i] for i in rows],
                [texts[i] for i in rows],
                [finish_reasons[i] for i in rows],
            )
            grades.update(zip(rows, judged, strict=True))
        assert len(grades) == len(items), "a grader lost or added a grade"
        return [grades[i] for i in range(len(items))]

    def features(self, item: Item, text: str, completion_tokens: int) -> dict[str, float]:
        """Size and shape of one completion.

        Returns:
            tokens; chars; answer_chars: length without outer blanks; digits_share: digits among
            those; boxes: complete boxes; thinks: 1 when a thinking section was opened.
        """
        answer = text.strip()
        digits = sum(char.isdigit() for char in answer)
        return {
            "tokens": float(completion_tokens),
            "chars": float(len(text)),
            "answer_chars": float(len(answer)),
            "digits_share": digits / len(answer) if answer else 0.0,
            "boxes": float(len(boxes(text))),
            "thinks": float("<think>" in text),
        }

    def describe(self) -> dict[str, Any]:
        """Counts and fingerprints by split, what the load left out, and the graders' counters."""
        return {
            "domain": "math",
            "source": self._conf.path or "generated",
            "split_seed": self._conf.split_seed,
            "counts": {split: len(items) for split, items in self._items.items()},
            "counts_by_task": {
                split: dict(sorted(Counter(item.task for item in items).items()))
                for split, items in self._items.items()
            },
            "sha256": {split: fingerprint(items) for split, items in self._items.items()},
            "duplicates_removed": self._report.duplicates,
            "unscorable_at_load": len(self._report.unscorable),
            "unscorable_lines": list(self._report.unscorable),
            "graders": {name: grader.describe() for name, grader in self._graders.items()},
        }

    def close(self) -> None:
        """End the worker processes of the graders."""
        for grader in self._graders.values():
            grader.close()

    def _grader(self, name: str) -> Grader:
        if name not in self._graders:
            make = GRADERS.get(name, where="domain.grader")
            self._graders[name] = make(self._conf.grader_timeout_s)
        return self._graders[name]
