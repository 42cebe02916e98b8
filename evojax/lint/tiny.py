"""A configuration cut down to seconds: the same recipe on a tiny random model."""

from __future__ import annotations

import copy
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

ARCH = {
    "head_dim": None,
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "max_position": 64,
}
LINEAR = {"interval": 2, "key_heads": 1, "value_heads": 2, "key_dim": 8, "value_dim": 8}
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")  # of such a model
TASKS = ["tiny_copy", "tiny_succ"]


def changed(cfg: DictConfig, values: dict[str, Any]) -> DictConfig:
    """A copy of ``cfg`` with other values under the given keys."""
    new = copy.deepcopy(cfg)
    with open_dict(new):
        for key, value in values.items():
            OmegaConf.update(new, key, value, merge=False)
    return new


def tiny(cfg: DictConfig) -> tuple[DictConfig, list[str]]:
    """``cfg`` on a tiny model and domain with a tiny budget, and what was replaced, in words.

    Which options are chosen, and every number of the recipe, stays; but for sizes, and a learning
    rate that moves such a model.
    """
    prompts = max(6, cfg.algorithm.minibatches + 1)
    values: dict[str, Any] = {f"policy.arch.{key}": value for key, value in ARCH.items()}
    if cfg.policy.arch.family == "qwen3_5":
        values |= {f"policy.arch.linear.{key}": value for key, value in LINEAR.items()}
        values["policy.arch.num_layers"] = LINEAR["interval"]
    values |= {
        "policy.source": "random",
        **{f"policy.{key}": None for key in ("path", "repo", "revision")},
        "domain.tasks": TASKS,
        "domain.path": None,
        "domain.chat": False,
        "domain.train_items": 24,
        "domain.eval_items": 3,
        "domain.audit_items": 2,
        "rollout.max_batch": 64,
        "sampling.group_size": 6,
        "sampling.max_new_tokens": max(3, cfg.reward.overlong_buffer + 1),
        "algorithm.lr": 0.02,
        "train.prompts_per_step": prompts,
        "train.micro_batch_groups": 3,
        "train.checkpoint_every": 3,
        "eval.samples": 6,  # as many prompts and samples as a step has: one compiled program
        "eval.max_new_tokens": 2,
    }
    if cfg.policy.lora.rank:
        here = [name for name in cfg.policy.lora.targets if name in LINEARS]
        values |= {"policy.lora.rank": min(cfg.policy.lora.rank, 2)}
        values |= {"policy.lora.targets": here or ["q"]}
    words = [f"sizes and budgets are cut down, algorithm.lr is {values['algorithm.lr']}"]
    if cfg.policy.source != "random":
        words.insert(0, f"the policy {cfg.policy.source} is replaced by a tiny random model")
    words.insert(
        0, f"the problems are {', '.join(TASKS)}, and answers that begin with 0 or 1 right"
    )
    return changed(cfg, values), words
