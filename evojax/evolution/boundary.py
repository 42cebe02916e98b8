"""What the loop may change: one factor, inside the boundary, within range.

Decided on the *composed* configurations, so that no detour through a YAML file escapes it, and on
the paths of the diff.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from evojax.errors import Problem
from evojax.grpo.filters import GROUP_FILTERS
from evojax.training.trajectory_rules import TRAJECTORY_RULES

FACTORS = {
    "reward": "reward",
    "filter": "filter",
    "sampling": "sampling",
    "data": "data",
    "domain": "environment",
    "algorithm": "algorithm",
    "diagnostics": "diagnostics",
}
_NAME = re.compile(r"^[a-z][a-z0-9_]*$")
_RECIPE_PATH = re.compile(r"^conf/(?P<group>[a-z_]+)/[A-Za-z0-9_-]+\.yaml$")
_SKILL_PATH = re.compile(r"^skills_library/[a-z0-9-]+/[a-z0-9-]+/SKILL\.md$")


@dataclass(frozen=True)
class Range:
    """Closed interval of a number; ``whole`` for integers."""

    low: float
    high: float
    whole: bool = False

    def fits(self, value: Any) -> bool:
        kind = int if self.whole else (int, float)
        return (
            isinstance(value, kind)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and self.low <= value <= self.high
        )

    def __str__(self) -> str:
        return f"{'a whole' if self.whole else 'a'} number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    options: tuple[object, ...]

    def fits(self, value: Any) -> bool:
        return any(type(value) is type(o) and value == o for o in self.options)

    def __str__(self) -> str:
        return "one of " + ", ".join(str(o) for o in self.options)


@dataclass(frozen=True)
class Names:
    """A list of registered names, each at most once; it may be empty."""

    options: tuple[str, ...]

    def fits(self, value: Any) -> bool:
        named = isinstance(value, list) and all(type(v) is str for v in value)
        return named and len(set(value)) == len(value) and set(value) <= set(self.options)

    def __str__(self) -> str:
        return "a list of " + ", ".join(self.options)


# Group size is not here: arms of a round spend the same number of rollouts per prompt.
ALLOWED: dict[str, Range | Choice | Names] = {
    "reward.components.correct": Range(0.1, 10.0),
    "reward.components.partial": Range(0.0, 10.0),
    "reward.components.format": Range(0.0, 10.0),
    "reward.components.overlong": Range(0.0, 10.0),
    "reward.clip": Range(0.5, 100.0),
    "reward.overlong_buffer": Range(0, 4096, whole=True),
    "filter.refill_rounds": Range(0, 8, whole=True),
    "filter.trajectory": Names(tuple(TRAJECTORY_RULES)),
    "filter.group": Choice(tuple(GROUP_FILTERS)),
    "filter.keep": Range(0.05, 0.99),
    "filter.min_std": Range(1e-4, 1.0),
    "filter.ema_decay": Range(0.01, 1.0),
    "filter.ema_warmup": Range(0, 1000, whole=True),
    "filter.min_keep": Range(0.0, 0.95),
    "sampling.temperature": Range(0.2, 2.0),
    "sampling.max_new_tokens": Range(1, 4096, whole=True),
    "data.selection": Choice(("uniform", "difficulty")),
    "data.target_rate": Range(0.05, 0.95),
    "data.sharpness": Range(0.0, 10.0),
    "algorithm.advantage": Choice(("grpo", "dr_grpo", "rloo", "batch_std", "maxrl", "gdpo")),
    "algorithm.advantage_clip": Range(0.5, 10.0),
    "algorithm.objective": Choice(("clip", "gspo", "cispo")),
    "algorithm.eps_low": Range(1e-4, 0.5),
    "algorithm.eps_high": Range(1e-4, 0.6),
    "algorithm.dual_clip": Range(1.1, 20.0),
    "algorithm.aggregation": Choice(
        ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
    ),
    "algorithm.old_logprobs": Choice(("rollout", "trainer")),
    "algorithm.correction": Choice(
        ("none", "token_tis", "sequence_tis", "token_mask", "geometric_mask")
    ),
    "algorithm.correction_low": Range(0.0, 0.999),
    "algorithm.correction_high": Range(1.001, 20.0),
    "algorithm.kl_coef": Range(0.0, 1.0),
    "algorithm.kl_loss": Choice(("k2", "k3_is")),
    "algorithm.entropy_coef": Range(0.0, 0.1),
    "algorithm.epochs": Range(1, 4, whole=True),
    "algorithm.minibatches": Range(1, 64, whole=True),
    "algorithm.optimizer": Choice(("adamw", "adafactor", "lion")),
    "algorithm.lr": Range(1e-8, 5e-2),
    "algorithm.schedule": Choice(("constant", "linear", "cosine")),
    "algorithm.warmup_steps": Range(0, 1000, whole=True),
    "algorithm.decay_steps": Range(1, 100_000, whole=True),
    "algorithm.lr_floor": Range(0.0, 1.0),
    "algorithm.beta1": Range(0.0, 0.99),
    "algorithm.beta2": Range(0.5, 0.9999),
    "algorithm.weight_decay": Range(0.0, 0.5),
    "algorithm.grad_clip": Range(0.01, 100.0),
}


def leaves(cfg: DictConfig | Mapping[str, Any], resolve: bool = True) -> dict[str, Any]:
    """Dotted key -> plain value; a list is one leaf."""
    plain = OmegaConf.to_container(cfg, resolve=resolve) if OmegaConf.is_config(cfg) else cfg
    flat: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for key, value in node.items():
            if isinstance(value, Mapping) and value:
                walk(value, f"{prefix}{key}.")
            else:
                flat[f"{prefix}{key}"] = value

    walk(plain, "")
    return flat


def changed_keys(
    before: DictConfig, after: DictConfig, resolve: bool = True
) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, each with (old, new); None stands for absent."""
    old, new = leaves(before, resolve), leaves(after, resolve)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if (key in old) != (key in new) or old[key] != new[key] or type(old[key]) != type(new[key])  # noqa: E721
    }


def factor_of(key: str) -> str | None:
    """Factor that a dotted key belongs to; None for what is frozen for ever.

    >>> factor_of("algorithm.lr"), factor_of("eval.samples")
    ('algorithm', None)
    """
    return FACTORS.get(key.split(".")[0])


def edit_problems(edits: Mapping[str, Any], mutable: Iterable[str]) -> list[Problem]:
    """What is wrong with setting each key to its value."""
    groups = set(mutable)
    found = (_value_problem(key, value, groups) for key, value in edits.items())
    return [problem for problem in found if problem is not None]


def _value_problem(key: str, value: Any, groups: set[str]) -> Problem | None:
    if key.split(".")[0] not in groups or factor_of(key) is None:
        remedy = f"change only: {', '.join(sorted(groups))}"
        return Problem("the key is frozen for the loop", key, value, remedy)
    if key == "diagnostics.metrics":
        good = isinstance(value, list) and all(
            isinstance(v, str) and _NAME.fullmatch(v) for v in value
        )
        return None if good else Problem("not a list of metric names", key, value, "give names")
    rule = ALLOWED.get(key)
    if rule is None:
        return Problem("not a key that the loop may set", key, value, "see the list of edits")
    if not rule.fits(value):
        return Problem("outside what is allowed", key, value, f"give {rule}")
    return None


def path_problems(paths: Iterable[str], mutable: Iterable[str]) -> list[Problem]:
    """Paths of a candidate's diff that it may not touch."""
    allowed = set(mutable) | {"experiment"}
    problems = []
    for path in paths:
        conf = _RECIPE_PATH.fullmatch(path)
        if not ((conf and conf.group("group") in allowed) or _SKILL_PATH.fullmatch(path)):
            problems.append(
                Problem("a candidate may not change this file", "diff", path,
                        "change conf/<group>/*.yaml of a mutable group, or a SKILL.md")
            )  # fmt: skip
    return problems


def single_factor_check(
    parent: DictConfig,
    candidate: DictConfig,
    mutable: Iterable[str],
    diff_paths: Sequence[str],
    factor: str | None = None,
) -> list[Problem]:
    """Everything that makes a candidate inadmissible; empty when it may be trained.

    Args:
        parent, candidate: composed configurations, best with their ``hydra`` node, which may not
            differ either.
        mutable: groups of ``evolution.boundary.mutable``, of the *parent*.
        diff_paths: files that differ, relative to the repository.
        factor: factor that the intervention declares, if any.
    """
    groups = list(mutable)
    problems = path_problems(diff_paths, groups)
    changes = _of_interest(changed_keys(parent, candidate, resolve=False))
    if not changes:
        problems.append(
            Problem("nothing differs from the parent", "edits", None, "propose a change")
        )
    for key, (_, new) in changes.items():
        if isinstance(new, str) and ("${" in new or new == "???"):
            problems.append(Problem("interpolations are refused", key, new, "give the value"))
        elif (found := _value_problem(key, new, set(groups))) is not None:
            problems.append(found)
    seen = sorted({factor_of(key) or "frozen" for key in changes})
    if len(seen) > 1:
        problems.append(
            Problem("more than one factor changes", "edits", seen, "change one factor at a time")
        )
    elif factor is not None and seen and seen != [factor]:
        problems.append(
            Problem("another factor changes than declared", "factor", factor, f"declare {seen[0]}")
        )
    return problems


def _of_interest(changes: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Without what Hydra notes about where it found the files."""
    noted = ("hydra.runtime.", "hydra.overrides.", "hydra.job.override_dirname")
    return {key: value for key, value in changes.items() if not key.startswith(noted)}
