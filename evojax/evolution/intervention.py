"""The one thing that a proposer returns: a falsifiable change of one factor."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from evojax.errors import InputError, Problem
from evojax.evolution.boundary import leaves
from evojax.evolution.config_edit import refuse_tricks, same_value
from evojax.evolution.harness import slug

MAX_REPLY = 64_000
Factor = Literal["reward", "filter", "sampling", "data", "environment", "algorithm", "diagnostics"]
Origin = Literal["rule", "skill", "case", "llm", "random"]
Text = Annotated[str, Field(min_length=1, max_length=2000)]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
_FENCE = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n```\Z", re.DOTALL)


class Predicts(BaseModel):
    """The metric that should move, which way, and by how much at least (absolute)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    metric: Name
    direction: Literal["up", "down"]
    at_least: float = Field(ge=0.0, allow_inf_nan=False)

    def __str__(self) -> str:
        return f"{self.metric} {self.direction} by at least {self.at_least:g}"


class Intervention(BaseModel):
    """A hypothesis and the edits that test it.

    Args:
        rule: name of the rule, skill or proposer that gave it.
        edits: config key -> new value.
        evidence: metric values that the hypothesis rests on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    rule: Name
    factor: Factor
    hypothesis: Text
    edits: dict[str, Any] = Field(min_length=1, max_length=8)
    predicts: Predicts
    success_criterion: Text
    rollback: Text
    evidence: dict[str, float] = Field(default_factory=dict, max_length=64)
    origin: Origin

    @field_validator("edits")
    @classmethod
    def _plain(cls, edits: dict[str, Any]) -> dict[str, Any]:
        for key, value in edits.items():
            try:
                refuse_tricks(key, value)
            except InputError as error:
                raise ValueError(str(error)) from error
            parts = value if isinstance(value, list) else [value]
            if not all(isinstance(v, (bool, int, float, str)) for v in parts):
                raise ValueError(f"{key}: a value is a number, a text, a flag or a list of them")
        return edits

    @property
    def slug(self) -> str:
        """Name for branches and directories."""
        return slug(self.rule)

    @property
    def edit_hash(self) -> str:
        """Identity of the edits, whoever proposed them: 16 hex digits."""
        text = json.dumps(self.edits, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def unchanged(self, cfg: DictConfig) -> bool:
        """Whether ``cfg`` already has every value, so that nothing would be tested."""
        now = leaves(cfg)
        return all(key in now and same_value(now[key], v) for key, v in self.edits.items())


def parse_intervention(text: str) -> Intervention:
    """Read one intervention from a proposer's reply, strictly.

    The reply is exactly one JSON object, alone or inside one fence; nothing is guessed, repaired
    or taken from prose around it. The error's text can be sent back to the proposer.

    Raises:
        InputError: with every problem found.
    """
    body = text.strip()
    if not body:
        raise _bad("the reply is empty", text)
    if len(body) > MAX_REPLY:
        raise _bad(f"the reply has more than {MAX_REPLY} characters", text)
    fenced = _FENCE.match(body)
    body = fenced.group(1) if fenced else body
    if "```" in body:
        raise _bad("text around the fence, or a fence that is not closed or not opened", text)
    try:
        raw = json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _bad(f"not one complete JSON object: {error}", text) from error
    if not isinstance(raw, dict):
        raise _bad("not a JSON object", text)
    try:
        return Intervention.model_validate(raw)
    except ValidationError as error:
        raise InputError(_problems(error)) from error


def _problems(error: ValidationError) -> list[Problem]:
    return [
        Problem(
            e["msg"], ".".join(map(str, e["loc"])) or "proposal", _short(e["input"]), "correct it"
        )
        for e in error.errors()
    ]


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [key for key, _ in pairs]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"keys given twice: {', '.join(twice)}")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _bad(what: str, text: str) -> InputError:
    return InputError.one(what, "proposal", text[:120], "reply with one JSON object and no prose")


def _short(value: object) -> object:
    return value if len(repr(value)) < 200 else repr(value)[:200]
