"""When a setting acts: one table of what hides which key.

A hidden key has no effect, so a value other than the schema's default is a mistake and is refused.
Two exceptions are noted instead: a clip bound that cannot bind in this recipe (papers state it all
the same), and keys that an experiment file sets for another way of running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from evojax.errors import Problem
from evojax.schema import default_of, leaf_keys


@dataclass(frozen=True)
class Guard:
    """One condition under which keys act.

    Args:
        keys: leaves, or whole sections, that it rules over.
        hider: the key whose value decides.
        live: whether the keys act in a configuration.
        remedy: what makes them act, e.g. ``data.selection=difficulty``.
        why: added to the message where the hider's value does not explain itself.
        refused: False: a hidden value other than the default is only noted.
        noted: False: not even that; it describes something that is there all the same.
    """

    keys: tuple[str, ...]
    hider: str
    live: Callable[[DictConfig], bool]
    remedy: str
    why: str = ""
    refused: bool = True
    noted: bool = True

    def covers(self, leaf: str) -> bool:
        """Whether ``leaf`` is one of the keys or inside one of the sections."""
        return any(leaf == key or leaf.startswith(key + ".") for key in self.keys)

    def words(self, cfg: DictConfig) -> str:
        """What hides the keys here, as the end of a sentence."""
        value = OmegaConf.select(cfg, self.hider)
        shown = list(value) if OmegaConf.is_list(value) or OmegaConf.is_dict(value) else value
        if shown is None or isinstance(shown, bool):
            shown = {None: "null", True: "true", False: "false"}[shown]
        return f"{self.hider} is {shown}" + (f": {self.why}" if self.why else "")


def clip_can_act(cfg: DictConfig) -> bool:
    """Whether a ratio other than 1 can occur.

    With one optimizer step per batch the weights that are trained are those that sampled; the
    ratio is then 1 exactly if the trainer scores both sides of it.
    """
    conf = cfg.algorithm
    return conf.epochs * conf.minibatches > 1 or conf.old_logprobs == "rollout"


def _is(key: str, *values: object) -> Callable[[DictConfig], bool]:
    return lambda cfg: OmegaConf.select(cfg, key) in values


def _is_not(key: str, *values: object) -> Callable[[DictConfig], bool]:
    return lambda cfg: OmegaConf.select(cfg, key) not in values


def _by(
    hider: str, values: tuple[str, ...], *keys: str, why: str = "", refused: bool = True
) -> Guard:
    """Keys that act while ``hider`` has one of ``values``."""
    remedy = f"set {hider}={values[0]}" + "".join(f" or {v}" for v in values[1:])
    return Guard(keys, hider, _is(hider, *values), remedy, why, refused)


# Keys that describe a machine, on which a run trains as well.
_CHIPS = ("platform", "topology", "chips", "host_chips", "hbm_gb", "peak_tflops", "hbm_gb_s")
_CHIPS += ("ici_gb_s",)

GUARDS: tuple[Guard, ...] = (
    _by("mode", ("evaluate", "diagnose", "backtest"), "version"),
    Guard(
        ("plan", *(f"hardware.{key}" for key in _CHIPS)),
        "mode",
        _is("mode", "plan"),
        "set mode=plan",
        refused=False,
        noted=False,
    ),
    _by("policy.source", ("path",), "policy.path"),
    Guard(
        ("policy.lora.alpha", "policy.lora.targets"),
        "policy.lora.rank",
        lambda cfg: cfg.policy.lora.rank > 0,
        "set policy.lora.rank=8",
    ),
    _by("policy.source", ("hub",), "policy.repo", "policy.revision"),
    _by("policy.source", ("random", "hub"), "policy.arch"),
    _by("policy.arch.family", ("qwen3_5",), "policy.arch.linear", "policy.arch.rotary_share"),
    Guard(
        tuple(
            f"policy.arch.rope_scaling.{key}"
            for key in ("low_freq_factor", "high_freq_factor", "original_max_position")
        ),
        "policy.arch.rope_scaling.factor",
        lambda cfg: cfg.policy.arch.rope_scaling.factor != 1,
        "set policy.arch.rope_scaling.factor=8",
    ),
    Guard(
        ("domain.chat", "domain.grader_timeout_s"),
        "domain.path",
        _is_not("domain.path", None),
        "set domain.path=<file.jsonl>",
        why="generated problems are plain text, judged by comparing two texts",
    ),
    Guard(
        ("domain.tasks",),
        "domain.path",
        _is("domain.path", None),
        "set domain.path=null",
        why="the problems come from that file",
        refused=False,
    ),
    _by("data.selection", ("difficulty",), "data.target_rate", "data.sharpness"),
    Guard(
        ("data.target_rate",),
        "data.sharpness",
        lambda cfg: cfg.data.sharpness > 0,
        "set data.sharpness=2.0",
    ),
    _by(
        "algorithm.advantage",
        ("grpo", "dr_grpo", "rloo", "batch_std", "maxrl"),
        "reward.clip",
        why="gdpo normalises each component by itself, before any sum",
    ),
    Guard(
        ("reward.overlong_buffer",),
        "reward.components",
        lambda cfg: "overlong" in cfg.reward.components,
        "add the component: reward.components.overlong=1.0",
    ),
    _by("filter.group", ("ema_quantile", "top_p_mass", "uncertainty"), "filter.keep"),
    _by("filter.group", ("absolute",), "filter.min_std"),
    _by("filter.group", ("ema_quantile",), *(f"filter.{k}" for k in ("ema_decay", "ema_warmup"))),
    _by("filter.group", ("ema_quantile",), "filter.min_keep"),
    _by("algorithm.objective", ("clip", "gspo"), "algorithm.eps_low", why="no lower bound"),
    _by("algorithm.objective", ("clip",), "algorithm.dual_clip"),
    _by(
        "algorithm.old_logprobs",
        ("trainer",),
        "algorithm.correction",
        why="the ratio already carries the difference between sampler and trainer, and a "
        "correction would apply it twice",
    ),
    Guard(
        ("algorithm.correction_high",),
        "algorithm.correction",
        _is_not("algorithm.correction", "none"),
        "set algorithm.correction=token_tis",
    ),
    _by("algorithm.correction", ("token_mask", "geometric_mask"), "algorithm.correction_low"),
    Guard(
        ("algorithm.kl_loss",),
        "algorithm.kl_coef",
        lambda cfg: cfg.algorithm.kl_coef > 0,
        "set algorithm.kl_coef=0.001",
    ),
    Guard(
        ("algorithm.kl_every",),
        "algorithm.kl_coef",
        lambda cfg: cfg.algorithm.kl_coef == 0,
        "set algorithm.kl_coef=0",
        why="the KL loss measures every step",
    ),
    _by("algorithm.schedule", ("linear", "cosine"), "algorithm.decay_steps", "algorithm.lr_floor"),
    _by("algorithm.optimizer", ("adamw", "lion"), "algorithm.beta1", "algorithm.beta2"),
    Guard(
        ("algorithm.eps_low", "algorithm.eps_high", "algorithm.dual_clip"),
        "algorithm.old_logprobs",
        clip_can_act,
        "set algorithm.minibatches=2 or algorithm.epochs=2",
        why="with one optimizer step per batch the ratio is 1 by construction",
        refused=False,
    ),
    Guard(
        ("train.candidate_steps",),
        "evolution.rounds",
        _is_not("evolution.rounds", 0),
        "set evolution.rounds=1",
        refused=False,
    ),
    Guard(
        (
            *(f"evolution.{k}" for k in ("candidates", "proposer", "boundary")),
            *(f"evolution.{k}" for k in ("min_backtest_gain", "gate.alpha", "gate.min_delta")),
        ),
        "evolution.rounds",
        _is_not("evolution.rounds", 0),
        "set evolution.rounds=1",
    ),
)


def hiding(cfg: DictConfig, leaf: str) -> Guard | None:
    """The first guard that makes ``leaf`` inert in ``cfg``; None for a live one."""
    return next((g for g in GUARDS if g.covers(leaf) and not g.live(cfg)), None)


def hidden(cfg: DictConfig) -> dict[str, Guard]:
    """Every leaf that has no effect in ``cfg``, with what hides it."""
    found = ((leaf, hiding(cfg, leaf)) for leaf in leaf_keys())
    return {leaf: guard for leaf, guard in found if guard is not None}


def plain(cfg: DictConfig, leaf: str) -> Any:
    """Value of a leaf as plain Python."""
    value = OmegaConf.select(cfg, leaf)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _set_in_vain(cfg: DictConfig, refused: bool) -> Iterable[tuple[str, Any, Guard]]:
    for leaf, guard in hidden(cfg).items():
        value = plain(cfg, leaf)
        if guard.refused == refused and value != default_of(leaf):
            yield leaf, value, guard


def problems(cfg: DictConfig) -> list[Problem]:
    """One problem for each hidden key that is set to something else than its default."""
    found = []
    for leaf, value, guard in _set_in_vain(cfg, refused=True):
        what = f"has no effect while {guard.words(cfg)}"
        remedy = f"{guard.remedy}, or leave it out (default {default_of(leaf)!r})"
        found.append(Problem(what, leaf, value, remedy))
    return found


def notes(cfg: DictConfig) -> list[str]:
    """One sentence for each hidden key that is set and stays permitted."""
    return [
        f"{leaf}={value} has no effect while {guard.words(cfg)}."
        for leaf, value, guard in _set_in_vain(cfg, refused=False)
        if guard.noted
    ]
