"""Deals problems into train, eval and audit, disjoint by canonical key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TypeVar

from evojax.config import DomainConf
from evojax.domains.math.tasks import TASKS, Task
from evojax.errors import InputError, Problem
from evojax.evidence.types import Item, Split

T = TypeVar("T")


def digest(*parts: object) -> str:
    """sha256 of the parts, each set off from the next, as 64 hex digits."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()


def deal(pool: Mapping[str, T], name: str, conf: DomainConf) -> dict[Split, list[T]]:
    """Audit, eval and train parts of a pool, from the head of its seeded order.

    The order is that of sha256(seed, name, key): it depends on no other pool, and a larger
    ``train_items`` only adds to the training part.

    Args:
        pool: payload by canonical key.
        name: task or file, part of the hash.
        conf: sizes and ``split_seed``; ``train_items`` is an upper limit.

    Raises:
        InputError: eval, audit and one training item do not fit.
    """
    held_out = conf.eval_items + conf.audit_items
    if len(pool) <= held_out:
        raise InputError.one(
            f"{name} has {len(pool)} distinct items, but eval_items {conf.eval_items} + "
            f"audit_items {conf.audit_items} + at least 1 for training are asked for",
            "domain.eval_items",
            conf.eval_items,
            f"lower eval_items and audit_items to {max(len(pool) - 1, 0)} in sum, or add items",
        )
    order = sorted(pool, key=lambda key: digest(conf.split_seed, name, key))
    values = [pool[key] for key in order]
    return {
        "train": values[held_out : held_out + conf.train_items],
        "eval": values[conf.audit_items : held_out],
        "audit": values[: conf.audit_items],
    }


def task_items(name: str, task: Task, conf: DomainConf) -> list[Item]:
    """All items of one generated task, split by split."""
    return [
        Item(
            id=f"{name}/{problem.key}",
            task=name,
            prompt=task.prompt(problem),
            answer=problem.answer,
            split=split,
            grader="line",
            stop=task.stop,
        )
        for split, problems in deal(task.distinct(), name, conf).items()
        for problem in problems
    ]


def generated_items(conf: DomainConf) -> list[Item]:
    """Items of every configured task.

    Raises:
        InputError: no task, an unknown or repeated one, or one with too few items; all listed.
    """
    if not conf.tasks:
        raise InputError.one(
            "no task is chosen", "domain.tasks", list(conf.tasks), f"pick from {', '.join(TASKS)}"
        )
    items: list[Item] = []
    problems: list[Problem] = []
    for place, name in enumerate(conf.tasks):
        try:
            if name in conf.tasks[:place]:
                raise InputError.one("task named twice", "domain.tasks", name, "name it once")
            items += task_items(name, TASKS.get(name, where="domain.tasks"), conf)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return items


def size_problems(conf: DomainConf) -> list[Problem]:
    """Sizes and limits of the domain that make no sense."""
    sizes = {
        "train_items": conf.train_items,
        "eval_items": conf.eval_items,
        "audit_items": conf.audit_items,
    }
    found = [
        Problem("must be at least 1", f"domain.{key}", value, "set a positive whole number")
        for key, value in sizes.items()
        if value < 1
    ]
    if not 0 < conf.grader_timeout_s < float("inf"):
        found.append(
            Problem(
                "must be above 0 seconds",
                "domain.grader_timeout_s",
                conf.grader_timeout_s,
                "set e.g. 5.0",
            )
        )
    return found


def fingerprint(items: Iterable[Item]) -> str:
    """sha256 over everything that defines the items, whatever their order."""
    rows = sorted(
        digest(i.id, i.task, i.prompt, i.answer, i.split, i.grader, i.stop, i.chat) for i in items
    )
    return digest(*rows)
