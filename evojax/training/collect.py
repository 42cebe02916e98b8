"""One step's rollouts: select items -> sample groups -> grade -> reward -> judge -> refill."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evojax.config import EvojaxConf, RewardConf
from evojax.domains.base import Domain
from evojax.evidence.types import Completion, FinishReason, Grade, Item, Trajectory
from evojax.grpo.advantages import GroupAdvantages
from evojax.grpo.filters import FilterState
from evojax.policy.tokenizer import Tokenizer
from evojax.rewards.base import Scored
from evojax.rewards.compose import compose
from evojax.rollout.base import Engine, SamplingParams
from evojax.training.seeds import derive, stream
from evojax.training.selection import SELECTORS, ItemStats
from evojax.training.signal import Signal, judge


@dataclass
class Group:
    """All samples of one prompt in one step."""

    item: Item
    trajectories: list[Trajectory]
    refill_round: int = 0


@dataclass(frozen=True)
class Drawn:
    """Fresh groups, and the seconds that the engine took for them (grading not included)."""

    groups: list[Group]
    sample_s: float


@dataclass
class StepRollouts:
    """What one step drew, and what of it is trained on.

    Args:
        groups: in the order drawn, refills last. signal: advantages and filters, one row a group.
        shortfall: prompts asked for less groups that carry a gradient.
        sample_s: seconds in the engine. reward_s: all other seconds of the collection: choosing
            items, grading, rewards, advantages, filters.
    """

    groups: list[Group]
    signal: Signal
    shortfall: int
    sample_s: float
    reward_s: float

    @property
    def advantages(self) -> GroupAdvantages:
        return self.signal.advantages

    @property
    def filter_state(self) -> FilterState:
        """To be handed to the next step's `collect`, and kept in the checkpoint."""
        return self.signal.state

    @property
    def seconds(self) -> float:
        return self.sample_s + self.reward_s

    def counters(self) -> dict[str, float]:
        """Numbers of the filters for the log: groups drawn, kept and filtered; rollouts filtered.

        ``filter_threshold`` is NaN where the filter has none; ``filter_emptied`` is 1 when the
        filter took every live group; each trajectory rule in use has a counter of its own.
        """
        signal = self.signal
        rules = {f"filtered_{name}": float(n) for name, n in signal.trajectories_filtered.items()}
        return {
            "groups_drawn": float(len(self.groups)),
            "groups_kept": float(signal.kept.sum()),
            "groups_filtered": float(signal.groups_filtered),
            "filter_emptied": float(signal.emptied),
            "filter_threshold": signal.threshold,
            "shortfall": float(self.shortfall),
            "trajectories_filtered": float(sum(signal.trajectories_filtered.values())),
            **rules,
        }

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
        reward: RewardConf,
        step: int,
        first_group: int = 0,
    ) -> Drawn:
        """``n`` graded samples of every item; items with equal stop rules share a batch.

        Args:
            seeds: one per item. temperature: of sampling. max_new_tokens: tokens; also the budget
            that ``overlong`` measures against. reward: components, clip and overlong buffer.
            first_group: number of the first group within the step.
        """
        groups: list[Group | None] = [None] * len(items)
        sample_s = 0.0
        by_stop: dict[tuple[str, ...], list[int]] = {}
        for i, item in enumerate(items):
            by_stop.setdefault(item.stop, []).append(i)
        for _, places in sorted(by_stop.items()):
            batch = [items[i] for i in places]
            prompts = [encode_prompt(self.tokenizer, item) for item in batch]
            params = SamplingParams(temperature, max_new_tokens, stop_ids(self.tokenizer, batch))
            started = time.perf_counter()
            results = self.engine.generate(prompts, params, n, [seeds[i] for i in places])
            sample_s += time.perf_counter() - started
            for i, item, prompt, completions in zip(places, batch, prompts, results, strict=True):
                groups[i] = self._grade(
                    item, prompt, completions, seeds[i], max_new_tokens, reward, step,
                    first_group + i,
                )  # fmt: skip
        return Drawn([g for g in groups if g is not None], sample_s)

    def _grade(
        self,
        item: Item,
        prompt: np.ndarray,
        completions: Sequence[Completion],
        seed: int,
        budget_tokens: int,
        conf: RewardConf,
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
            length = len(completion.token_ids)
            scored = Scored(item, text, grade, length, budget_tokens, conf.overlong_buffer)
            reward, components = compose(conf.components, scored, conf.clip)
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
                    features=self.domain.features(item, text, length),
                )
            )
        return Group(item, trajectories)


def collect(
    sampler: Sampler,
    cfg: EvojaxConf,
    pool: Sequence[Item],
    stats: ItemStats,
    step: int,
    filter_state: FilterState,
) -> StepRollouts:
    """Rollouts of one step, with advantages set and filters applied.

    Grade, compose and clip rewards, apply trajectory rules, estimate advantages, filter groups.
    With dynamic sampling, groups that carry no gradient (dead, dropped or filtered) are replaced
    by as many fresh draws, for at most ``filter.refill_rounds`` rounds; a step that stays short
    trains on what it has and counts the shortfall. After every draw all groups of the step are
    judged anew, always with the filter's state of the step before, so that what is kept, and the
    state handed on, depend on the step's groups only and not on how many rounds they came in.
    No rule keeps more than one group more when one group is added; hence a step never has more
    than ``train.prompts_per_step`` groups with a gradient, and nothing is thrown away.

    Args:
        pool: training items. stats: success rates so far (updated here). step: update index
            counted from the base policy. filter_state: as the step before left it.
    """
    started, sample_s = time.perf_counter(), 0.0
    select = SELECTORS.get(cfg.data.selection, "data.selection")
    want = cfg.train.prompts_per_step
    groups: list[Group] = []
    missing, signal = want, None
    for refill in range(cfg.filter.refill_rounds + 1):
        items = select(pool, step, missing, cfg.seed, stats, cfg.data, refill)
        seeds = [derive(cfg.seed, "sample", step, refill, i) for i in range(len(items))]
        drawn = sampler.draw(
            items,
            cfg.sampling.group_size,
            seeds,
            cfg.sampling.temperature,
            cfg.sampling.max_new_tokens,
            cfg.reward,
            step,
            first_group=len(groups),
        )
        sample_s += drawn.sample_s
        for group in drawn.groups:
            group.refill_round = refill
        if cfg.train.shuffle_rewards:
            shuffle_rewards(drawn.groups, stream(cfg.seed, "shuffle", step, refill))
        groups.extend(drawn.groups)
        signal = judge([g.trajectories for g in groups], cfg, filter_state)
        missing = want - int(signal.kept.sum())
        if missing <= 0:
            break
    assert signal is not None
    _write_back(groups, signal.advantages)
    for group in groups:
        scored = [t for t in group.trajectories if t.grade.status != "unscorable"]
        right = sum(t.grade.status == "correct" for t in scored)
        stats.add(group.item.id, float(right), float(len(scored)))
    reward_s = time.perf_counter() - started - sample_s
    return StepRollouts(groups, signal, missing, sample_s, reward_s)


def shuffle_rewards(groups: Sequence[Group], rng: np.random.Generator) -> None:
    """Deal the rewards of freshly drawn groups, with their components, out anew.

    Unscorable rollouts keep having no reward: the control must not train on them either.
    """
    places = [
        (group, i)
        for group in groups
        for i, t in enumerate(group.trajectories)
        if np.isfinite(t.reward)
    ]
    honest = [group.trajectories[i] for group, i in places]
    for (group, i), source in zip(places, rng.permutation(len(honest)), strict=True):
        group.trajectories[i] = dataclasses.replace(
            group.trajectories[i],
            reward=honest[source].reward,
            components=honest[source].components,
        )


def _write_back(groups: Sequence[Group], result: GroupAdvantages) -> None:
    """Write advantages, and whether the loss counts them, into the trajectories."""
    for g, group in enumerate(groups):
        group.trajectories = [
            dataclasses.replace(
                t, advantage=float(result.advantages[g, s]), kept=bool(result.weight[g, s])
            )
            for s, t in enumerate(group.trajectories)
        ]
