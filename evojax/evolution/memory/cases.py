"""Case memory: what was seen, what was tried, what came of it; failures included."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evojax.errors import InputError
from evojax.evolution.intervention import Intervention
from evojax.evolution.memory.ledger import Ledger
from evojax.evolution.yaml_files import replace_text

FAILED = ("rejected", "invalid")


@dataclass(frozen=True)
class Case:
    """One intervention and its outcome.

    Args:
        evidence: metrics of the parent when it was proposed.
        symptoms: alerts that were raised then.
        outcome: promoted, rejected, undecided or invalid. delta, ci95, p: of the comparison.
    """

    version: str
    parent: str
    rule: str
    factor: str
    edits: dict[str, Any]
    edit_hash: str
    hypothesis: str
    outcome: str
    evidence: dict[str, float] = field(default_factory=dict)
    symptoms: tuple[str, ...] = ()
    delta: float | None = None
    ci95: tuple[float, float] | None = None
    p: float | None = None
    origin: str = "rule"

    @classmethod
    def of(
        cls, version: str, parent: str, intervention: Intervention, outcome: str, **rest: Any
    ) -> Case:
        """The case of an intervention; ``rest`` as in the class."""
        return cls(
            version, parent, intervention.rule, intervention.factor, dict(intervention.edits),
            intervention.edit_hash, intervention.hypothesis, outcome,
            origin=intervention.origin, **rest,
        )  # fmt: skip


@dataclass(frozen=True)
class Record:
    """How often something was tried and what came of it; undecided counts as neither."""

    won: int = 0
    lost: int = 0
    undecided: int = 0


class CaseMemory:
    """Cases of one run, with those of earlier runs if a file of them is given."""

    def __init__(self, cases: Iterable[Case] = ()):
        self.cases: list[Case] = list(cases)

    @classmethod
    def load(cls, ledger: Ledger, earlier: Path | None = None) -> CaseMemory:
        """Cases in the ledger, after those in a JSON Lines file (see ``export``)."""
        past = _read_lines(earlier) if earlier is not None and earlier.exists() else []
        return cls([*past, *(_case(data) for data in ledger.cases())])

    def add(self, ledger: Ledger, case: Case) -> None:
        """File a case; the case of the same version is replaced."""
        ledger.put_case(
            case.version, case.rule, case.factor, case.outcome, dataclasses.asdict(case)
        )
        kept = [c for c in self.cases if (c.version, c.edit_hash) != (case.version, case.edit_hash)]
        self.cases = [*kept, case]

    def record(self, by: Literal["rule", "factor", "symptom"], name: str) -> Record:
        """How cases of one rule, one factor or one symptom came out."""
        chosen = [
            c for c in self.cases if name in (c.symptoms if by == "symptom" else (getattr(c, by),))
        ]
        won = sum(c.outcome == "promoted" for c in chosen)
        lost = sum(c.outcome in FAILED for c in chosen)
        return Record(won, lost, len(chosen) - won - lost)

    def success(self, rule: str, factor: str, wins: int = 0, losses: int = 0) -> float:
        """Expected success of a rule, in (0, 1): its record, shrunk to that of its factor.

        f = (W_f + 1) / (W_f + L_f + 2);  s = (W_r + wins + 2 f) / (W_r + L_r + wins + losses + 2)

        Args:
            wins, losses: the skill's record from before this run.
        """
        own, peers = self.record("rule", rule), self.record("factor", factor)
        prior = (peers.won + 1) / (peers.won + peers.lost + 2)
        tries = own.won + own.lost + wins + losses
        return (own.won + wins + 2 * prior) / (tries + 2)

    def failed_edits(self) -> set[str]:
        """Identities of edits that were rejected or invalid."""
        return {c.edit_hash for c in self.cases if c.outcome in FAILED}

    def export(self, path: Path) -> None:
        """Write every case as one JSON line."""
        lines = [json.dumps(dataclasses.asdict(c), sort_keys=True) for c in self.cases]
        replace_text(path, "".join(line + "\n" for line in lines))


def _read_lines(path: Path) -> list[Case]:
    cases = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            cases.append(_case(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError.one(
                f"not a case: {error}", f"{path}:{number}", line[:80], "remove the line"
            ) from error
    return cases


def _case(data: dict[str, Any]) -> Case:
    interval: Sequence[float] | None = data["ci95"]
    return Case(
        **(
            data
            | {
                "symptoms": tuple(data["symptoms"]),
                "ci95": (interval[0], interval[1]) if interval else None,
            }
        )
    )
