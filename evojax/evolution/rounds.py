"""One round's plan: which candidates are worth training, each a commit on its own branch.

The plan is written to ``rounds/r<n>.json`` once it is complete; a resumed run reads it back.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from evojax.errors import InputError, Problem
from evojax.evidence.reader import load as load_evidence
from evojax.evolution.backtest import BacktestResult, backtest
from evojax.evolution.boundary import single_factor_check
from evojax.evolution.config_edit import compose_conf, experiment_override, set_key
from evojax.evolution.harness import HarnessRepo
from evojax.evolution.intervention import Intervention
from evojax.evolution.memory.cases import CaseMemory
from evojax.evolution.memory.ledger import Ledger
from evojax.evolution.memory.skills import load_skills
from evojax.evolution.proposers.base import PROPOSERS, ProposalContext
from evojax.evolution.store import VersionResult, VersionStore
from evojax.evolution.workshop import typed
from evojax.preflight import recipe_problems
from evojax.training.version import read_json, write_json


@dataclass(frozen=True)
class Planned:
    """A candidate that may be trained."""

    version: str
    proposal: Intervention
    backtest: dict[str, Any]
    branch: str
    commit: str
    worktree: str


@dataclass(frozen=True)
class RoundPlan:
    """What a round trains beside its control, and what it refused to train and why."""

    number: int
    parent: str
    candidates: tuple[Planned, ...]
    refused: tuple[dict[str, Any], ...]
    trace: tuple[dict[str, Any], ...]

    def proposals(self) -> list[Intervention]:
        """Everything that was considered closely: candidates first, then what was refused."""
        refused = [Intervention.model_validate(r["proposal"]) for r in self.refused]
        return [c.proposal for c in self.candidates] + refused

    def to_json(self) -> dict[str, Any]:
        raw = dataclasses.asdict(self)
        for entry, planned in zip(raw["candidates"], self.candidates, strict=True):
            entry["proposal"] = planned.proposal.model_dump()
        return raw

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RoundPlan:
        candidates = tuple(
            Planned(**{**c, "proposal": Intervention.model_validate(c["proposal"])})
            for c in raw["candidates"]
        )
        return cls(
            raw["number"], raw["parent"], candidates, tuple(raw["refused"]), tuple(raw["trace"])
        )


def stored_plans(run_dir: Path) -> list[RoundPlan]:
    """Plans of the rounds that a run has begun, in order."""
    paths = sorted((run_dir / "rounds").glob("r*.json"), key=lambda p: int(p.stem[1:]))
    return [read_plan(path) for path in paths]


def read_plan(path: Path) -> RoundPlan:
    """A stored plan.

    Raises:
        InputError: the file is damaged, or another evojax wrote it.
    """
    raw = read_json(path)
    try:
        return RoundPlan.from_json(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError.one(
            f"not a round's plan as this evojax writes it ({type(error).__name__}: {error})",
            "resume",
            str(path),
            "read the run with the evojax that made it",
        ) from error


class Planner:
    """Turns evidence into the candidates of a round (single-factor mode).

    Args:
        cfg: the run's configuration: boundary, proposer and number of candidates.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: DictConfig,
        repo: HarnessRepo,
        store: VersionStore,
        ledger: Ledger,
        cases: CaseMemory,
    ):
        self.run_dir = run_dir
        self.cfg = cfg
        self.repo = repo
        self.store = store
        self.ledger = ledger
        self.cases = cases
        self.mutable = list(cfg.evolution.boundary.mutable)

    def plan(
        self, number: int, parent: VersionResult, metrics: Mapping[str, float], first: int
    ) -> RoundPlan:
        """The plan of round ``number``, made now or read back.

        Args:
            parent: version that the round starts from. metrics: its health, plain numbers.
            first: number of the first candidate version.
        """
        path = self.run_dir / "rounds" / f"r{number}.json"
        if path.exists():
            return read_plan(path)
        trunk = self.repo.trunk_dir
        parent_cfg = self._compose(trunk / "conf")
        context = ProposalContext(
            metrics=metrics,
            cfg=parent_cfg,
            skills=load_skills(trunk / "skills_library", self.cfg.domain.name),
            cases=self.cases,
            mutable=self.mutable,
            count=self.cfg.evolution.candidates,
            seed=self.cfg.seed + number,
        )
        proposals = PROPOSERS.get(self.cfg.evolution.proposer, "evolution.proposer")(context)
        planned: list[Planned] = []
        refused: list[dict[str, Any]] = []
        for proposal in proposals.interventions:
            if len(planned) == self.cfg.evolution.candidates:
                break
            version = f"v{first + len(planned):03d}"
            found = self._consider(proposal, parent, parent_cfg, version)
            if isinstance(found, Planned):
                planned.append(found)
            else:
                refused.append({"proposal": proposal.model_dump(), "reasons": found})
                self.ledger.event(
                    f"r{number}-refused-{proposal.edit_hash}",
                    "refused",
                    rule=proposal.rule,
                    reasons=found,
                )
        plan = RoundPlan(
            number,
            parent.version,
            tuple(planned),
            tuple(refused),
            tuple(dataclasses.asdict(line) for line in proposals.trace),
        )
        path.parent.mkdir(exist_ok=True)
        write_json(path, plan.to_json())
        return plan

    def _consider(
        self,
        proposal: Intervention,
        parent: VersionResult,
        parent_cfg: DictConfig,
        version: str,
    ) -> Planned | list[str]:
        """Check, backtest and commit one proposal; the reasons when it is refused."""
        tried = [c for c in self.cases.cases if c.edit_hash == proposal.edit_hash]
        same = [c for c in tried if c.parent == parent.version]
        if same:
            return [f"tried from {parent.version} as {same[0].version}: {same[0].outcome}"]
        problems = self._rehearse(proposal)
        if problems:
            return [str(p) for p in problems]
        rollouts = load_evidence(self.store.path(parent.version)).rollouts("train")
        replay = backtest(proposal, rollouts, typed(parent_cfg))
        if replay.refused:
            return list(replay.refusals)
        return self._commit(proposal, parent, version, replay)

    def _rehearse(self, proposal: Intervention) -> list[Problem]:
        """The single-factor check and preflight's, on a copy, before any branch is made."""
        with tempfile.TemporaryDirectory(dir=self.run_dir, prefix=".rehearsal-") as name:
            copy = Path(name) / "conf"
            shutil.copytree(self.repo.trunk_dir / "conf", copy)
            try:
                paths = self._apply(copy, proposal)
                candidate = self._compose(copy, with_hydra=True)
            except InputError as error:
                return list(error.problems)
            changed = [f"conf/{path.relative_to(copy).as_posix()}" for path in paths]
        parent = self._compose(self.repo.trunk_dir / "conf", with_hydra=True)
        found = single_factor_check(parent, candidate, self.mutable, changed, proposal.factor)
        return found or recipe_problems(candidate)

    def _compose(self, conf: Path, with_hydra: bool = False) -> DictConfig:
        return compose_conf(conf, [experiment_override(self.cfg.experiment)], with_hydra)

    def _apply(self, conf: Path, proposal: Intervention) -> list[Path]:
        edits = proposal.edits.items()
        return [set_key(conf, self.cfg.experiment, key, value) for key, value in edits]

    def _commit(
        self,
        proposal: Intervention,
        parent: VersionResult,
        version: str,
        replay: BacktestResult,
    ) -> Planned | list[str]:
        start = self.repo.head()
        branch = self.repo.branch_name(version, proposal.slug)
        worktree = self.repo.worktree(branch, start)
        paths = self._apply(worktree / "conf", proposal)
        commit = self.repo.commit(
            worktree,
            paths,
            f"{version}: {proposal.rule}\n\n{proposal.hypothesis}\n\n"
            f"Success criterion: {proposal.success_criterion}\nRollback: {proposal.rollback}",
            {
                "Version": version,
                "Parent": parent.version,
                "Factor": proposal.factor,
                "Hypothesis": proposal.hypothesis,
                "Predicts": proposal.predicts,
                "Backtest": replay.words,
            },
        )
        if commit is None:
            self.repo.remove_worktree(branch)
            return ["the edits change nothing: a duplicate of the parent"]
        return Planned(version, proposal, dataclasses.asdict(replay), branch, commit, str(worktree))
