"""What a domain is: items with reference answers, and a grader that judges completions."""

from __future__ import annotations

from collections.abc import Sequence
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
        """Behaviour of one completion as finite numbers, under its class's ``feature_names``."""
        ...

    def describe(self) -> dict[str, Any]:
        """Counts, a sha256 of each split's items, and what was left out at load (JSON-ready)."""
        ...

    def close(self) -> None:
        """Stop whatever the domain started; a second call does nothing."""
        ...


class DomainClass(Protocol):
    """What is registered: makes the domain, and says beforehand what it will record.

    Args:
        feature_names: names that ``features`` returns, always all of them.
    """

    @property
    def feature_names(self) -> frozenset[str]: ...

    def __call__(self, conf: DomainConf) -> Domain: ...


DOMAINS: Registry[DomainClass] = Registry("domain")


def recorded_features(domain: str) -> frozenset[str] | None:
    """Features that the domain of this name records; None for a name that is not registered."""
    return DOMAINS.get(domain, where="domain.name").feature_names if domain in DOMAINS else None


def load_domain(conf: DomainConf) -> Domain:
    """The configured domain with its items loaded.

    Raises:
        InputError: the domain, a task or the data file is wrong; every problem is listed.
    """
    return DOMAINS.get(conf.name, where="domain.name")(conf)
