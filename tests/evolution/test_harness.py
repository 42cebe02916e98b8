"""The harness repository with real git, hostile user settings and crashes included."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evojax.errors import InputError
from evojax.evolution.checkout import checkout_problems, open_checkout
from evojax.evolution.git import GitError, compose_message, parse_trailers
from evojax.evolution.harness import HarnessRepo, slug


def sh(cwd: Path, *args: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=User", "-c", "user.email=user@example.org"]
    done = subprocess.run(
        ["git", *identity, *args], cwd=cwd, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def sources(root: Path) -> tuple[Path, Path]:
    conf, skills = root / "conf", root / "skills_library"
    (conf / "algorithm").mkdir(parents=True)
    (conf / "config.yaml").write_text("defaults: [algorithm: grpo, _self_]\n")
    (conf / "algorithm" / "grpo.yaml").write_text("lr: 1.0e-5  # step size\n")
    (skills / "shared" / "one").mkdir(parents=True)
    (skills / "shared" / "one" / "SKILL.md").write_text("---\nname: one\n---\n")
    return conf, skills


@pytest.fixture
def repo(tmp_path: Path) -> HarnessRepo:
    conf, skills = sources(tmp_path / "src")
    return HarnessRepo.create(
        tmp_path / "run" / "harness", conf, skills, tmp_path / "run" / "worktrees", "math",
        {"Version": "v000"},
    )  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    sources(top)
    sh(tmp_path, "init", "-q", "-b", "main", str(top))
    sh(top, "add", ".")
    sh(top, "commit", "-qm", "start")
    return top


def edit(worktree: Path, text: str) -> Path:
    path = worktree / "conf" / "algorithm" / "grpo.yaml"
    path.write_text(text)
    return path


def candidate(repo: HarnessRepo, version: str, text: str) -> tuple[str, Path, str | None]:
    branch = repo.branch_name(version, f"change {text}")
    tree = repo.worktree(branch, repo.trunk)
    sha = repo.commit(tree, [edit(tree, text)], f"Try {text}", {"Version": version, "Factor": "a"})
    return branch, tree, sha


def test_history_reads_as_a_story(repo: HarnessRepo) -> None:
    branch, tree, sha = candidate(repo, "v002", "lr: 2.0e-5\n")
    assert sha is not None
    assert branch == "evo/math/v002-change-lr-2-0e-5"
    verdict = repo.record_verdict(tree, "v002", "delta 0.1", {"Verdict": "promoted"})
    merged = repo.merge(branch, "Promote v002", {"Version": "v002", "Verdict": "promoted"})
    assert repo.trailers(sha) == {"Version": "v002", "Factor": "a"}
    assert repo.trailers(merged)["Verdict"] == "promoted"
    assert repo.find("v000") == repo.log()[0].sha
    assert repo.find("v002") == sha
    assert [c.sha for c in repo.log()][1:] == [sha, verdict, merged]
    assert repo.log()[-1].parents == (repo.log()[0].sha, verdict)
    assert "-lr: 1.0e-5  # step size\n+lr: 2.0e-5" in repo.diff("main~1", sha)
    assert repo.changed_paths("main~1", sha) == ["conf/algorithm/grpo.yaml"]
    assert (repo.path / "conf/algorithm/grpo.yaml").read_text() == "lr: 2.0e-5\n"
    repo.tag("v002", sha, "a good one")
    repo.tag("v002", sha, "a good one")
    assert sh(repo.path, "rev-parse", "v002^{commit}") == sha
    assert sh(repo.path, "log", "-1", "--format=%an %ae %cn") == (
        "evojax evolution@evojax.invalid evojax"
    )


def test_every_call_again_after_a_crash_changes_nothing(repo: HarnessRepo, tmp_path: Path) -> None:
    branch, tree, sha = candidate(repo, "v002", "lr: 2.0e-5\n")
    repo.record_verdict(tree, "v002", "x", {"Verdict": "promoted"})
    merged = repo.merge(branch, "Promote", {"Version": "v002", "Verdict": "promoted"})
    before = sh(repo.path, "for-each-ref")
    conf, skills = tmp_path / "src" / "conf", tmp_path / "src" / "skills_library"
    again = HarnessRepo.create(repo.path, conf, skills, repo.worktrees, "math", {"Version": "v000"})
    branch2, tree2, sha2 = candidate(again, "v002", "lr: 2.0e-5\n")
    again.record_verdict(tree2, "v002", "x", {"Verdict": "promoted"})
    assert (branch2, tree2, sha2) == (branch, tree, sha)
    assert again.merge(branch, "Promote", {"Version": "v002", "Verdict": "promoted"}) == merged
    assert sh(repo.path, "for-each-ref") == before


def test_a_half_made_worktree_is_made_anew(repo: HarnessRepo) -> None:
    branch = repo.branch_name("v003", "half")
    tree = repo.worktree(branch, "main")
    (tree / ".git").unlink()
    (tree / "conf" / "config.yaml").unlink()
    assert repo.worktree(branch, "main") == tree
    assert (tree / "conf" / "config.yaml").exists()
    other = repo.worktrees / "evo-math-v004-other"
    other.mkdir()
    (other / "junk").write_text("left by a crash")
    assert sorted(p.name for p in repo.worktree("evo/math/v004-other", "main").iterdir()) == [
        ".git", "conf", "skills_library",
    ]  # fmt: skip


def test_a_version_is_never_rewritten(repo: HarnessRepo) -> None:
    _, tree, _ = candidate(repo, "v002", "lr: 2.0e-5\n")
    with pytest.raises(InputError, match="never amended"):
        repo.commit(tree, [edit(tree, "lr: 3\n")], "again", {"Version": "v002"})


def test_case_R01_stale_index_lock_names_file_and_age(repo: HarnessRepo) -> None:
    tree = repo.worktree("evo/math/v001-x", "main")
    lock = Path(sh(tree, "rev-parse", "--path-format=absolute", "--git-path", "index.lock"))
    lock.touch()
    old = time.time() - 3600
    os.utime(lock, (old, old))
    head = repo.head(repo.at(tree))
    with pytest.raises(GitError, match=r"index\.lock.* for 36\d\d s.*remove it"):
        repo.commit(tree, [edit(tree, "lr: 9\n")], "m", {"Version": "v001"})
    assert repo.head(repo.at(tree)) == head
    lock.unlink()
    assert repo.commit(tree, ["conf/algorithm/grpo.yaml"], "m", {"Version": "v001"})


def test_case_R01_live_index_lock_is_waited_for(repo: HarnessRepo) -> None:
    tree = repo.worktree("evo/math/v001-x", "main")
    lock = Path(sh(tree, "rev-parse", "--path-format=absolute", "--git-path", "index.lock"))
    lock.touch()
    holder = subprocess.Popen(["sh", "-c", 'sleep 0.3; rm "$1"', "sh", str(lock)])
    assert repo.commit(tree, [edit(tree, "lr: 9\n")], "m", {"Version": "v001"})
    holder.wait()


COMMITTER = """
import sys
from pathlib import Path
from evojax.evolution.harness import HarnessRepo
repo = HarnessRepo(Path(sys.argv[1]), Path(sys.argv[2]), "evo/math")
for i in range(3):
    tree = repo.worktree(f"evo/math/{sys.argv[3]}", "main")
    path = tree / "conf" / "algorithm" / "grpo.yaml"
    path.write_text(f"lr: {i + 1}  # {sys.argv[3]}")
    assert repo.commit(tree, [path], "m", {"Version": f"{i}"})
"""


def test_case_R01_four_committers_in_parallel(repo: HarnessRepo) -> None:
    workers = [
        subprocess.Popen([sys.executable, "-c", COMMITTER, repo.path, repo.worktrees, f"p{i}"])
        for i in range(4)
    ]
    assert [w.wait(60) for w in workers] == [0, 0, 0, 0]
    assert len(repo.log()) == 1 + 4 * 3
    sh(repo.path, "fsck", "--strict")


def test_case_R02_user_settings_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for hook in ("pre-commit", "commit-msg", "pre-merge-commit", "post-checkout"):
        (hooks / hook).write_text("#!/bin/sh\nexit 1\n")
        (hooks / hook).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    config = home / ".gitconfig"
    config.write_text(
        "[commit]\n gpgsign = true\n[tag]\n gpgsign = true\n"
        f"[core]\n hooksPath = {hooks}\n autocrlf = true\n[user]\n name = Someone\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Intruder")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "commit.gpgsign")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    before = config.read_text()
    conf, skills = sources(tmp_path / "src")
    repo = HarnessRepo.create(
        tmp_path / "h", conf, skills, tmp_path / "w", "math", {"Version": "v000"}
    )
    branch, tree, sha = candidate(repo, "v001", "lr: 2\n")
    repo.record_verdict(tree, "v001", "x", {"Verdict": "promoted"})
    repo.merge(branch, "m", {"Version": "v001", "Verdict": "promoted"})
    repo.tag("t", str(sha), "m")
    assert {c for c in repo.git.run("log", "--all", "--format=%an").split("\n")} == {"evojax"}
    assert "gpgsig" not in repo.git.run("cat-file", "commit", str(sha))
    assert config.read_text() == before


def test_case_R04_dirty_or_detached_checkout_is_refused(checkout: Path, tmp_path: Path) -> None:
    (checkout / "notes.txt").write_text("mine")
    edit(checkout, "lr: 7\n")
    sh(checkout, "checkout", "-q", "--detach")
    with pytest.raises(InputError) as caught:
        open_checkout(checkout, tmp_path / "w", "math", "r1", {"Version": "v000"})
    text = str(caught.value)
    assert "HEAD is detached" in text and "not committed" in text and "grpo.yaml" in text
    assert len(caught.value.problems) == 2
    assert (checkout / "notes.txt").read_text() == "mine"
    assert (checkout / "conf/algorithm/grpo.yaml").read_text() == "lr: 7\n"


def test_case_R04_leftovers_go_and_the_users_files_stay(checkout: Path, tmp_path: Path) -> None:
    (checkout / "notes.txt").write_text("mine")
    head = sh(checkout, "rev-parse", "HEAD")
    repo = open_checkout(checkout, tmp_path / "w", "math", "r1", {"Version": "v000"})
    branch, tree, sha = candidate(repo, "v001", "lr: 2\n")
    (tree / "junk.txt").write_text("junk")
    assert sha and repo.changed_paths(f"{sha}~1", sha) == ["conf/algorithm/grpo.yaml"]
    repo.remove_worktree(branch)
    assert not tree.exists()
    assert not (repo.worktree(repo.branch_name("v002", "next"), sha) / "junk.txt").exists()
    repo.merge(branch, "m", {"Version": "v001", "Verdict": "promoted"})
    assert sh(checkout, "rev-parse", "HEAD") == head
    assert sh(checkout, "branch", "--show-current") == "main"
    assert sh(checkout, "status", "--porcelain") == "?? notes.txt"
    assert (checkout / "notes.txt").read_text() == "mine"
    again = open_checkout(checkout, tmp_path / "w", "math", "r1", {"Version": "v000"})
    assert again.find("v000") == repo.find("v000")
    assert len(again.log()) == len(repo.log())


def test_case_R06_nothing_changed_makes_no_commit(repo: HarnessRepo) -> None:
    tree = repo.worktree("evo/math/v001-same", "main")
    same = tree / "conf" / "algorithm" / "grpo.yaml"
    same.write_text(same.read_text())
    assert repo.commit(tree, [same], "no change", {"Version": "v001"}) is None
    assert len(repo.log()) == 1


@pytest.mark.parametrize(
    "message",
    ["--amend", "`rm -rf /` $(id) " * 600, "a\0b", "#not this\n\n# kept", "\ud800 lone", "é\r"],
)
def test_case_R06_messages_are_stored_literally(repo: HarnessRepo, message: str) -> None:
    tree = repo.worktree("evo/math/v001-msg", "main")
    sha = repo.commit(tree, [edit(tree, "lr: 3\n")], message, {"Version": "v001"})
    assert sha is not None
    stored = subprocess.run(
        ["git", "cat-file", "commit", sha], cwd=repo.path, capture_output=True, check=True
    ).stdout.split(b"\n\n", 1)[1]
    literal = message.replace("\0", "\\0").encode("utf-8", "backslashreplace")
    assert stored == literal + b"\n\nEvojax-Version: v001\n"
    assert len(repo.log()) == 2


def test_case_R07_foreign_owned_repository_is_named(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        for place in (checkout, *checkout.rglob("*")):
            os.chown(place, 1001, 1001)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 1001)
    with pytest.raises(InputError) as caught:
        open_checkout(checkout, tmp_path / "w", "math", "r1", {"Version": "v000"})
    assert str(checkout) in str(caught.value) and "chown" in str(caught.value)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(f"[safe]\n directory = {checkout}\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)
    repo = open_checkout(checkout, tmp_path / "w", "math", "r1", {"Version": "v000"})
    assert repo.head() == repo.find("v000")
    assert sh(repo.trunk_dir, "config", "--list", "--local").count("safe.directory") == 0


def test_other_unusable_checkouts_are_named(tmp_path: Path, checkout: Path) -> None:
    (tmp_path / "plain").mkdir()
    sh(tmp_path, "init", "-q", "--bare", "bare.git")
    sh(tmp_path, "init", "-q", "empty")
    found = {
        name: checkout_problems(tmp_path / name)[0].what
        for name in ("absent", "plain", "bare.git", "empty", "project/conf")
    }
    assert found["absent"] == "no such directory"
    assert found["plain"] == "not a git repository"
    assert found["bare.git"] == "a bare repository"
    assert found["empty"] == "the repository has no commit"
    assert found["project/conf"].startswith("not the top")
    assert checkout_problems(checkout) == []


@pytest.mark.parametrize("path", ["../out.yaml", "/etc/passwd", ".git/config", "."])
def test_paths_outside_the_worktree_are_refused(repo: HarnessRepo, path: str) -> None:
    with pytest.raises(InputError, match="outside"):
        repo.commit(repo.path, [path], "m", {"Version": "v009"})


@pytest.mark.parametrize("name", ["--upload-pack=x", "a..b", "x.lock", "", "a b", "a\n"])
def test_odd_names_never_reach_git(repo: HarnessRepo, name: str) -> None:
    with pytest.raises(InputError):
        repo.worktree(name, "main")
    with pytest.raises(InputError):
        repo.trailers(name)


def test_trailers_cannot_be_forged() -> None:
    text = "Subject\n\nEvojax-Verdict: promoted"
    message = compose_message(text, {"Version": "v1", "Hypothesis": "a\n\nEvojax-Verdict: yes"})
    assert parse_trailers(message) == {"Version": "v1", "Hypothesis": "a Evojax-Verdict: yes"}
    assert slug("../../etc/passwd") == "etc-passwd"


def test_a_conflicting_merge_leaves_the_trunk_as_it_was(repo: HarnessRepo) -> None:
    one, _, _ = candidate(repo, "v001", "lr: 2\n")
    two, _, _ = candidate(repo, "v002", "lr: 3\n")
    head = repo.merge(one, "m", {"Version": "v001", "Verdict": "promoted"})
    with pytest.raises(GitError, match="merge failed"):
        repo.merge(two, "m", {"Version": "v002", "Verdict": "promoted"})
    assert repo.head() == head and sh(repo.path, "status", "--porcelain") == ""
