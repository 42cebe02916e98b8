"""The playbook: skills whose trigger holds, ranked by urgency times past success. Offline."""

from __future__ import annotations

from typing import Any

from evojax.errors import InputError
from evojax.evolution.boundary import edit_problems, leaves
from evojax.evolution.conditions import MissingValue, evaluate, names_in
from evojax.evolution.intervention import Intervention
from evojax.evolution.memory.skills import Skill
from evojax.evolution.proposers.base import (
    PROPOSERS,
    ProposalContext,
    Proposals,
    TraceLine,
    distinct_factors_first,
)


@PROPOSERS.register("playbook")
def playbook(context: ProposalContext) -> Proposals:
    """Interventions of every skill that fires, distinct factors first.

    A skill that needs a metric without a value does not fire; the trace says which one. Edits that
    change nothing, failed before, or leave the boundary are dropped, each with its trace line.
    Ties are broken by name, so the same evidence always gives the same order.
    """
    config = leaves(context.cfg)
    values = _numbers(config) | dict(context.metrics)
    found: list[tuple[float, Intervention]] = []
    trace: list[TraceLine] = []
    for skill in sorted(context.skills, key=lambda s: s.name):
        proposal, line = _consider(skill, context, config, values)
        trace.append(line)
        if proposal is not None:
            found.append((line.score, proposal))
    ranked = [i for _, i in sorted(found, key=lambda pair: (-pair[0], pair[1].rule))]
    return Proposals(distinct_factors_first(ranked), trace)


def _consider(
    skill: Skill, context: ProposalContext, config: dict[str, Any], values: dict[str, float]
) -> tuple[Intervention | None, TraceLine]:
    try:
        if not evaluate(skill.trigger, values):
            return None, TraceLine(skill.name, "quiet", f"not so: {skill.trigger}")
        strength = min(1.0, max(0.0, float(evaluate(skill.strength, values))))
        edits = {key: edit.apply(config.get(key)) for key, edit in skill.intervention.items()}
    except MissingValue as error:
        return None, TraceLine(skill.name, "missing", str(error))
    except (InputError, ValueError) as error:
        return None, TraceLine(skill.name, "error", str(error))
    proposal = _intervention(skill, edits, values)
    problems = edit_problems(edits, context.mutable)
    if problems:
        return None, TraceLine(skill.name, "refused", "; ".join(map(str, problems)))
    if proposal.unchanged(context.cfg):
        return None, TraceLine(skill.name, "unchanged", f"already so: {_shown(edits)}")
    if proposal.edit_hash in context.cases.failed_edits():
        return None, TraceLine(skill.name, "failed_before", _shown(edits))
    success = context.cases.success(skill.name, skill.factor, skill.wins, skill.losses)
    detail = f"{_shown(edits)}; strength {strength:.2f}, expected success {success:.2f}"
    return proposal, TraceLine(skill.name, "proposed", detail, strength * success)


def _intervention(skill: Skill, edits: dict[str, Any], values: dict[str, float]) -> Intervention:
    used = dict.fromkeys([*names_in(skill.trigger), *names_in(skill.strength)])
    cited = {name: float(values[name]) for name in used}
    shown = ", ".join(f"{name} {value:.3g}" for name, value in cited.items())
    return Intervention(
        rule=skill.name,
        factor=skill.factor,
        hypothesis=f"{skill.hypothesis} Seen: {shown}. Change: {_shown(edits)}.",
        edits=edits,
        predicts=skill.expected,
        success_criterion=skill.validation,
        rollback=skill.rollback,
        evidence=cited,
        origin="rule",
    )


def _shown(edits: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in edits.items())


def _numbers(config: dict[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in config.items() if isinstance(v, (bool, int, float))}
