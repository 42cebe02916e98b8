"""The ``policy`` section of the configuration: the shape it states, and what is wrong with it.

Nothing here imports JAX; the section may also be the composed configuration's own node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from evojax.config import PolicyConf
from evojax.errors import Problem
from evojax.policy.lora_conf import lora_problems
from evojax.policy.shape import (
    SMOLLM2_135M,
    TRAITS,
    LinearConfig,
    ModelConfig,
    RopeScaling,
    num_params,
)

SOURCES = ("smollm2_135m", "path", "hub", "random")
_Shape = TypeVar("_Shape", RopeScaling, LinearConfig)
STATED = ("hub", "random")  # sources whose shape is policy.arch


def arch_shape(policy: PolicyConf) -> ModelConfig:
    """The shape that ``policy.arch`` describes; it may have ``faults``."""
    arch = policy.arch
    traits = TRAITS.get(arch.family, frozenset())
    scaling, linear = arch.rope_scaling, arch.linear
    return ModelConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_layers=arch.num_layers,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=_head_dim(arch),
        rope_theta=arch.rope_theta,
        rms_eps=arch.rms_eps,
        max_position=arch.max_position,
        tie_embeddings=arch.tie_embeddings,
        compute_dtype=policy.compute_dtype,
        family=arch.family,
        qkv_bias="qkv_bias" in traits,
        qk_norm="qk_norm" in traits,
        rope_scaling=_same(RopeScaling, scaling) if scaling.factor != 1 else None,
        rotary_share=arch.rotary_share,
        attn_gate="attn_gate" in traits,
        linear=_same(LinearConfig, linear) if "linear" in traits else None,
        remat=policy.remat,
    )


def _same(kind: type[_Shape], section: Any) -> _Shape:
    """A part of the shape, from the section of the configuration that has its fields."""
    return kind(**{f.name: getattr(section, f.name) for f in dataclasses.fields(kind)})


def _head_dim(arch: Any) -> int:
    return arch.hidden_size // max(arch.num_heads, 1) if arch.head_dim is None else arch.head_dim


def arch_problems(policy: PolicyConf) -> list[Problem]:
    """Everything that is wrong with ``policy.arch``; empty when there can be such a model."""
    arch = policy.arch
    shape = dataclasses.replace(arch_shape(policy), compute_dtype="float32", remat="none")
    found = shape.faults()
    if arch.head_dim is None and arch.num_heads > 0 and arch.hidden_size % arch.num_heads:
        what = f"hidden_size {arch.hidden_size} is not a multiple of num_heads {arch.num_heads}"
        found.append(f"{what}, and there is no head_dim")
    return [_problem(policy, what) for what in found]


def _problem(policy: PolicyConf, what: str) -> Problem:
    """A fault begins with the name of what is wrong."""
    name = what.split()[0]
    value: Any = policy.arch
    for part in name.split("."):
        value = getattr(value, part)
    return Problem(what, f"policy.arch.{name}", value, "correct the sizes under policy.arch")


def policy_problems(policy: PolicyConf) -> Iterator[Problem]:
    """What is wrong with the section, but for names and files."""
    yield from lora_problems(policy.lora)
    if policy.source in STATED:
        yield from arch_problems(policy)
    if policy.source != "hub":
        return
    if not policy.repo or policy.repo.count("/") != 1:
        remedy = "give owner/name, e.g. policy.repo=Qwen/Qwen3-0.6B"
        yield Problem("this is no repository of the hub", "policy.repo", policy.repo, remedy)
    if policy.revision is not None and not policy.revision.strip():
        remedy = "give a branch, a tag or a commit, or null"
        yield Problem("an empty revision", "policy.revision", policy.revision, remedy)


def stated_params(policy: PolicyConf) -> int:
    """Weights of a model that is no local directory."""
    return num_params(arch_shape(policy) if policy.source in STATED else SMOLLM2_135M)
