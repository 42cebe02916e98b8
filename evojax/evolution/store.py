"""Versions of a run on disk: ``versions/<id>/{evidence, policy, health.md, result.json}``.

``result.json`` is written last and atomically: a version that has one is finished, any other is
still to be trained. That is all that resuming a loop needs to know.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evojax.errors import InputError
from evojax.training.version import read_json, write_json


@dataclass(frozen=True)
class EvalProtocol:
    """What makes two scores comparable; arms that differ in it are never compared."""

    split: str
    samples: int
    temperature: float
    max_new_tokens: int
    seed: int
    items_sha256: str


@dataclass
class VersionResult:
    """What is known of a finished (or failed) version.

    Args:
        status: trained, or failed (then ``error`` says why and there is no score).
        start_step: updates behind the starting weights; steps: updates made here.
        scores: eval item -> mean correctness, None when no sample was scorable.
        config_hash: sha256 of the composed configuration that really ran.
    """

    version: str
    parent: str | None
    role: str
    round: int
    branch: str
    commit: str
    status: str
    config_hash: str
    start_step: int
    steps: int
    factor: str = "none"
    hypothesis: str = ""
    scores: dict[str, float | None] = field(default_factory=dict)
    unscorable: float = 0.0
    score: float | None = None
    ci95: tuple[float, float] | None = None
    protocol: EvalProtocol | None = None
    totals: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""

    @property
    def end_step(self) -> int:
        return self.start_step + self.steps

    def finite_scores(self) -> dict[str, float]:
        """Scores with NaN for items without a scorable sample."""
        return {k: float("nan") if v is None else float(v) for k, v in self.scores.items()}


def items_hash(ids: list[str]) -> str:
    """sha256 of an item set, independent of its order."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()


class VersionStore:
    """The ``versions`` directory of one run."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.root = run_dir / "versions"

    def path(self, version: str) -> Path:
        """Directory of ``version`` (which need not exist yet).

        Raises:
            InputError: the name is not a plain identifier.
        """
        if not version or any(c not in _NAME for c in version) or version.startswith("-"):
            raise InputError.one(
                "not a version name", "version", version, "use a name such as v001"
            )
        return self.root / version

    def result(self, version: str) -> VersionResult | None:
        """The finished result, or None while there is none.

        Raises:
            InputError: the file is damaged, or another evojax wrote it.
        """
        path = self.path(version) / "result.json"
        if not path.exists():
            return None
        raw = read_json(path)
        try:
            if raw["protocol"] is not None:
                raw["protocol"] = EvalProtocol(**raw["protocol"])
            if raw["ci95"] is not None:
                raw["ci95"] = (raw["ci95"][0], raw["ci95"][1])
            return VersionResult(**raw)
        except (KeyError, IndexError, TypeError) as error:
            raise InputError.one(
                f"not the result of a version as this evojax writes it ({error})",
                "resume",
                str(path),
                "read the run with the evojax that made it",
            ) from error

    def require(self, version: str) -> VersionResult:
        """The finished result of ``version``.

        Raises:
            InputError: there is none; the message lists those that exist.
        """
        found = self.result(version)
        if found is None:
            raise InputError.one(
                f"no finished version of that name in {self.run_dir}",
                "version",
                version,
                f"choose one of: {', '.join(self.names()) or 'none is finished'}",
            )
        return found

    def names(self) -> list[str]:
        """Finished versions, in order of their names."""
        return sorted(p.parent.name for p in self.root.glob("*/result.json"))

    def save(self, result: VersionResult) -> None:
        """Mark the version as finished."""
        raw: dict[str, Any] = dataclasses.asdict(result)
        raw["scores"] = {
            k: None if v is None or not math.isfinite(v) else v for k, v in result.scores.items()
        }
        write_json(self.path(result.version) / "result.json", raw)


_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
