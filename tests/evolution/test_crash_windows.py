"""What a kill between two lines leaves behind, and that the next session gets over it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from omegaconf import OmegaConf

from evojax.config import EvojaxConf
from evojax.errors import InputError
from evojax.evidence.reader import Evidence
from evojax.evolution.arms import ArmPlan, ArmRunner
from evojax.evolution.checkout import open_checkout
from evojax.evolution.examine import _seen
from evojax.evolution.git import Git
from evojax.evolution.harness import HarnessRepo
from evojax.evolution.memory.ledger import Ledger
from evojax.evolution.reproduce import checked_out
from evojax.evolution.rounds import read_plan
from evojax.evolution.store import VersionResult, VersionStore
from evojax.training.version import write_json


def tree(top: Path) -> Path:
    (top / "conf" / "algorithm").mkdir(parents=True)
    (top / "conf" / "config.yaml").write_text("defaults: [_self_]\n")
    (top / "conf" / "algorithm" / "grpo.yaml").write_text("lr: 1.0e-5\n")
    (top / "skills_library" / "shared").mkdir(parents=True)
    (top / "skills_library" / "shared" / "note.md").write_text("x\n")
    return top


@pytest.fixture
def repo(tmp_path: Path) -> HarnessRepo:
    source = tree(tmp_path / "src")
    run = tmp_path / "run"
    return HarnessRepo.create(
        run / "harness", source / "conf", source / "skills_library", run / "worktrees", "math",
        {"Version": "v000"},
    )  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    top = tree(tmp_path / "project")
    git = Git(top)
    git.run("init", "--quiet", "--initial-branch=main")
    git.run("add", ".")
    git.run("commit", "--quiet", "--message=start")
    return top


def test_a_merge_that_a_kill_left_half_made_is_made_again(repo: HarnessRepo) -> None:
    branch = repo.branch_name("v002", "x")
    worktree = repo.worktree(branch, repo.head())
    path = worktree / "conf" / "algorithm" / "grpo.yaml"
    path.write_text("lr: 2.0e-5\n")
    repo.commit(worktree, [path], "change", {"Version": "v002"})
    # Killed before the message was written to git's standard input: git leaves the merge open.
    repo.git.run("merge", "--no-ff", "--file=/dev/stdin", branch, check=False)
    assert repo.git.ok("rev-parse", "--verify", "--quiet", "MERGE_HEAD")
    made = repo.merge(branch, "Merge", {"Version": "v002", "Verdict": "promoted"})
    assert repo.head() == made
    assert repo.git.run("status", "--porcelain") == ""
    assert "2.0e-5" in (repo.trunk_dir / "conf" / "algorithm" / "grpo.yaml").read_text()


def test_a_second_run_on_a_checkout_does_not_take_merged_versions_for_its_own(
    checkout: Path, tmp_path: Path
) -> None:
    start = {"Version": "v000"}
    first = open_checkout(checkout, tmp_path / "one" / "worktrees", "math", "one", start)
    first.record_verdict(first.trunk_dir, "v001", "better by 0.1", {"Verdict": "promoted"})
    Git(checkout).run("merge", "--quiet", first.trunk)
    second = open_checkout(checkout, tmp_path / "two" / "worktrees", "math", "two", start)
    assert second.find("v000") == second.head()
    made = second.record_verdict(second.trunk_dir, "v001", "worse", {"Verdict": "rejected"})
    assert second.find("v001", verdict=True) == made
    again = open_checkout(checkout, tmp_path / "two" / "worktrees", "math", "two", start)
    assert again.head() == made


def test_the_command_line_is_part_of_the_first_commit_on_a_checkout(
    checkout: Path, tmp_path: Path
) -> None:
    def prepare(conf: Path) -> Path:
        path = conf / "algorithm" / "grpo.yaml"
        path.write_text("lr: 3.0e-5\n")
        return path

    worktrees = tmp_path / "run" / "worktrees"
    repo = open_checkout(checkout, worktrees, "math", "r", {"Version": "v000"}, prepare)
    again = open_checkout(checkout, worktrees, "math", "r", {"Version": "v000"}, prepare)
    assert again.head() == repo.head() == repo.find("v000")
    assert "+lr: 3.0e-5" in repo.diff(f"{repo.head()}^", repo.head())
    assert "1.0e-5" in (checkout / "conf" / "algorithm" / "grpo.yaml").read_text()
    (tmp_path / "run" / "run.json").write_text("{}")
    found = checked_out(repo.trunk_dir / "conf")
    assert found is not None and found.run_dir == (tmp_path / "run").resolve()


def test_a_session_is_one_event_with_its_latest_seconds(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.session("session-1", 5.0)
        ledger.session("session-1", 9.0)
        ledger.session("session-2", 1.0)
        assert [e["seconds"] for e in ledger.events() if e["kind"] == "session"] == [9.0, 1.0]


def test_a_verdict_in_other_words_leaves_the_committed_one(repo: HarnessRepo) -> None:
    first = repo.record_verdict(repo.trunk_dir, "v001", "better", {"Verdict": "promoted"})
    again = repo.record_verdict(repo.trunk_dir, "v001", "improved", {"Verdict": "is promoted"})
    assert again == first == repo.head()
    assert (repo.trunk_dir / "verdicts" / "v001.md").read_text() == "better\n"
    assert repo.git.run("status", "--porcelain") == ""


def test_metrics_do_not_see_the_audit_split() -> None:
    tables = {
        "rollouts": pa.table({"split": ["train", "audit", "eval"]}),
        "turns": pa.table({"split": ["audit"]}),
        "updates": pa.table({"step": [1]}),
    }
    seen = _seen(Evidence(tables)).tables
    assert seen["rollouts"]["split"].to_pylist() == ["train", "eval"]
    assert (seen["turns"].num_rows, seen["updates"].num_rows) == (0, 1)


@pytest.mark.parametrize("text", ["{", "[]", '{"protocol": null, "ci95": null, "colour": 1}'])
def test_a_result_of_another_form_is_an_input_error(tmp_path: Path, text: str) -> None:
    store = VersionStore(tmp_path)
    result = VersionResult("v001", None, "recipe", 0, "main", "c", "trained", "h", 0, 1)
    store.path("v001").mkdir(parents=True)
    store.save(result)
    assert store.result("v001") == result
    (store.path("v001") / "result.json").write_text(text)
    with pytest.raises(InputError) as caught:
        store.result("v001")
    assert "result.json" in str(caught.value)


def test_a_candidate_beyond_the_context_fails_and_the_round_goes_on(tmp_path: Path) -> None:
    cfg = OmegaConf.structured(EvojaxConf(experiment="x"))
    cfg.sampling.max_new_tokens = 60
    shop: Any = SimpleNamespace(
        cfg=cfg,
        model=SimpleNamespace(max_position=64),
        longest_prompt=10,
        view=SimpleNamespace(note=lambda text: None),
    )
    plan = ArmPlan("v002", "v001", "candidate", 1, "b", "c", cfg, 12, 6)
    result = ArmRunner(shop, VersionStore(tmp_path)).run(plan)
    assert (result.status, result.score) == ("failed", None)
    assert "leaves 54 of the context" in result.error
    assert VersionStore(tmp_path).result("v002") == result


def test_a_plan_of_another_form_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "r1.json"
    write_json(path, {"number": 1})
    with pytest.raises(InputError, match=r"r1\.json"):
        read_plan(path)
