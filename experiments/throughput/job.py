"""What both sides are given: one JSON with model, items in order, shape and settings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evojax.bench.shapes import Shape, shape_items
from evojax.config import AlgorithmConf, DataConf
from evojax.policy.tokenizer import Tokenizer
from evojax.training.collect import stop_ids
from evojax.training.selection import SELECTORS, ItemStats


def make_job(
    model: Path,
    tokenizer: Tokenizer,
    shape: Shape,
    *,
    dtype: str,
    reward: str,
    steps: int,
    micro: int,
    seed: int = 0,
) -> dict[str, Any]:
    """The job of one side: ``steps`` steps on the items that evojax itself would select.

    Args:
        model: Hugging Face directory that both sides load. dtype: f32 or bf16 (of the products).
        reward: live (by place in the group, every group is live) or natural (the tasks' own).
        steps: those of the warm-up included.
        micro: sequences of a backward pass on the peer's side, groups of a row on evojax's.
    """
    pool = shape_items(shape, tokenizer)
    select = SELECTORS.get(DataConf().selection, "data.selection")
    items = [
        {"prompt": item.prompt, "answer": item.answer, "task": item.task, "id": item.id}
        for step in range(steps)
        for item in select(pool, step, shape.prompts, seed, ItemStats(), DataConf(), 0)
    ]
    return {
        **asdict(shape),
        "model": str(model),
        "items": items,
        "items_sha256": hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest(),
        "prompt_tokens": [len(tokenizer.encode(item["prompt"])) for item in items],
        "stop_ids": list(stop_ids(tokenizer, pool)),
        "dtype": dtype,
        "reward": reward,
        "steps": steps,
        "micro": micro,
        "seed": seed,
        "lr": AlgorithmConf().lr,
    }
