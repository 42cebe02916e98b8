"""The shapes that are timed, and prompts of the main job's tasks that fill them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from evojax.config import DomainConf
from evojax.domains.math.splits import task_items
from evojax.domains.math.tasks import TASKS
from evojax.errors import InputError
from evojax.evidence.types import Item
from evojax.policy.tokenizer import Tokenizer


@dataclass(frozen=True)
class Shape:
    """One training step as it is timed.

    Args:
        prompts: groups of a step. samples: completions of each prompt.
        prompt: tokens of a prompt, at most. new: tokens of a completion, at most.
        forced: every completion has exactly ``new`` tokens, whatever is sampled.
        warmup: first steps that are not counted. Completions of any length fall into several
            buckets of padded sizes, each compiled when it first comes up.
        micro_batch_groups: groups of a micro-batch.
        tasks: where the prompts come from.
    """

    name: str
    prompts: int
    samples: int
    prompt: int
    new: int
    forced: bool
    warmup: int
    micro_batch_groups: int
    tasks: tuple[str, ...] = ("add_sub", "gcd", "times")


_ALL = (
    Shape("main_job", 8, 8, 60, 6, forced=False, warmup=3, micro_batch_groups=8),
    Shape("medium", 8, 8, 72, 64, forced=True, warmup=1, micro_batch_groups=2),
    Shape("long", 4, 8, 128, 256, forced=True, warmup=1, micro_batch_groups=1),
)
SHAPES = {shape.name: shape for shape in _ALL}


def tiny(shape: Shape) -> Shape:
    """The shape for the random policy: a fraction of the tokens, one-token tasks.

    >>> tiny(SHAPES["long"]).new
    16
    """
    return dataclasses.replace(
        shape,
        prompts=min(shape.prompts, 4),
        samples=4,
        prompt=shape.prompt // 4,
        new=max(1, shape.new // 16),
        warmup=1,
        tasks=("tiny_copy", "tiny_succ"),
    )


def shape_items(shape: Shape, tokenizer: Tokenizer) -> list[Item]:
    """Training items whose prompts hold as many worked examples as fit ``shape.prompt`` tokens.

    The examples come from the audit split, so no prompt shows its own question; they are the same
    for all items of a task, as the main job's own are.

    Raises:
        InputError: a prompt is longer than ``shape.prompt`` without any further example.
    """
    conf = DomainConf(tasks=list(shape.tasks))
    found: list[Item] = []
    for name in shape.tasks:
        items = task_items(name, TASKS.get(name, "bench"), conf)
        train = [item for item in items if item.split == "train"]
        lines = [_solved(item) for item in items if item.split == "audit"]
        head = _longest_head(lines, train, shape, tokenizer)
        found += [dataclasses.replace(item, prompt=head + item.prompt) for item in train]
    return found


def _solved(item: Item) -> str:
    """The item's own question with its answer, as one line."""
    return f"{item.prompt.splitlines()[-1]} {item.answer}\n"


def _longest_head(
    lines: Sequence[str], items: Sequence[Item], shape: Shape, tokenizer: Tokenizer
) -> str:
    def longest(head: str) -> int:
        return max(len(tokenizer.encode(head + item.prompt)) for item in items)

    if longest("") > shape.prompt:
        raise InputError.one(
            f"a prompt of {items[0].task} has {longest('')} tokens",
            f"bench shape {shape.name}",
            shape.prompt,
            "choose tasks with shorter prompts",
        )
    head = ""
    for line in lines:
        if longest(line + head) > shape.prompt:
            break
        head = line + head
    return head
