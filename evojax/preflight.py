"""Checks of a composed configuration before anything is written: every problem, in one list."""

from __future__ import annotations

import difflib
import functools
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from evojax import guards
from evojax.config import MODES
from evojax.errors import InputError, Problem
from evojax.hardware import hardware_notes
from evojax.overrides import nested_options
from evojax.paths import nearest_existing
from evojax.policy.conf import SOURCES, policy_problems
from evojax.policy.files import file_problems, training_bytes, weight_bytes
from evojax.policy.shape import DTYPES, REMAT
from evojax.ranges import RANGES

MUTABLE = ("reward", "filter", "sampling", "data", "algorithm", "diagnostics")
_READING_MODES = ("evaluate", "diagnose", "backtest", "report")
_FREE_DISK = 64 * 1024 * 1024  # bytes for evidence, report and logs


def _get(cfg: DictConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), cfg)


def _ranges(cfg: DictConfig) -> Iterable[Problem]:
    for key, limit in RANGES.items():
        value = _get(cfg, key)
        if value is not None and value not in limit:
            yield Problem("out of range", key, value, f"give a number that is {limit}")


def _policy(cfg: DictConfig) -> Iterable[Problem]:
    yield from policy_problems(cfg.policy)


def _name(key: str, value: str, valid: Iterable[str]) -> Iterable[Problem]:
    names = sorted(valid)
    if value not in names:
        near = difflib.get_close_matches(value, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        yield Problem("unknown name", key, value, f"{hint}valid: {', '.join(names)}")


def _names(cfg: DictConfig) -> Iterable[Problem]:
    from evojax.evolution.proposers import PROPOSERS
    from evojax.training.selection import SELECTORS

    yield from _name("mode", cfg.mode, MODES)
    yield from _name("policy.source", cfg.policy.source, SOURCES)
    yield from _name("policy.compute_dtype", cfg.policy.compute_dtype, DTYPES)
    yield from _name("policy.remat", cfg.policy.remat, REMAT)
    yield from _name("rollout.engine", cfg.rollout.engine, ("embedded",))
    yield from _task_names(cfg)
    yield from _name("data.selection", cfg.data.selection, SELECTORS)
    yield from _name("evolution.proposer", cfg.evolution.proposer, PROPOSERS)
    for group in cfg.evolution.boundary.mutable:
        if group not in MUTABLE:
            remedy = f"only these may change: {', '.join(MUTABLE)}"
            what = "a group that must stay frozen for the loop, or no group"
            yield Problem(what, "evolution.boundary.mutable", group, remedy)


def _task_names(cfg: DictConfig) -> Iterable[Problem]:
    """What is trained on. mode=plan never loads it, and so plans what is not there yet."""
    from evojax import absent
    from evojax.domains.base import DOMAINS
    from evojax.domains.math.tasks import TASKS
    from evojax.rewards.base import REWARDS

    if cfg.mode == "plan":
        yield from _name("hardware.platform", cfg.hardware.platform, ("cpu", "tpu", "cuda"))
        for program in cfg.plan.programs:
            yield from _name("plan.programs", program, ("update", "rollout"))
        return
    yield from _present("domain.name", cfg.domain.name, DOMAINS, absent.DOMAINS)
    for component in cfg.reward.components:
        yield from _present("reward.components", str(component), REWARDS, absent.REWARDS)
    if cfg.domain.path is None:
        for task in cfg.domain.tasks:
            yield from _name("domain.tasks", task, TASKS)


def _present(key: str, value: str, valid: Iterable[str], lacks: dict[str, str]):
    if value not in valid and value in lacks:
        what = f"is not in this version: it needs {lacks[value]}"
        yield Problem(what, key, value, "choose another one; mode=plan works without it")
    else:
        yield from _name(key, value, valid)


def _planned_mesh(cfg: DictConfig) -> Iterable[Problem]:
    if cfg.mode == "plan":
        mesh, chips = cfg.hardware.mesh, cfg.hardware.chips
        if (wanted := mesh.data * mesh.fsdp * mesh.tp) != chips:
            what = f"data x fsdp x tp is {wanted}, and hardware.chips is {chips}"
            remedy = f"choose sizes whose product is {chips}"
            yield Problem(what, "hardware.mesh", dict(mesh), remedy)


def _registered(cfg: DictConfig) -> Iterable[Problem]:
    """Names of the training core's parts."""
    from evojax.grpo.advantages import ADVANTAGES
    from evojax.grpo.aggregation import AGGREGATIONS
    from evojax.grpo.correction import CORRECTIONS
    from evojax.grpo.filters import GROUP_FILTERS
    from evojax.grpo.kl import KL_LOSSES
    from evojax.grpo.objectives import OBJECTIVES
    from evojax.grpo.optimizer import OPTIMIZERS, SCHEDULES
    from evojax.training.trajectory_rules import TRAJECTORY_RULES

    parts: dict[str, Iterable[str]] = {
        "advantage": ADVANTAGES,
        "objective": OBJECTIVES,
        "aggregation": AGGREGATIONS,
        "old_logprobs": ("rollout", "trainer"),
        "correction": CORRECTIONS,
        "kl_loss": KL_LOSSES,
        "optimizer": OPTIMIZERS,
        "schedule": SCHEDULES,
    }
    for key, valid in parts.items():
        yield from _name(f"algorithm.{key}", cfg.algorithm[key], valid)
    yield from _name("filter.group", cfg.filter.group, GROUP_FILTERS)
    for rule in cfg.filter.trajectory:
        yield from _name("filter.trajectory", rule, TRAJECTORY_RULES)


def _combinations(cfg: DictConfig) -> Iterable[Problem]:
    weights = dict(cfg.reward.components)
    if not any(weights.values()) or not all(math.isfinite(w) for w in weights.values()):
        what = "every weight must be finite and one of them not 0"
        yield Problem(what, "reward.components", weights, "e.g. reward.components.correct=1.0")
    if cfg.domain.path is None and not cfg.domain.tasks:
        remedy = "name generators, e.g. domain.tasks=[add_sub], or a file by domain.path="
        yield Problem("there is nothing to train on", "domain.tasks", [], remedy)
    if cfg.mode in _READING_MODES and cfg.resume is None:
        remedy = "name the run to read: resume=outputs/<experiment>/<run>"
        yield Problem(f"mode={cfg.mode} works on an existing run", "resume", None, remedy)


def _recipe(cfg: DictConfig) -> Iterable[Problem]:
    """Settings of the training core that contradict each other."""
    from evojax.training.trajectory_rules import missing_features

    conf, filters = cfg.algorithm, cfg.filter
    if conf.objective != "cispo" and not conf.eps_high < 1:
        remedy = "give a number below 1; only algorithm.objective=cispo takes more"
        yield Problem("out of range", "algorithm.eps_high", conf.eps_high, remedy)
    below = [name for name, w in cfg.reward.components.items() if (w < 0) != (name == "overlong")]
    if conf.advantage == "maxrl" and any(cfg.reward.components[name] for name in below):
        what = f"maxrl divides by the mean reward, and {', '.join(below)} can make it negative"
        remedy = "choose another advantage, or rewards that are never below 0"
        yield Problem(what, "algorithm.advantage", "maxrl", remedy)
    if conf.minibatches > max(cfg.train.prompts_per_step, 1):
        what = f"more minibatches than train.prompts_per_step={cfg.train.prompts_per_step} groups"
        yield Problem(what, "algorithm.minibatches", conf.minibatches, "one group each at most")
    if conf.correction in ("token_mask", "geometric_mask"):
        if not conf.correction_low < 1 < conf.correction_high:
            bounds = [conf.correction_low, conf.correction_high]
            what = "the bounds must enclose 1, the ratio where sampler and trainer agree"
            yield Problem(what, "algorithm.correction_low", bounds, "e.g. 0.5 and 2.0")
    longest, buffer = cfg.sampling.max_new_tokens, cfg.reward.overlong_buffer
    if "overlong" in cfg.reward.components and buffer > longest:
        what = f"the penalty rises over more than sampling.max_new_tokens={longest} tokens"
        yield Problem(what, "reward.overlong_buffer", buffer, f"e.g. {max(longest // 5, 1)}")
    if filters.group == "ema_quantile" and filters.keep == 1:
        what = "ema_quantile has no threshold that keeps every group"
        yield Problem(what, "filter.keep", filters.keep, "give a number below 1, e.g. 0.9")
    yield from missing_features(filters.trajectory, cfg.domain.name)
    if len(set(filters.trajectory)) < len(filters.trajectory):
        rules = list(filters.trajectory)
        yield Problem("a rule is named twice", "filter.trajectory", rules, "name it once")


def _files(cfg: DictConfig) -> Iterable[Problem]:
    yield from file_problems(cfg.policy)
    if cfg.domain.path is not None and cfg.mode != "plan":
        file = Path(cfg.domain.path)
        if not file.is_file():
            remedy = "give the path of a JSONL file"
            yield Problem("no such file", "domain.path", str(file), remedy)
        elif file.stat().st_size == 0:
            yield Problem("the file is empty", "domain.path", str(file), "one JSON object a line")
    if cfg.resume is not None and not (Path(cfg.resume) / ".hydra").is_dir():
        remedy = "give a directory outputs/<experiment>/<run>"
        yield Problem("this is not a run directory", "resume", cfg.resume, remedy)
    if cfg.evolution.repo != "private" and cfg.mode in ("evolve", "train"):
        from evojax.evolution.checkout import checkout_problems

        yield from checkout_problems(Path(cfg.evolution.repo))


def disk_need(cfg: DictConfig) -> int:
    """Bytes a run writes at least: a training state and the weights of each version, float32.

    ``need = 4 N (3 + versions) + 64 MiB`` with N parameters; a training state holds the weights
    and the two moments of AdamW, or nothing but adapters, which count as none. What a resumed run
    has written already is not counted again.
    """
    rounds = 0 if cfg.mode == "train" else cfg.evolution.rounds
    versions = 1 + rounds * (cfg.evolution.candidates + 1)
    there = Path(cfg.resume).glob("versions/*/policy/*.safetensors") if cfg.resume else ()
    size = training_bytes(cfg.policy) + versions * weight_bytes(cfg.policy)
    return max(size - sum(f.stat().st_size for f in there), 0) + _FREE_DISK


def _disk(cfg: DictConfig) -> Iterable[Problem]:
    place = nearest_existing(Path(cfg.resume or cfg.output_root).absolute())
    key = "resume" if cfg.resume else "output_root"
    if not place.is_dir():
        yield Problem("a file is in the way", key, str(place), "choose another directory")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        remedy = "choose a directory that you may write to"
        yield Problem("the directory is not writable", key, str(place), remedy)
    free, need = shutil.disk_usage(place).free, disk_need(cfg)
    if cfg.mode in ("evolve", "train") and free < need:
        what = f"the disk has {free / 1e9:.2f} GB free, the run needs about {need / 1e9:.2f} GB"
        yield Problem(what, key, str(place), "free some space or choose another disk")


def missing_experiment(cfg: DictConfig, trees: Sequence[Path]) -> list[Problem]:
    """The problem of a command line that names no experiment, with the names that exist."""
    if not OmegaConf.is_missing(cfg, "experiment"):
        return []
    names = ", ".join(nested_options("experiment", trees))
    remedy = f"add +experiment=<name>, one of: {names}"
    return [Problem("no experiment is chosen", "experiment", None, remedy)]


def recipe_problems(cfg: DictConfig) -> list[Problem]:
    """Every problem of the values themselves: names, ranges, contradictions, hidden settings.

    Args:
        cfg: nothing missing; of a run or of a candidate.
    """
    checks: tuple[Callable[[DictConfig], Iterable[Problem]], ...]
    checks = (_names, _registered, _ranges, _policy, _planned_mesh, _combinations, _recipe)
    checks += (guards.problems,)
    return [problem for find in checks for problem in find(cfg)]


def preflight(cfg: DictConfig) -> list[Problem]:
    """Every problem of values and combinations in a composed configuration.

    Args:
        cfg: the configuration without Hydra's own node; types are already right by the schema.
    """
    missing = [key for key in sorted(OmegaConf.missing_keys(cfg)) if not key.startswith("hydra")]
    if missing:
        return [Problem("must be set", key, "???", f"add {key}=<value>") for key in missing]
    problems = [*recipe_problems(cfg), *_files(cfg)]
    return problems or list(_disk(cfg))


def check(cfg: DictConfig) -> None:
    """Refuse a configuration that cannot work.

    Raises:
        InputError: with everything that `preflight` finds.
    """
    if problems := preflight(cfg):
        raise InputError(problems)


def notes(cfg: DictConfig) -> list[str]:
    """What a reader of the results must know about this configuration, in sentences."""
    found = []
    conf = cfg.algorithm
    if not guards.clip_can_act(cfg):
        found.append(
            "One optimizer step per batch of rollouts: the importance ratio is 1, so clipping is "
            "off by construction (algorithm.epochs=1, algorithm.minibatches=1)."
        )
    elif conf.epochs * conf.minibatches == 1:
        found.append(
            "One optimizer step per batch of rollouts: the importance ratio holds nothing but the "
            "difference between trainer and sampler, so clipping is off but for that."
        )
    elif conf.old_logprobs == "rollout":
        found.append(
            "The old log-probabilities are the sampler's own: the importance ratio holds the "
            "difference between trainer and sampler too, and needs no other correction."
        )
    if conf.objective == "gspo" and max(conf.eps_low, conf.eps_high) > 0.05:
        found.append(
            "The sequence ratio of gspo is a mean over tokens and stays close to 1: bounds as wide "
            f"as {conf.eps_low} and {conf.eps_high} hardly ever clip (the paper has 3e-4, 4e-4)."
        )
    if cfg.policy.compute_dtype == "bfloat16":
        found.append("Products are computed in bfloat16; weights, sums and losses are float32.")
    if cfg.train.shuffle_rewards:
        found.append("Sanity control: rewards are permuted, so the score must not rise.")
    if set(cfg.reward.components) != {"correct"}:
        found.append("Versions are judged by their share of right answers, not by this reward.")
    return found + hardware_notes(cfg.hardware) + guards.notes(cfg)
