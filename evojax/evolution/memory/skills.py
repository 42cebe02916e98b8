"""Skills: ``skills_library/<domain|shared>/<slug>/SKILL.md``, read and written by the loop.

Front matter in the manner of Agent Skills (name, description) plus what makes a skill executable:
trigger, strength, factor, intervention, hypothesis, expected, validation, rollback, provenance and
its record. The playbook has no rules but these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from evojax.errors import InputError, Problem
from evojax.evolution.boundary import edit_problems, factor_of
from evojax.evolution.conditions import check
from evojax.evolution.intervention import Factor, Intervention, Predicts, Text
from evojax.evolution.yaml_files import dump_yaml, parse_yaml, plain_yaml, replace_text

SHARED = "shared"
_SLUG = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")
_PARTS = re.compile(r"\A---\n(.*?\n)---\n(.*)\Z", re.DOTALL)


class Edit(BaseModel):
    """How a key's new value follows from the present one; exactly one of the three.

    Args:
        low, high: clamp of the result.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    set: bool | int | float | str | list[str] | None = None
    multiply: float | None = None
    add: float | None = None
    low: float = Field(default=-math.inf, alias="min")
    high: float = Field(default=math.inf, alias="max")

    @model_validator(mode="after")
    def _one(self) -> Edit:
        if sum(x is not None for x in (self.set, self.multiply, self.add)) != 1:
            raise ValueError("give exactly one of set, multiply, add")
        return self

    def apply(self, now: Any) -> Any:
        """The new value, whole if ``now`` is whole; rounded to six significant digits.

        >>> Edit(multiply=2.0, max=3e-5).apply(2e-5), Edit(add=1).apply(1), Edit(set=True).apply(0)
        (3e-05, 2, True)
        """
        if self.set is not None:
            return self.set
        if isinstance(now, bool) or not isinstance(now, (int, float)):
            raise ValueError(f"cannot calculate with {now!r}")
        new = now * self.multiply if self.multiply is not None else now + cast(float, self.add)
        new = min(max(new, self.low), self.high)
        return round(new) if isinstance(now, int) else float(f"{new:.6g}")


class Skill(BaseModel):
    """One SKILL.md.

    Args:
        trigger: condition over metrics and config keys; see evolution/conditions.py.
        strength: number over the same names, clamped to [0, 1]: how urgent it is.
        intervention: config key -> how its value changes.
        expected: what the change should move.
        validation: success criterion in words. provenance: where the skill comes from.
        wins, losses: verdicts so far (promoted; rejected or invalid).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(pattern=_SLUG.pattern, max_length=64)]
    description: Annotated[str, Field(min_length=1, max_length=1024)]
    factor: Factor
    trigger: Text
    strength: Text
    intervention: dict[str, Edit] = Field(min_length=1, max_length=8)
    hypothesis: Text
    expected: Predicts
    validation: Text
    rollback: Text
    provenance: list[str] = Field(min_length=1)
    wins: int = Field(ge=0)
    losses: int = Field(ge=0)

    @model_validator(mode="after")
    def _sound(self) -> Skill:
        try:
            check(self.trigger, bool)
            check(self.strength, float)
        except InputError as error:
            raise ValueError(str(error)) from error
        wrong = [k for k in self.intervention if factor_of(k) != self.factor]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: not of the factor {self.factor}")
        return self


def load_skills(library: Path, domain: str) -> list[Skill]:
    """Skills of ``domain`` and the shared ones, by name.

    Raises:
        InputError: lists every file that is wrong.
    """
    problems: list[Problem] = []
    skills: dict[str, Skill] = {}
    for folder in (library / SHARED, library / _name(domain, "domain.name")):
        for path in sorted(folder.glob("*/SKILL.md")):
            try:
                skill = read_skill(path)
            except InputError as error:
                problems += error.problems
                continue
            if skill.name in skills:
                problems.append(
                    Problem("two skills have this name", str(path), skill.name, "rename one")
                )
            skills[skill.name] = skill
    if problems:
        raise InputError(problems)
    return [skills[name] for name in sorted(skills)]


def read_skill(path: Path) -> Skill:
    """Read and validate one SKILL.md; its name is that of its directory."""
    front, _ = _split(path)
    try:
        skill = Skill.model_validate(_plain(front))
    except ValidationError as error:
        raise InputError(
            [
                Problem(e["msg"], f"{path}: {'.'.join(map(str, e['loc']))}", repr(e["input"])[:120],
                        "correct the front matter")
                for e in error.errors()
            ]
        ) from error  # fmt: skip
    if skill.name != path.parent.name:
        raise InputError.one("name differs from its directory", str(path), skill.name, "rename it")
    return skill


def find_skill(library: Path, name: str) -> Path | None:
    """File of the skill called ``name`` in any domain, or None."""
    _name(name, "skill")
    found = sorted(p for p in library.glob(f"*/{name}/SKILL.md") if not p.is_symlink())
    return found[0] if found else None


def record_outcome(library: Path, name: str, won: bool, note: str) -> Path | None:
    """Count a verdict in the skill's own record and add ``note`` to its provenance.

    Noting the same thing twice changes nothing. Returns the file, None if there is no such skill.
    """
    path = find_skill(library, name)
    if path is None:
        return None
    front, body = _split(path)
    if note not in front["provenance"]:
        key = "wins" if won else "losses"
        front[key] = int(front[key]) + 1
        front["provenance"].append(plain_yaml(note))
        _write(path, front, body)
    return path


def distil(library: Path, domain: str, intervention: Intervention, note: str, words: str) -> Path:
    """Keep what a promoted intervention taught: a win of its skill, or a new skill.

    A new skill starts in ``domain``; its trigger is that the metrics cited as evidence are at
    least as far from zero as they were.

    Args:
        note: one line of provenance, e.g. run, version and interval.
        words: the verdict, for the skill's text.
    """
    path = record_outcome(library, intervention.slug, True, note)
    if path is not None:
        return path
    path = library / _name(domain, "domain.name") / intervention.slug / "SKILL.md"
    conditions = [
        f"{name} {'>=' if value >= 0 else '<='} {value:.4g}"
        for name, value in sorted(intervention.evidence.items())
        if re.fullmatch(r"[a-z_][a-z0-9_]*", name) and math.isfinite(value)
    ]
    front = CommentedMap(
        name=intervention.slug,
        description=_line(f"Use when {' and '.join(conditions) or 'nothing else helps'}: "
                          f"{intervention.hypothesis}")[:1000],
        factor=intervention.factor,
        trigger=" AND ".join(conditions) or "1 = 1",
        strength="0.5",
        intervention=CommentedMap({k: {"set": v} for k, v in intervention.edits.items()}),
        hypothesis=_line(intervention.hypothesis),
        expected=intervention.predicts.model_dump(),
        validation=_line(intervention.success_criterion),
        rollback=_line(intervention.rollback),
        provenance=CommentedSeq([note]),
        wins=1,
        losses=0,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, front, f"\n# {intervention.slug}\n\n{_line(words)}\n")
    read_skill(path)
    return path


def skill_problems(library: Path, domain: str, mutable: list[str]) -> list[Problem]:
    """Skills whose fixed values lie outside what the loop may set."""
    return [
        problem
        for skill in load_skills(library, domain)
        for problem in edit_problems(
            {k: e.set for k, e in skill.intervention.items() if e.set is not None}, mutable
        )
    ]


def _split(path: Path) -> tuple[CommentedMap, str]:
    if path.is_symlink() or path.parent.is_symlink():
        raise InputError.one("a symbolic link", "skills_library", str(path), "use a real file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError.one(f"cannot be read: {error}", str(path), None, "save it as UTF-8") from (
            error
        )
    parts = _PARTS.match(text)
    if parts is None:
        raise InputError.one(
            "no front matter", str(path), text[:40], "begin with --- lines of YAML, then ---"
        )
    return parse_yaml(parts.group(1), str(path)), parts.group(2)


def _write(path: Path, front: CommentedMap, body: str) -> None:
    before = _PARTS.match(path.read_text(encoding="utf-8")) if path.exists() else None
    plain = front if before else CommentedMap({k: plain_yaml(v) for k, v in front.items()})
    head = dump_yaml(plain, before.group(1) if before else "")
    replace_text(path, f"---\n{head}---\n{body}")


def _plain(front: Mapping[str, Any]) -> Any:
    if isinstance(front, Mapping):
        return {str(k): _plain(v) for k, v in front.items()}
    if isinstance(front, (list, tuple)):
        return [_plain(v) for v in front]
    if isinstance(front, bool) or front is None:
        return front
    kind: type[Any] = next((t for t in (int, float, str) if isinstance(front, t)), str)
    return kind(front)


def _name(text: str, where: str) -> str:
    if not _SLUG.fullmatch(text):
        raise InputError.one("not a plain lower-case name", where, text, "use letters, digits, -")
    return text


def _line(text: str) -> str:
    return " ".join(text.split())
