"""What a domain is: items with reference answers, and a grader that judges completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from evojax.config import DomainConf
from evojax.evidence.types import FinishReason, Grade, Item, Split
from evojax.registry import Registry


class Domain(Protocol):
    """Problems of one kind and the judge of their answers."""

    def items(self, split: Split) -> list[Item]:
        """Every item of a split, always in the same order; the three splits share no item."""
        ...

    def grade(
        self, items: Sequence[Item], texts: Sequence[str], finish_reasons: Sequence[FinishReason]
    ) -> list[Grade]:
        """One grade per completion, in the order given.

        Args:
            items: the problem of each completion (repeated for the samples of a group).
            texts: decoded completions, special tokens left out.
            finish_reasons: how each completion ended.

        Raises:
            UnavailableError: the grader failed on the whole batch.
        """
        ...

    def features(self, item: Item, text: str, completion_tokens: int) -> dict[str, float]:
        """Behaviour of one completion as finite numbers by name."""
        ...

    def describe(self) -> dict[str, Any]:
        """Counts, a sha256 of each split's items, and what was left out at load (JSON-ready)."""
        ...

    def close(self) -> None:
        """Stop whatever the domain started; a second call does nothing."""
        ...


DOMAINS: Registry[Callable[[DomainConf], Domain]] = Registry("domain")


def load_domain(conf: DomainConf) -> Domain:
    """The configured domain with its items loaded.

    Raises:
        InputError: the domain, a task or the data file is wrong; every problem is listed.
    """
    return DOMAINS.get(conf.name, where="domain.name")(conf)
