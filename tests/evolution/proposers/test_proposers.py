"""The playbook and the random proposer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from omegaconf import DictConfig

from evojax.evolution.boundary import edit_problems
from evojax.evolution.config_edit import compose_conf
from evojax.evolution.intervention import Intervention
from evojax.evolution.memory.cases import Case, CaseMemory
from evojax.evolution.memory.skills import load_skills
from evojax.evolution.proposers import PROPOSERS
from evojax.evolution.proposers.base import ProposalContext
from evojax.guards import hiding

TOP = Path(__file__).parents[3]
MUTABLE = ["reward", "filter", "sampling", "data", "algorithm", "diagnostics"]
SICK = {
    "dead_group_share": 0.6, "dead_all_wrong_share": 0.2, "item_saturation": 0.3,
    "item_hopeless": 0.1, "entropy": 0.35, "entropy_trend": -0.2, "train_accuracy": 0.6,
    "reward_trend": 0.02, "grad_norm_spike": 3.0, "wasted_rollout_share": 0.6,
    "truncation_share": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def cfg() -> DictConfig:
    return compose_conf(TOP / "conf", ["+experiment=math"])


@pytest.fixture
def context(cfg: DictConfig) -> ProposalContext:
    skills = load_skills(TOP / "skills_library", "math")
    return ProposalContext(SICK, cfg, skills, CaseMemory(), MUTABLE)


def playbook(context: ProposalContext) -> tuple[list[Intervention], dict[str, str]]:
    found = PROPOSERS.get("playbook", "evolution.proposer")(context)
    return found.interventions, {line.rule: line.state for line in found.trace}


def failed(intervention: Intervention, outcome: str = "rejected") -> Case:
    return Case.of("v002", "v001", intervention, outcome)


def test_a_sick_run_gets_proposals_of_distinct_factors(context: ProposalContext) -> None:
    got, trace = playbook(context)
    assert {i.factor for i in got} == {"filter", "data", "sampling", "reward", "algorithm"}
    assert len({i.factor for i in got[:5]}) == 5 and len(got) >= 6
    assert all(edit_problems(i.edits, MUTABLE) == [] for i in got)
    assert len(trace) == len(context.skills)
    by_rule = {i.rule: i for i in got}
    assert by_rule["refill-dead-groups"].edits == {"filter.refill_rounds": 2}
    assert by_rule["warmer-sampling"].edits == {"sampling.temperature": 1.2}
    assert by_rule["faster-learning"].edits["algorithm.lr"] == pytest.approx(
        2 * context.cfg.algorithm.lr
    )
    assert "dead_group_share 0.6" in by_rule["refill-dead-groups"].hypothesis
    assert by_rule["refill-dead-groups"].evidence["dead_group_share"] == 0.6
    assert playbook(context) == (got, trace)


def test_a_healthy_run_gets_none(context: ProposalContext) -> None:
    healthy = SICK | {
        "dead_group_share": 0.1, "dead_all_wrong_share": 0.0, "item_saturation": 0.0,
        "item_hopeless": 0.0, "entropy": 0.8, "reward_trend": 0.5, "wasted_rollout_share": 0.1,
    }  # fmt: skip
    got, trace = playbook(dataclasses.replace(context, metrics=healthy))
    assert got == [] and set(trace.values()) == {"quiet"}


def test_a_missing_metric_never_counts_as_zero(context: ProposalContext) -> None:
    got, trace = playbook(dataclasses.replace(context, metrics={}))
    assert got == [] and set(trace.values()) == {"missing"}
    some = {k: v for k, v in SICK.items() if k != "grad_norm_spike"}
    _, trace = playbook(dataclasses.replace(context, metrics=some))
    assert trace["second-epoch"] == "missing" and trace["refill-dead-groups"] == "proposed"


def test_failed_edits_do_not_come_back(context: ProposalContext) -> None:
    first = playbook(context)[0][0]
    for outcome, state in (("rejected", "failed_before"), ("invalid", "failed_before"),
                           ("undecided", "proposed")):  # fmt: skip
        memory = CaseMemory([failed(first, outcome)])
        got, trace = playbook(dataclasses.replace(context, cases=memory))
        assert trace[first.rule] == state
        assert (first.rule in {i.rule for i in got}) == (state == "proposed")


def test_success_moves_a_rule_up_and_failure_down(context: ProposalContext) -> None:
    got, _ = playbook(context)
    last = got[4]
    wins = CaseMemory([dataclasses.replace(failed(last, "promoted"), version=f"v{n}",
                                           edit_hash=str(n)) for n in range(20)])  # fmt: skip
    ranked = [i.rule for i in playbook(dataclasses.replace(context, cases=wins))[0]]
    assert ranked.index(last.rule) < 4
    losses = CaseMemory([dataclasses.replace(failed(got[0]), version=f"v{n}", edit_hash=str(n))
                         for n in range(20)])  # fmt: skip
    ranked = [i.rule for i in playbook(dataclasses.replace(context, cases=losses))[0]]
    assert ranked[0] != got[0].rule


def test_outside_the_boundary_and_unchanged(context: ProposalContext) -> None:
    _, trace = playbook(dataclasses.replace(context, mutable=["data"]))
    assert trace["refill-dead-groups"] == "refused"
    assert trace["difficulty-aware-items"] == "proposed"
    cfg = compose_conf(TOP / "conf", ["+experiment=math", "data=difficulty"])
    _, trace = playbook(dataclasses.replace(context, cfg=cfg))
    assert trace["difficulty-aware-items"] == "unchanged"


def test_random_edits_are_seeded_distinct_and_admissible(context: ProposalContext) -> None:
    propose = PROPOSERS.get("random", "evolution.proposer")
    for seed in range(30):
        at = dataclasses.replace(context, seed=seed, count=3)
        got = propose(at).interventions
        assert got == propose(at).interventions
        assert len({i.factor for i in got}) == len(got) == 3
        assert all(not edit_problems(i.edits, MUTABLE) for i in got)
        assert not any(i.unchanged(context.cfg) for i in got)
        assert all(hiding(context.cfg, key) is None for i in got for key in i.edits)
    seen = {propose(dataclasses.replace(context, seed=s)).interventions[0].rule for s in range(30)}
    assert len(seen) > 5


def test_random_edits_name_no_rule_that_the_domain_records_nothing_for(
    context: ProposalContext,
) -> None:
    propose = PROPOSERS.get("random", "evolution.proposer")
    drawn = [
        i.edits["filter.trajectory"]
        for seed in range(40)
        for i in propose(dataclasses.replace(context, seed=seed, count=100)).interventions
        if "filter.trajectory" in i.edits
    ]
    assert drawn and all(names == ["truncated"] for names in drawn)
