"""What is planned: a model, the sizes of a step, and the chips it is laid over."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from evojax.config import EvojaxConf, HardwareConf, PolicyConf
from evojax.errors import InputError
from evojax.evidence.types import Completion
from evojax.grpo.advantages import RewardTable, estimate
from evojax.grpo.pack import Packed, pack
from evojax.policy.conf import arch_problems, arch_shape
from evojax.policy.hf import read_config
from evojax.policy.shape import SMOLLM2_135M, ModelConfig

GIGA = 1e9


@dataclass(frozen=True)
class Chip:
    """Published limits of one chip.

    Args:
        memory: bytes. flops: bfloat16 operations a second. memory_rate: bytes a second.
        link_rate: bytes a second over all links to other chips together, one direction.
    """

    memory: float
    flops: float
    memory_rate: float
    link_rate: float


@dataclass(frozen=True)
class Work:
    """Sizes of one training step; every response is taken to use its whole budget.

    Args:
        groups: prompts a step. samples: responses a prompt. prompt, new: tokens of each.
        micro_groups: groups of a row. max_batch: rows decoded together.
        epochs: passes over a batch. minibatches: optimizer steps a pass.
        scored: forward passes over the batch besides the update's own, a step: 1 for old
            log-probabilities, and the share of steps that measure the KL to the start.
    """

    groups: int
    samples: int
    prompt: int
    new: int
    micro_groups: int
    max_batch: int
    epochs: int = 1
    minibatches: int = 1
    scored: float = 0.0


@dataclass(frozen=True)
class Case:
    """One thing to plan.

    Args:
        model: shape of the policy. work: sizes of a step.
        chip: limits of a chip. chips: how many. host_chips: those of one process.
        mesh: sizes of the axes data, fsdp, tp; their product is ``chips``.
        optimizer: registered name. lora_rank: 0 trains every weight. lora_targets: names of
            adapted matrices.
    """

    model: ModelConfig
    work: Work
    chip: Chip
    chips: int
    host_chips: int
    mesh: tuple[int, int, int]
    optimizer: str = "adamw"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()

    @property
    def rows_abreast(self) -> int:
        """Rows computed together: one for each shard of the batch."""
        return self.mesh[0] * self.mesh[1]

    @property
    def processes(self) -> int:
        """Processes of the run, each with an engine of its own."""
        return -(-self.chips // self.host_chips)

    @property
    def engine_chips(self) -> int:
        """Chips that an engine is cut over: those of its process."""
        return min(self.chips, self.host_chips)


def shape_of(conf: PolicyConf) -> ModelConfig:
    """Shape of the policy, without its weights: a preset of the hub need not be there.

    Raises:
        InputError: the directory or the sizes are wrong.
    """
    if conf.source == "path":
        shape = read_config(Path(conf.path or ""))
    elif conf.source == "smollm2_135m":
        shape = SMOLLM2_135M
    else:
        shape = arch_shape(conf)
        if problems := arch_problems(conf):
            raise InputError(problems)
    return dataclasses.replace(shape, compute_dtype=conf.compute_dtype, remat=conf.remat)


def chip_of(conf: HardwareConf) -> Chip:
    """Limits as the hardware section states them, in bytes and operations."""
    return Chip(
        conf.hbm_gb * GIGA,
        conf.peak_tflops * 1e12,
        conf.hbm_gb_s * GIGA,
        conf.ici_gb_s * GIGA,
    )


def work_of(conf: EvojaxConf) -> Work:
    """Sizes of a step of this configuration; prompts as long as ``plan.prompt_tokens``."""
    algorithm = conf.algorithm
    measured = 1.0 if algorithm.kl_coef > 0 else 1.0 / algorithm.kl_every
    several = algorithm.epochs * algorithm.minibatches > 1
    return Work(
        groups=conf.train.prompts_per_step,
        samples=conf.sampling.group_size,
        prompt=conf.plan.prompt_tokens,
        new=conf.sampling.max_new_tokens,
        micro_groups=conf.train.micro_batch_groups,
        max_batch=conf.rollout.max_batch,
        epochs=algorithm.epochs,
        minibatches=algorithm.minibatches,
        scored=measured + float(algorithm.old_logprobs == "trainer" and several),
    )


def case_of(conf: EvojaxConf, model: ModelConfig) -> Case:
    """The case that a configuration describes."""
    hardware = conf.hardware
    mesh = hardware.mesh
    return Case(
        model=model,
        work=work_of(conf),
        chip=chip_of(hardware),
        chips=hardware.chips,
        host_chips=hardware.host_chips,
        mesh=(mesh.data, mesh.fsdp, mesh.tp),
        optimizer=conf.algorithm.optimizer,
        lora_rank=conf.policy.lora.rank,
        lora_targets=tuple(conf.policy.lora.targets),
    )


def example_batch(case: Case, groups: int) -> Packed:
    """A packed batch of ``groups`` groups, half of each right; prompts and responses are random."""
    return _example(case.work, case.model.vocab_size, case.model.linear is None, groups)


def _example(work: Work, vocabulary: int, share: bool, groups: int) -> Packed:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(vocabulary, size=work.prompt, dtype=np.int32) for _ in range(groups)]
    nothing = np.zeros(work.new, np.float32)

    def response() -> Completion:
        tokens = rng.integers(vocabulary, size=work.new, dtype=np.int32)
        return Completion(tokens, nothing, nothing, "length", "plan")

    rewards = np.tile(np.arange(work.samples) % 2, (groups, 1)).astype(float)
    packed = pack(
        prompts,
        [[response() for _ in range(work.samples)] for _ in prompts],
        estimate("grpo", RewardTable(rewards, 0.0)),
        work.micro_groups,
        aggregation="token_mean",
        horizon=work.new,
        share=share,
    )
    if packed is None:
        raise ValueError("every group of the example is live")
    return packed


@dataclass(frozen=True)
class RowShape:
    """Sizes of one packed row, as ``pack`` rounds them.

    Args:
        shared: nodes that several responses pass through. lines, width: places of the rest.
        slots: nodes whose next token is scored. responses: sequences of the row.
        length: tokens of each.
    """

    shared: int
    lines: int
    width: int
    slots: int
    responses: int
    length: int

    @property
    def nodes(self) -> int:
        """Tokens computed, padding included."""
        return self.shared + self.lines * self.width

    @property
    def pairs(self) -> int:
        """Attention scores of one head."""
        tails = self.lines * self.width
        return self.shared**2 + tails * (self.shared + self.width)


_ANY = 2**31 - 1  # so many different tokens that two responses begin alike by no chance


@lru_cache(maxsize=64)
def _row_shape(work: Work, share: bool) -> RowShape:
    rows = _example(work, _ANY, share, work.micro_groups).rows
    return RowShape(
        shared=rows.shared_end.shape[-1],
        lines=rows.tail.shape[-2],
        width=rows.tail.shape[-1],
        slots=rows.head.shape[-1],
        responses=rows.slot.shape[-2],
        length=rows.slot.shape[-1],
    )


def row_shape(case: Case) -> RowShape:
    """Sizes of the rows of this case, found by packing one whose responses share their prompt."""
    row = dataclasses.replace(case.work, groups=1, max_batch=1, epochs=1, minibatches=1, scored=0.0)
    return _row_shape(row, case.model.linear is None)
