"""Checks of ``policy.lora`` that need no model; see ``evojax.policy.lora`` for those that do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from evojax.config import LoraConf
from evojax.errors import Problem

# Matrices that some family has and an adapter can change.
TARGETS = ("q", "k", "v", "o", "attn_gate", "gate", "up", "down", "head")
TARGETS += ("qkv", "z", "a", "b", "out")


def lora_problems(conf: LoraConf) -> Iterator[Problem]:
    """What is wrong with the targets, whatever the model is.

    >>> [p.what for p in lora_problems(LoraConf(rank=4, targets=["q", "q", "embed"]))]
    ['a matrix is named twice', 'no matrix that an adapter can change']
    """
    where = "policy.lora.targets"
    if conf.rank > 0 and not conf.targets:
        yield Problem("adapters without a target change nothing", where, [], "e.g. [q, v]")
    for name, count in Counter(conf.targets).items():
        if name not in TARGETS:
            remedy = f"choose from: {', '.join(TARGETS)}"
            yield Problem("no matrix that an adapter can change", where, name, remedy)
        elif count > 1:
            yield Problem("a matrix is named twice", where, name, "name it once")
