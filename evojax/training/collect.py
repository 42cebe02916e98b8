"""One step's rollouts: select items -> sample groups -> grade -> reward -> advantages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evojax.config import EvojaxConf
from evojax.domains.base import Domain
from evojax.evidence.types import Completion, FinishReason, Grade, Item, Trajectory
from evojax.grpo.advantages import GroupAdvantages, RewardTable, estimate
from evojax.policy.tokenizer import Tokenizer
from evojax.rewards.compose import compose
from evojax.rollout.base import Engine, SamplingParams
from evojax.training.seeds import derive, stream
from evojax.training.selection import SELECTORS, ItemStats


@dataclass
class Group:
    """All samples of one prompt in one step."""

    item: Item
    trajectories: list[Trajectory]
    refill_round: int = 0


@dataclass
class StepRollouts:
    """What one step drew, and the advantages of all of it.

    Args:
        groups: in the order drawn, refills last. advantages: one row per group.
        seconds: spent sampling and grading.
    """

    groups: list[Group]
    advantages: GroupAdvantages
    seconds: float

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.trajectories]

    @property
    def prompts(self) -> list[np.ndarray]:
        return [g.trajectories[0].prompt_ids for g in self.groups]

    @property
    def completions(self) -> list[list[Completion]]:
        return [[t.completion for t in g.trajectories] for g in self.groups]

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(t.completion.token_ids) for t in self.trajectories)


def encode_prompt(tokenizer: Tokenizer, item: Item) -> np.ndarray:
    """Token ids of the item's prompt; the chat template is applied here, once, and never again."""
    if item.chat is not None:
        return tokenizer.chat(item.chat)
    return tokenizer.encode(item.prompt)


def stop_ids(tokenizer: Tokenizer, items: Sequence[Item]) -> tuple[int, ...]:
    """Ids that end a completion of these items: end of text, and any token holding a stop text."""
    texts = sorted({text for item in items for text in item.stop})
    ids = {i for text in texts for i in tokenizer.ids_containing(text)}
    return tuple(sorted(ids | set(tokenizer.eos_ids)))


def visible_text(tokenizer: Tokenizer, item: Item, completion: Completion) -> str:
    """The decoded completion without its end-of-text token, cut at the first stop text."""
    ids = completion.token_ids
    if len(ids) and int(ids[-1]) in tokenizer.eos_ids:
        ids = ids[:-1]
    text = tokenizer.decode(ids)
    cuts = [text.find(s) for s in item.stop if s in text]
    return text[: min(cuts)] if cuts else text


class Sampler:
    """Draws and grades groups with one engine, domain and tokenizer.

    Args:
        engine: samples token ids. domain: grades texts. tokenizer: maps between the two.
    """

    def __init__(self, engine: Engine, domain: Domain, tokenizer: Tokenizer):
        self.engine = engine
        self.domain = domain
        self.tokenizer = tokenizer

    def draw(
        self,
        items: Sequence[Item],
        n: int,
        seeds: Sequence[int],
        temperature: float,
        max_new_tokens: int,
        weights: dict[str, float],
        step: int,
        first_group: int = 0,
    ) -> list[Group]:
        """``n`` graded samples of every item; items with equal stop rules share a batch.

        Args:
            seeds: one per item. temperature: of sampling. max_new_tokens: tokens.
            weights: reward components. first_group: number of the first group within the step.
        """
        groups: list[Group | None] = [None] * len(items)
        by_stop: dict[tuple[str, ...], list[int]] = {}
        for i, item in enumerate(items):
            by_stop.setdefault(item.stop, []).append(i)
        for _, places in sorted(by_stop.items()):
            batch = [items[i] for i in places]
            prompts = [encode_prompt(self.tokenizer, item) for item in batch]
            params = SamplingParams(temperature, max_new_tokens, stop_ids(self.tokenizer, batch))
            results = self.engine.generate(prompts, params, n, [seeds[i] for i in places])
            for i, item, prompt, completions in zip(places, batch, prompts, results, strict=True):
                groups[i] = self._grade(
                    item, prompt, completions, seeds[i], weights, step, first_group + i
                )
        return [g for g in groups if g is not None]

    def _grade(
        self,
        item: Item,
        prompt: np.ndarray,
        completions: Sequence[Completion],
        seed: int,
        weights: dict[str, float],
        step: int,
        group: int,
    ) -> Group:
        texts = [visible_text(self.tokenizer, item, c) for c in completions]
        reasons: list[FinishReason] = [c.finish_reason for c in completions]
        graded = self.domain.grade([item] * len(texts), texts, reasons)
        trajectories = []
        for sample, (completion, text, grade) in enumerate(
            zip(completions, texts, graded, strict=True)
        ):
            if completion.finish_reason == "abort":
                grade = Grade("unscorable", detail="engine abort")
            reward, components = compose(weights, item, text, grade)
            trajectories.append(
                Trajectory(
                    item=item,
                    prompt_ids=prompt,
                    completion=completion,
                    text=text,
                    grade=grade,
                    reward=reward,
                    step=step,
                    group=group,
                    sample=sample,
                    seed=seed,
                    components=components,
                    features=self.domain.features(item, text, len(completion.token_ids)),
                )
            )
        return Group(item, trajectories)


def collect(
    sampler: Sampler, cfg: EvojaxConf, pool: Sequence[Item], stats: ItemStats, step: int
) -> StepRollouts:
    """Rollouts of one step, with advantages set and filters applied.

    Dead groups (all rewards equal) are replaced by fresh draws for ``filter.refill_rounds``
    rounds; a step that stays short of live groups trains on those it has.

    Args:
        pool: training items. stats: success rates so far (updated here). step: update index
            counted from the base policy.
    """
    started = time.perf_counter()
    select = SELECTORS.get(cfg.data.selection, "data.selection")
    want = cfg.train.prompts_per_step
    groups: list[Group] = []
    advantages: GroupAdvantages | None = None
    for refill in range(cfg.filter.refill_rounds + 1):
        missing = want if advantages is None else want - int(advantages.live.sum())
        if missing <= 0:
            break
        items = select(pool, step, missing, cfg.seed, stats, cfg.data, refill)
        seeds = [derive(cfg.seed, "sample", step, refill, i) for i in range(len(items))]
        drawn = sampler.draw(
            items,
            cfg.sampling.group_size,
            seeds,
            cfg.sampling.temperature,
            cfg.sampling.max_new_tokens,
            cfg.reward.components,
            step,
            first_group=len(groups),
        )
        for group in drawn:
            group.refill_round = refill
        fresh = _set_advantages(drawn, cfg, step, refill)
        groups.extend(drawn)
        advantages = fresh if advantages is None else _joined(advantages, fresh)
    assert advantages is not None
    for group in groups:
        scored = [t for t in group.trajectories if t.grade.status != "unscorable"]
        right = sum(t.grade.status == "correct" for t in scored)
        stats.add(group.item.id, float(right), float(len(scored)))
    return StepRollouts(groups, advantages, time.perf_counter() - started)


def _set_advantages(
    groups: Sequence[Group], cfg: EvojaxConf, step: int, refill: int
) -> GroupAdvantages:
    """Advantages of freshly drawn groups, also written into their trajectories.

    Under dynamic sampling a dead group leaves the batch: its tokens leave the loss's divisor.
    """
    rewards = np.array([[t.reward for t in g.trajectories] for g in groups], dtype=np.float64)
    include = np.ones(rewards.shape, dtype=bool)
    if cfg.filter.drop_truncated:
        include = ~np.array([[t.truncated for t in g.trajectories] for g in groups])
    if cfg.train.shuffle_rewards:
        order = stream(cfg.seed, "shuffle", step, refill).permutation(rewards.size)
        rewards = rewards.reshape(-1)[order].reshape(rewards.shape)
    table = RewardTable(rewards, cfg.algorithm.dead_tolerance, include)
    result = estimate(cfg.algorithm.advantage, table, cfg.algorithm.advantage_clip)
    if cfg.filter.refill_rounds:
        result = dataclasses.replace(result, weight=result.weight & result.live[:, None])
    for g, group in enumerate(groups):
        group.trajectories = [
            dataclasses.replace(
                t,
                reward=float(rewards[g, s]),
                advantage=float(result.advantages[g, s]),
                kept=bool(result.weight[g, s]),
            )
            for s, t in enumerate(group.trajectories)
        ]
    return result


def _joined(first: GroupAdvantages, second: GroupAdvantages) -> GroupAdvantages:
    pairs = ((getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(first))
    return GroupAdvantages(*(np.concatenate(pair) for pair in pairs))
