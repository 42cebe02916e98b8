"""Which version a configuration tree is, and whether a second training gave the same rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from evojax.evidence.reader import Evidence
from evojax.evolution.git import Git, GitError, parse_trailers

# What training decides. Seconds, the run's name and version tags may differ between two trainings.
_DECIDED = (
    "split", "step", "item", "group", "sample", "seed", "token_ids", "loss_mask",
    "rollout_logprobs", "grade_status", "reward", "advantage", "kept",
)  # fmt: skip


@dataclass(frozen=True)
class CheckedOut:
    """A version checked out from a run's harness repository.

    Args:
        version, parent: from the commit's trailers; parent None for the base version.
        commit: its id. run_dir: the run that the repository belongs to.
    """

    version: str
    parent: str | None
    commit: str
    run_dir: Path


def checked_out(conf_dir: Path) -> CheckedOut | None:
    """The version whose tree ``conf_dir`` is, None for a tree outside a run's repository."""
    top = conf_dir.resolve().parent
    if not (top / ".git").exists():
        return None
    git = Git(top)
    try:
        common = Path(git.run("rev-parse", "--path-format=absolute", "--git-common-dir"))
        log = git.run("log", "-z", "--first-parent", "--format=%H%n%B")
    except GitError:
        return None
    # A private repository is inside its run; of a user's checkout only the worktrees are.
    places = (common.parent.parent, top.parent.parent)
    run_dir = next((p for p in places if (p / "run.json").is_file()), None)
    if run_dir is None:
        return None
    for record in filter(None, log.split("\0")):
        sha, message = record.split("\n", 1)
        found = parse_trailers(message)
        if "Version" in found:
            parent = found.get("Parent", "none")
            return CheckedOut(found["Version"], None if parent == "none" else parent, sha, run_dir)
    return None


def same_rollouts(one: Evidence, two: Evidence) -> bool:
    """Whether two trainings sampled the same tokens with the same rewards, row for row."""
    return _decided(one).equals(_decided(two))


def _decided(evidence: Evidence) -> pa.Table:
    table = evidence.rollouts("train")
    keys = [(name, "ascending") for name in ("step", "group", "sample")]
    return table.select(list(_DECIDED)).sort_by(keys).combine_chunks()
