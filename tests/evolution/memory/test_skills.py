"""SKILL.md files: the shipped ones, damaged ones, and those the loop writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evojax.errors import InputError
from evojax.evolution.conditions import names_in
from evojax.evolution.intervention import Intervention, Predicts
from evojax.evolution.memory.skills import (
    Edit,
    distil,
    find_skill,
    load_skills,
    read_skill,
    record_outcome,
    skill_problems,
)

SHIPPED = Path(__file__).parents[3] / "skills_library"
MUTABLE = ["reward", "filter", "sampling", "data", "algorithm", "diagnostics"]


METRICS = {p.stem for p in (SHIPPED.parent / "conf" / "metrics").glob("*.yaml")}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    top = tmp_path / "skills_library"
    shutil.copytree(SHIPPED, top)
    return top


def new(rule: str = "two-temperatures") -> Intervention:
    return Intervention(
        rule=rule, factor="sampling", hypothesis="Warmer: is\nbetter # now",
        edits={"sampling.temperature": 1.1},
        predicts=Predicts(metric="entropy", direction="up", at_least=0.1),
        success_criterion="accuracy up", rollback="back", origin="llm",
        evidence={"entropy": 0.25, "reward_trend": -0.1},
    )  # fmt: skip


def test_shipped_skills_cover_the_factors() -> None:
    skills = load_skills(SHIPPED, "math")
    assert len(skills) >= 6
    assert {s.factor for s in skills} >= {"filter", "data", "sampling", "reward", "algorithm"}
    for skill in skills:
        names = [*names_in(skill.trigger), *names_in(skill.strength), skill.expected.metric]
        assert {n for n in names if "." not in n} <= METRICS
    assert skill_problems(SHIPPED, "math", MUTABLE) == []
    assert "partial-credit" not in {s.name for s in load_skills(SHIPPED, "coding")}


def test_a_win_is_noted_once_and_the_rest_stays(library: Path) -> None:
    path = library / "shared" / "refill-dead-groups" / "SKILL.md"
    before = path.read_text()
    note = "run r1, v002: +0.080 (0.02 to 0.14)"
    for _ in range(2):
        assert record_outcome(library, "refill-dead-groups", True, note) == path
    after = path.read_text()
    skill = read_skill(path)
    assert (skill.wins, skill.losses, skill.provenance[-1]) == (1, 0, note)
    expected = before.replace("wins: 0", "wins: 1").replace(
        "has live groups.\"\n", "has live groups.\"\n  - 'run r1, v002: +0.080 (0.02 to 0.14)'\n"
    )  # fmt: skip
    assert after.replace('"run r1, v002: +0.080 (0.02 to 0.14)"', f"'{note}'") == expected
    record_outcome(library, "refill-dead-groups", False, "run r2, v003: rejected")
    assert read_skill(path).losses == 1
    assert record_outcome(library, "no-such-skill", True, "x") is None


def test_a_promoted_proposal_becomes_a_skill_of_its_domain(library: Path) -> None:
    path = distil(library, "math", new(), "run r1, v002: +0.1", "v002 is promoted")
    assert path == library / "math" / "two-temperatures" / "SKILL.md"
    skill = read_skill(path)
    assert skill.trigger == "entropy >= 0.25 AND reward_trend <= -0.1"
    assert skill.intervention["sampling.temperature"].apply(1.0) == 1.1
    assert (skill.wins, skill.provenance) == (1, ["run r1, v002: +0.1"])
    text = path.read_text()
    assert distil(library, "math", new(), "run r1, v002: +0.1", "v002 is promoted") == path
    assert path.read_text() == text
    assert "two-temperatures" in {s.name for s in load_skills(library, "math")}
    known = new("refill-dead-groups")
    assert distil(library, "math", known, "n", "w") == find_skill(library, "refill-dead-groups")


@pytest.mark.parametrize(
    ("old", "fresh"),
    [
        ("---\nname", "name"), ("name: refill-dead-groups", "name: other"),
        ("factor: filter", "factor: eval"), ("factor: filter", "factor: data"),
        ("trigger: dead", "trigger: exec(dead"), ("strength: dead_group_share", "strength: a > 1"),
        ("wins: 0", "wins: -1"), ("wins: 0", "wins: 0\nwins: 1"), ("wins: 0", "surprise: 0"),
        ("{add: 2, max: 4}", "{add: 2, set: 4}"), ("{add: 2, max: 4}", "{call: os}"),
        ("direction: down", "direction: left"),
    ],
)  # fmt: skip
def test_damaged_skills_are_refused(library: Path, old: str, fresh: str) -> None:
    path = library / "shared" / "refill-dead-groups" / "SKILL.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, fresh, 1))
    with pytest.raises(InputError, match="refill-dead-groups"):
        load_skills(library, "math")


def test_every_damaged_skill_is_listed(library: Path) -> None:
    for name in ("warmer-sampling", "cooler-sampling"):
        (library / "shared" / name / "SKILL.md").write_text("nothing")
    with pytest.raises(InputError) as caught:
        load_skills(library, "math")
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("name", ["../x", "a/b", "", "A", "-x", "x\n"])
def test_names_stay_inside_the_library(library: Path, name: str) -> None:
    with pytest.raises(InputError):
        load_skills(library, name)
    with pytest.raises(InputError):
        record_outcome(library, name, True, "x")


def test_links_are_refused(library: Path, tmp_path: Path) -> None:
    path = library / "shared" / "warmer-sampling" / "SKILL.md"
    path.rename(tmp_path / "elsewhere.md")
    path.symlink_to(tmp_path / "elsewhere.md")
    with pytest.raises(InputError, match="symbolic link"):
        load_skills(library, "math")


def test_edits_by_hand() -> None:
    assert Edit(multiply=0.5, min=1e-7).apply(1e-5) == 5e-6
    assert Edit(multiply=0.5, min=8e-6).apply(1e-5) == 8e-6
    assert Edit(add=2, max=4).apply(3) == 4 and isinstance(Edit(add=2).apply(3), int)
    assert Edit(set="difficulty").apply("uniform") == "difficulty"
    for now in (None, True, "x"):
        with pytest.raises(ValueError):
            Edit(multiply=2).apply(now)
