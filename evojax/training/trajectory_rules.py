"""Rules that leave single rollouts out of the update, by name (``filter.trajectory``).

A rollout that a rule applies to is masked out of the loss *and* of its group's statistics, and its
tokens leave the loss's divisor: as if it had not been sampled. It is never scored 0, for that
would teach the policy to avoid something that says nothing about the answer; and were it left in
the mean, its siblings' advantages would be measured against a reward that nobody is taught.
The reward stays in the evidence, where another rule can be tried on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from evojax.domains.base import recorded_features
from evojax.errors import Problem
from evojax.evidence.types import Trajectory
from evojax.registry import Registry

WHERE = "filter.trajectory"
FEW_TURNS = 3
MANY_TURNS = 60


@dataclass(frozen=True)
class Facts:
    """What a rule may look at; stored rollouts have all of it too.

    Args:
        truncated: the token budget cut the rollout off. wrong: graded, and found wrong.
        features: behaviour of the rollout as the domain recorded it, by name.
    """

    truncated: bool
    wrong: bool
    features: Mapping[str, float]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Facts:
        """The facts of a fresh rollout; an unscorable one is not wrong."""
        wrong = trajectory.grade.status == "wrong"
        return cls(trajectory.truncated, wrong, trajectory.features)


@dataclass(frozen=True)
class TrajectoryRule:
    """One rule.

    Args:
        applies: True for a rollout that is left out.
        needs: features of the domain that it reads.
    """

    applies: Callable[[Facts], bool]
    needs: tuple[str, ...] = ()


TRAJECTORY_RULES: Registry[TrajectoryRule] = Registry("trajectory rule")


def rule(name: str, *needs: str) -> Callable[[Callable[[Facts], bool]], Callable[[Facts], bool]]:
    """Decorator that files a predicate as a rule, with the features that it reads."""

    def add(applies: Callable[[Facts], bool]) -> Callable[[Facts], bool]:
        TRAJECTORY_RULES.register(name)(TrajectoryRule(applies, needs))
        return applies

    return add


@rule("truncated")
def truncated(facts: Facts) -> bool:
    """The token budget cut it off before it was done (DAPO's overlong filtering, 2503.14476)."""
    return facts.truncated


@rule("abandonment", "turns", "edits")
def abandonment(facts: Facts) -> bool:
    """Given up: at most 3 turns and no edit (EvoTrainer, 2606.03108)."""
    return facts.features["turns"] <= FEW_TURNS and facts.features["edits"] == 0


@rule("idle", "edits")
def idle(facts: Facts) -> bool:
    """Wrong without a single edit (EvoTrainer, 2606.03108)."""
    return facts.wrong and facts.features["edits"] == 0


@rule("echo_trap", "turns")
def echo_trap(facts: Facts) -> bool:
    """Wrong after more than 60 turns (EvoTrainer, 2606.03108)."""
    return facts.wrong and facts.features["turns"] > MANY_TURNS


def first_match(names: Sequence[str], facts: Facts) -> str | None:
    """Name of the first rule in ``names`` that applies, or None: each rollout counts once.

    >>> first_match(["truncated"], Facts(True, False, {}))
    'truncated'
    """
    return next((n for n in names if TRAJECTORY_RULES.get(n, WHERE).applies(facts)), None)


def missing_features(rules: Iterable[str], domain: str) -> list[Problem]:
    """Registered rules that ``domain`` (a registered name) gives no features for.

    Names that are no rules, and a name that is no domain, are left to the check of names.

    >>> [p.value for p in missing_features(["truncated", "idle"], "math")]
    ['idle']
    """
    have = recorded_features(domain)
    if have is None:
        return []
    found = []
    for name in rules:
        needs = TRAJECTORY_RULES.get(name, WHERE).needs if name in TRAJECTORY_RULES else ()
        if absent := [f for f in needs if f not in have]:
            what = f"the rule needs {' and '.join(absent)}, which domain.name={domain} has not"
            found.append(Problem(what, WHERE, name, "leave this rule out"))
    return found
