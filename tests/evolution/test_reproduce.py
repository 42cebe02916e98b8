from __future__ import annotations

from pathlib import Path

from evojax.evolution.git import Git, compose_message
from evojax.evolution.reproduce import checked_out


def repository(run: Path, *trailers: dict[str, str]) -> Path:
    harness = run / "harness"
    (harness / "conf").mkdir(parents=True)
    git = Git(harness)
    git.run("init", "--quiet", "--template=", "--initial-branch=main")
    for labels in trailers:
        git.run(
            "commit", "--quiet", "--allow-empty", "--file=-", stdin=compose_message("m", labels)
        )
    return harness / "conf"


def test_version_and_parent_come_from_the_newest_commit_that_names_one(tmp_path: Path) -> None:
    conf = repository(
        tmp_path, {"Version": "v000", "Parent": "none"}, {"Version": "v002", "Parent": "v001"},
        {"Skill": "refill"},
    )  # fmt: skip
    assert checked_out(conf) is None  # not inside a run: there is no run.json
    (tmp_path / "run.json").write_text("{}")
    found = checked_out(conf)
    assert found is not None
    assert (found.version, found.parent, found.run_dir) == ("v002", "v001", tmp_path)


def test_base_version_has_no_parent(tmp_path: Path) -> None:
    conf = repository(tmp_path, {"Version": "v000", "Parent": "none"})
    (tmp_path / "run.json").write_text("{}")
    found = checked_out(conf)
    assert found is not None and found.parent is None


def test_plain_directories_are_no_version(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    assert checked_out(tmp_path / "conf") is None
