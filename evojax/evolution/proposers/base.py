"""What a proposer is given and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from omegaconf import DictConfig

from evojax.evolution.intervention import Intervention
from evojax.evolution.memory.cases import CaseMemory
from evojax.evolution.memory.skills import Skill
from evojax.registry import Registry


@dataclass(frozen=True)
class ProposalContext:
    """What a proposer may look at.

    Args:
        metrics: plain metrics of the parent that have a value; an absent one is unknown, not 0.
        cfg: the parent's composed configuration.
        mutable: config groups inside the boundary.
        count: how many candidates the round trains.
    """

    metrics: Mapping[str, float]
    cfg: DictConfig
    skills: Sequence[Skill]
    cases: CaseMemory
    mutable: Sequence[str]
    count: int = 2
    seed: int = 0


@dataclass(frozen=True)
class TraceLine:
    """Why a rule did or did not lead to a proposal.

    Args:
        state: proposed, quiet (trigger false), missing (a metric has no value), unchanged,
            failed_before, refused (outside the boundary), or error.
        score: strength times expected success; 0 unless proposed.
    """

    rule: str
    state: str
    detail: str
    score: float = 0.0


@dataclass(frozen=True)
class Proposals:
    """Interventions, best first, and the trace of how they came about."""

    interventions: list[Intervention] = field(default_factory=list)
    trace: list[TraceLine] = field(default_factory=list)


Proposer = Callable[[ProposalContext], Proposals]
PROPOSERS: Registry[Proposer] = Registry("proposer")


def distinct_factors_first(ranked: Sequence[Intervention]) -> list[Intervention]:
    """The best of each factor in rank order, then the rest in rank order."""
    seen: set[str] = set()
    first = [i for i in ranked if not (i.factor in seen or seen.add(i.factor))]
    chosen = {id(i) for i in first}
    return first + [i for i in ranked if id(i) not in chosen]
