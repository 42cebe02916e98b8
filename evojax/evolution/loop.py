"""The loop: base -> first training -> rounds of (diagnose, propose, backtest, train, judge).

Every stage is idempotent: it finds what an earlier, interrupted call left finished and does the
rest. So ``resume`` is nothing but running the same loop again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from evojax.config import EvojaxConf
from evojax.diagnostics.health import HealthReport
from evojax.evolution.arms import ArmPlan, ArmRunner
from evojax.evolution.config_edit import compose_conf, experiment_override
from evojax.evolution.examine import examine
from evojax.evolution.gate import Verdict
from evojax.evolution.harness import HarnessRepo
from evojax.evolution.judging import (
    against_parent,
    judge,
    mechanism,
    mechanism_words,
    verdict_document,
    verdict_json,
)
from evojax.evolution.memory.cases import Case, CaseMemory
from evojax.evolution.memory.ledger import Ledger
from evojax.evolution.memory.skills import distil, record_outcome
from evojax.evolution.rounds import Planned, Planner, RoundPlan
from evojax.evolution.standing import BASE, FIRST, Outcome, best_promoted, control_of, standing
from evojax.evolution.store import VersionResult, VersionStore
from evojax.evolution.workshop import Workshop
from evojax.training.version import read_json, write_json


class Evolution:
    """One run of the loop in its run directory.

    Args:
        cfg, conf: the run's configuration, composed and typed; versions have their own,
            composed from their commits.
        repo: harness repository, seeded with the base recipe.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: DictConfig,
        conf: EvojaxConf,
        shop: Workshop,
        repo: HarnessRepo,
        ledger: Ledger,
    ):
        self.run_dir = run_dir
        self.cfg = cfg
        self.conf = conf
        self.shop = shop
        self.repo = repo
        self.ledger = ledger
        self.store = VersionStore(run_dir)
        self.runner = ArmRunner(shop, self.store)
        self.cases = CaseMemory.load(ledger)
        self.planner = Planner(run_dir, cfg, repo, self.store, ledger, self.cases)
        self.verdicts: dict[str, dict[str, Any]] = {}
        self.picks = [experiment_override(cfg.experiment)]
        self._health: dict[str, HealthReport] = {}

    def run(self) -> Outcome:
        """The whole loop; see the module."""
        base = self._run(self._base_plan())
        current = self._first_version(base)
        plans: list[RoundPlan] = []
        for number in range(1, self.conf.evolution.rounds + 1):
            first = 2 + sum(len(plan.candidates) for plan in plans)
            plans.append(self._round(number, current, first, plans))
            current = self.store.require(standing(self.verdicts, plans)[0])
        final, promoted = standing(self.verdicts, plans)
        return Outcome(final, promoted, self.verdicts, plans, self._audit([BASE, final]))

    def _run(self, plan: ArmPlan) -> VersionResult:
        self.shop.guard.check()
        result = self.runner.run(plan)
        self.ledger.upsert_version(
            plan.version,
            plan.role if result.status == "trained" else result.status,
            parent=plan.parent,
            branch=plan.branch,
            commit_sha=plan.commit,
            factor=plan.factor,
            hypothesis=plan.hypothesis,
            score=result.score,
            ci95=result.ci95,
            config_hash=result.config_hash,
            items=len(result.scores),
        )
        self.ledger.event(
            f"finished-{plan.version}",
            "finished",
            plan.version,
            status=result.status,
            seconds=result.seconds,
        )
        if result.status == "trained":
            self.health(result)
        return result

    def health(self, result: VersionResult) -> HealthReport:
        """The version's health beside its parent's; computed once per process."""
        if result.version not in self._health:
            self.shop.view.phase("diagnose", result.version)
            parent = None if result.parent in (None, BASE) else result.parent
            conf_dir = self.repo.trunk_dir / "conf"
            self._health[result.version] = examine(
                self.store, result.version, parent, self.conf, conf_dir
            )
        return self._health[result.version]

    def _compose(self, conf_dir: Path) -> DictConfig:
        return compose_conf(conf_dir, self.picks)

    def _base_plan(self) -> ArmPlan:
        cfg = self._compose(self.repo.trunk_dir / "conf")
        commit = self.repo.find(BASE) or self.repo.head()
        return ArmPlan(BASE, None, "base", 0, self.repo.trunk, commit, cfg, 0, 0)

    def _first_version(self, base: VersionResult) -> VersionResult:
        hypothesis = (
            "Training with the base recipe raises Avg@k on held-out items over the base policy."
        )
        commit = self._note_commit(self.repo.trunk_dir, FIRST, BASE, hypothesis)
        result = self._run(
            ArmPlan(
                FIRST,
                BASE,
                "recipe",
                0,
                self.repo.trunk,
                commit,
                self._compose(self.repo.trunk_dir / "conf"),
                0,
                self.conf.train.steps,
                hypothesis=hypothesis,
            )  # fmt: skip
        )
        verdict = judge(base, [result], self.conf.evolution.gate)[FIRST]
        self._file(result, verdict, None)
        self.repo.record_verdict(
            self.repo.trunk_dir,
            FIRST,
            f"# {FIRST}: {verdict.outcome}\n\n{verdict.words}\n",
            {"Parent": BASE, "Factor": "none", "Verdict": verdict.words},
        )
        return result

    def _note_commit(self, worktree: Path, version: str, parent: str, hypothesis: str) -> str:
        """A commit that marks a version whose recipe is its parent's, unchanged."""
        if known := self.repo.find(version):
            return known
        note = worktree / "versions" / f"{version}.md"
        note.parent.mkdir(exist_ok=True)
        note.write_text(f"# {version}\n\nParent: {parent}. {hypothesis}\n", encoding="utf-8")
        made = self.repo.commit(
            worktree,
            [note],
            f"{version}: {hypothesis}",
            {
                "Version": version,
                "Parent": parent,
                "Factor": "none",
                "Hypothesis": hypothesis,
                "Predicts": "accuracy up" if version == FIRST else "no change of recipe",
                "Backtest": "none",
            },
        )
        return made or self.repo.head(self.repo.at(worktree))

    def _round(
        self, number: int, parent: VersionResult, first: int, earlier: list[RoundPlan]
    ) -> RoundPlan:
        health = self.health(parent)
        for alert in health.alerts:
            self.shop.view.note(f"{parent.version}: {alert.in_words()}")
        self.shop.view.phase("propose", parent.version)
        plan = self.planner.plan(number, parent, health.numbers(), first)
        for refusal in plan.refused:
            words = "; ".join(refusal["reasons"])
            self.shop.view.note(f"refused {refusal['proposal']['rule']}: {words}")
        for planned in plan.candidates:
            self.shop.view.note(f"{planned.version}: {planned.proposal.hypothesis}")
            self.shop.view.note(f"{planned.version} backtest: {planned.backtest['words']}")
        control = self._run(self._control_plan(control_of(plan, earlier), number, parent))
        results = [self._run(self._candidate_plan(number, parent, c)) for c in plan.candidates]
        symptoms = tuple(sorted({alert.metric for alert in health.alerts}))
        self._judge_round(number, plan, parent, control, results, symptoms)
        return plan

    def _control_plan(self, version: str, number: int, parent: VersionResult) -> ArmPlan:
        branch = self.repo.branch_name(version, "unchanged")
        worktree = self.repo.worktree(branch, self.repo.head())
        hypothesis = f"Control: the recipe of {parent.version}, unchanged, trained on."
        commit = self._note_commit(worktree, version, parent.version, hypothesis)
        return ArmPlan(
            version, parent.version, "control", number, branch, commit,
            self._compose(worktree / "conf"), parent.end_step, self.conf.train.candidate_steps,
            hypothesis=hypothesis,
        )  # fmt: skip

    def _candidate_plan(self, number: int, parent: VersionResult, planned: Planned) -> ArmPlan:
        worktree = self.repo.worktree(planned.branch, planned.commit)
        return ArmPlan(
            planned.version, parent.version, "candidate", number, planned.branch, planned.commit,
            self._compose(worktree / "conf"), parent.end_step, self.conf.train.candidate_steps,
            factor=planned.proposal.factor, hypothesis=planned.proposal.hypothesis,
        )  # fmt: skip

    def _judge_round(
        self,
        number: int,
        plan: RoundPlan,
        parent: VersionResult,
        control: VersionResult,
        results: list[VersionResult],
        symptoms: tuple[str, ...],
    ) -> None:
        self.shop.view.phase("judge", f"round {number}")
        self._file(control, against_parent(parent, control, self.conf.evolution.gate), None)
        verdicts = judge(control, results, self.conf.evolution.gate)
        best = best_promoted({r.version: verdict_json(verdicts[r.version], None) for r in results})
        for planned, result in zip(plan.candidates, results, strict=True):
            verdict = verdicts[result.version]
            moved = self._mechanism(planned, control, result)
            self._record(planned, result, verdict, moved, best)
            self._remember(planned, result, parent, verdict, symptoms)

    def _mechanism(
        self, planned: Planned, control: VersionResult, result: VersionResult
    ) -> dict[str, Any]:
        if result.status != "trained":
            metric = planned.proposal.predicts.metric
            return {"metric": metric, "control": None, "candidate": None, "moved": None}
        return mechanism(planned.proposal, self.health(control), self.health(result))

    def _record(
        self,
        planned: Planned,
        result: VersionResult,
        verdict: Verdict,
        moved: dict[str, Any],
        best: str | None,
    ) -> None:
        """Commit the verdict; the best promoted candidate is merged and its skill distilled."""
        self._file(result, verdict, moved)
        trailers = {
            "Parent": result.parent or "none",
            "Factor": planned.proposal.factor,
            "Hypothesis": planned.proposal.hypothesis,
            "Predicts": planned.proposal.predicts,
            "Backtest": planned.backtest["words"],
            "Verdict": verdict.words,
        }
        document = verdict_document(result, verdict, planned.proposal, moved)
        worktree = self.repo.worktree(planned.branch, planned.commit)
        self.repo.record_verdict(worktree, result.version, document, trailers)
        if result.version == best:
            message = f"Merge {result.version}: {planned.proposal.rule} is promoted"
            self.repo.merge(planned.branch, message, {"Version": result.version, **trailers})
        if verdict.outcome in ("promoted", "rejected"):
            self._learn(planned, result, verdict)
        self.shop.view.note(f"{verdict.words} {mechanism_words(moved)}")

    def _learn(self, planned: Planned, result: VersionResult, verdict: Verdict) -> None:
        """Write the verdict into the harness's skill library, as a commit on the trunk."""
        library = self.repo.trunk_dir / "skills_library"
        note = f"{self.cfg.experiment} seed {self.cfg.seed}, {verdict.words}"
        if verdict.outcome == "promoted":
            path = distil(library, self.cfg.domain.name, planned.proposal, note, verdict.words)
        else:
            found = record_outcome(library, planned.proposal.slug, False, note)
            if found is None:
                return
            path = found
        self.repo.commit(
            self.repo.trunk_dir,
            [path],
            f"Skill {planned.proposal.slug}: {verdict.outcome} as {result.version}",
            {"Skill": planned.proposal.slug, "Learned-From": result.version},
        )

    def _remember(
        self,
        planned: Planned,
        result: VersionResult,
        parent: VersionResult,
        verdict: Verdict,
        symptoms: tuple[str, ...],
    ) -> None:
        compared = verdict.comparison
        case = Case.of(
            result.version,
            parent.version,
            planned.proposal,
            verdict.outcome,
            evidence=dict(planned.proposal.evidence),
            symptoms=symptoms,
            delta=None if compared is None else compared.mean,
            ci95=None if compared is None else compared.ci95,
            p=verdict.p_holm,
        )
        self.cases.add(self.ledger, case)

    def _file(self, result: VersionResult, verdict: Verdict, moved: dict[str, Any] | None) -> None:
        """Keep the verdict with the version and in the ledger."""
        raw = verdict_json(verdict, moved)
        self.verdicts[result.version] = raw
        write_json(self.store.path(result.version) / "verdict.json", raw)
        self.ledger.upsert_version(
            result.version,
            result.role if result.role in ("control", "recipe") else verdict.outcome,
            verdict=verdict.words,
        )

    def _audit(self, versions: list[str]) -> dict[str, dict[str, float | None]]:
        """Score each version once on the audit split; opened only here, and counted."""
        path = self.run_dir / "audit.json"
        known = read_json(path) if path.exists() else {"opened": 0, "scores": {}}
        for version in dict.fromkeys(versions):
            if version in known["scores"]:
                continue
            self.shop.guard.check()
            found = self.runner.audit(version)
            known["scores"][version] = {k: v if v == v else None for k, v in found.scores.items()}
            known["opened"] += 1
            self.ledger.event(f"audit-{version}", "audit", version, score=found.mean)
            write_json(path, known)
        return {v: known["scores"][v] for v in dict.fromkeys(versions)}
