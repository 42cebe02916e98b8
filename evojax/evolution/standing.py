"""Which version a run stands at, from its verdicts: one rule, live and from disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evojax.evolution.rounds import RoundPlan, stored_plans
from evojax.evolution.store import VersionStore
from evojax.training.version import read_json

BASE, FIRST = "v000", "v001"


@dataclass
class Outcome:
    """Where a run stands after its last round.

    Args:
        final: the version to use, see ``standing``.
        promoted: the last promoted candidate, None when there was none.
        verdicts: version -> verdict as plain data. plans: one per round.
        audit: version -> scores on the audit split, for the base and the final version.
    """

    final: str
    promoted: str | None
    verdicts: dict[str, dict[str, Any]]
    plans: list[RoundPlan]
    audit: dict[str, dict[str, float | None]] = field(default_factory=dict)


def best_promoted(verdicts: dict[str, dict[str, Any]]) -> str | None:
    """The promoted candidate with the largest paired difference, None without one."""
    promoted = {
        v: raw["comparison"]["mean"] for v, raw in verdicts.items() if raw["outcome"] == "promoted"
    }
    return max(sorted(promoted), key=promoted.__getitem__, default=None)


def control_of(plan: RoundPlan, plans: list[RoundPlan]) -> str:
    """The control of a round: that of the first round with the same parent.

    The same recipe from the same weights on the same items and seeds gives the same version, so
    it is trained once.
    """
    first = min(p.number for p in [*plans, plan] if p.parent == plan.parent)
    return f"r{first}-control"


def standing(verdicts: dict[str, dict[str, Any]], plans: list[RoundPlan]) -> tuple[str, str | None]:
    """(version to use, last promoted candidate) after the rounds that are judged.

    Whatever replaces a version has to be significantly better: a promoted candidate, or without
    one the round's control, the parent's recipe trained on by the same budget. Else the parent
    stands.
    """
    final = FIRST if FIRST in verdicts else BASE
    promoted: str | None = None
    for plan in plans:
        control = control_of(plan, plans)
        if control not in verdicts:
            break
        mine = {c.version: verdicts[c.version] for c in plan.candidates if c.version in verdicts}
        best = best_promoted(mine)
        compared = verdicts[control]["comparison"]
        if best is not None:
            final = promoted = best
        elif compared is not None and compared["ci95"][0] > 0:
            final = control
    return final, promoted


def stored_outcome(run_dir: Path) -> Outcome:
    """Where the run in ``run_dir`` stands, from what it left on disk."""
    store = VersionStore(run_dir)
    verdicts = {
        name: read_json(store.path(name) / "verdict.json")
        for name in store.names()
        if (store.path(name) / "verdict.json").exists()
    }
    plans = stored_plans(run_dir)
    final, promoted = standing(verdicts, plans)
    audit = run_dir / "audit.json"
    scores = read_json(audit)["scores"] if audit.exists() else {}
    return Outcome(final, promoted, verdicts, plans, scores)
