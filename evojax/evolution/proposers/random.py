"""The null proposer: a seeded random edit inside the boundary, blind to the evidence.

What it gets promoted measures how often the gate is fooled.
"""

from __future__ import annotations

import math

import numpy as np

from evojax.evolution.boundary import ALLOWED, Names, Range, factor_of, leaves
from evojax.evolution.config_edit import same_value
from evojax.evolution.intervention import Factor, Intervention, Predicts
from evojax.evolution.proposers.base import (
    PROPOSERS,
    ProposalContext,
    Proposals,
    TraceLine,
    distinct_factors_first,
)
from evojax.guards import hiding
from evojax.training.trajectory_rules import missing_features


@PROPOSERS.register("random")
def random_edits(context: ProposalContext) -> Proposals:
    """One random value for each key that may be set and acts, in random order.

    Distinct factors come first.

    Numbers above 0 are multiplied or divided by up to 4 on a log scale and clamped to their range;
    others are drawn from it. Values that would change nothing are left out, and so are rules that
    the domain records nothing for.
    """
    rng = np.random.default_rng([context.seed, 0x5EED])
    now = leaves(context.cfg)
    keys = [k for k in sorted(ALLOWED) if k.split(".")[0] in context.mutable]
    keys = [k for k in keys if hiding(context.cfg, k) is None]
    found = []
    for key in [keys[i] for i in rng.permutation(len(keys))]:
        value = _draw(key, now.get(key), rng)
        unusable = isinstance(value, list) and missing_features(value, context.cfg.domain.name)
        if not unusable and not (key in now and same_value(now[key], value)):
            found.append(_intervention(key, value))
    count = max(context.count, 1)
    chosen = distinct_factors_first(found)[:count]
    trace = [TraceLine("random", "proposed", f"{i.edits}", 1.0) for i in chosen]
    return Proposals(chosen, trace)


def _draw(key: str, now: object, rng: np.random.Generator) -> bool | int | float | str | list[str]:
    rule = ALLOWED[key]
    if isinstance(rule, Names):
        at = int(rng.integers(len(rule.options) + 1))
        return list(rule.options[at : at + 1])  # none of them, or one
    if not isinstance(rule, Range):
        option = rule.options[int(rng.integers(len(rule.options)))]
        return option if isinstance(option, (bool, int, float)) else str(option)
    if rule.whole:
        top = min(rule.high, 2.0 * (now if isinstance(now, int) else 0) + 3.0)
        return int(rng.integers(int(rule.low), int(top) + 1))
    if isinstance(now, float) and now > 0:
        value = now * math.exp(rng.uniform(-math.log(4.0), math.log(4.0)))
    else:
        value = rng.uniform(rule.low, min(rule.high, rule.low + 1.0))
    return float(f"{min(max(value, rule.low), rule.high):.4g}")


def _intervention(key: str, value: bool | int | float | str | list[str]) -> Intervention:
    factor = factor_of(key)
    assert factor is not None  # every allowed key belongs to a factor
    kind: Factor = factor  # type: ignore[assignment]
    return Intervention(
        rule="random-" + key.split(".")[-1].replace("_", "-"),
        factor=kind,
        hypothesis=f"A random edit, {key} = {value}, does not change the score.",
        edits={key: value},
        predicts=Predicts(metric="accuracy", direction="up", at_least=0.0),
        success_criterion="The gate does not promote it.",
        rollback=f"Put {key} back.",
        evidence={},
        origin="random",
    )
