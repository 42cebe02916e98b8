"""Collection with a scripted engine: what is drawn, graded, filtered and replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from evojax.config import EvojaxConf
from evojax.evidence.types import Completion, FinishReason, Grade, Item
from evojax.grpo.filters import FilterState
from evojax.policy.tokenizer import CharTokenizer
from evojax.rollout.base import SamplingParams
from evojax.training.collect import (
    Sampler,
    StepRollouts,
    collect,
    encode_prompt,
    stop_ids,
    visible_text,
)
from evojax.training.selection import ItemStats

TOKENIZER = CharTokenizer(16)


def completion(text: str, reason: FinishReason = "stop") -> Completion:
    ids = TOKENIZER.encode(text)
    n = len(ids)
    return Completion(ids, np.full(n, -0.5, np.float32), np.full(n, 0.7, np.float32), reason, "v@0")


class Scripted:
    """Answers by prompt text; calls are remembered."""

    def __init__(self, answers: dict[str, list[Completion]], default: list[Completion]):
        self.answers = answers
        self.default = default
        self.calls: list[tuple[list[str], SamplingParams, int, list[int]]] = []

    def generate(
        self,
        token_prompts: Sequence[np.ndarray],
        sampling: SamplingParams,
        n: int,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        texts = [TOKENIZER.decode(p) for p in token_prompts]
        self.calls.append((texts, sampling, n, list(seeds)))
        return [self.answers.get(t, self.default)[:n] for t in texts]

    def load_weights(self, params: Any, version: str) -> None: ...

    def health(self) -> dict[str, Any]:
        return {}


class LastDigit:
    """Right = the answer; "?" cannot be graded."""

    def items(self, split: str) -> list[Item]:
        return []

    def grade(
        self, items: Sequence[Item], texts: Sequence[str], finish_reasons: Sequence[FinishReason]
    ) -> list[Grade]:
        return [
            Grade("unscorable") if t == "?" else Grade("correct" if t == i.answer else "wrong", t)
            for i, t in zip(items, texts, strict=True)
        ]

    def features(self, item: Item, text: str, completion_tokens: int) -> dict[str, float]:
        return {"length": float(completion_tokens)}

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def items(n: int) -> list[Item]:
    return [Item(f"t/{i}", "t", f"{i}=", str(i), "train", "line") for i in range(n)]


def config(**filters: Any) -> EvojaxConf:
    cfg = EvojaxConf(experiment="test")
    cfg.sampling.group_size = 4
    cfg.train.prompts_per_step = 2
    for name, value in filters.items():
        setattr(cfg.filter, name, value)
    return cfg


RIGHT_HALF = {
    f"{i}=": [completion(f"{i}\n"), completion("9\n"), completion(f"{i}\n"), completion("9\n")]
    for i in range(8)
}
ALL_WRONG = [completion("99\n")] * 4


def run(
    engine: Scripted,
    cfg: EvojaxConf,
    pool: list[Item],
    stats: ItemStats | None = None,
    state: FilterState | None = None,
    step: int = 0,
) -> StepRollouts:
    sampler = Sampler(engine, LastDigit(), TOKENIZER)
    return collect(sampler, cfg, pool, stats or ItemStats(), step, state or FilterState())


def test_live_and_dead_groups() -> None:
    out = run(Scripted({"0=": RIGHT_HALF["0="]}, ALL_WRONG), config(), items(2))
    live = [bool(x) for x in out.advantages.live]
    by_item = {g.item.id: flag for g, flag in zip(out.groups, live, strict=True)}
    assert by_item == {"t/0": True, "t/1": False}
    assert out.advantages.weight.all()  # a dead group's tokens stay in the divisor
    group = next(g for g in out.groups if g.item.id == "t/0")
    # two of four right: mean .5, std (ddof 1) = .57735
    np.testing.assert_allclose(
        [t.advantage for t in group.trajectories], [0.866, -0.866, 0.866, -0.866], atol=1e-3
    )
    assert [t.text for t in group.trajectories] == ["0", "9", "0", "9"]


def test_refill_replaces_dead_groups_and_stops_when_full() -> None:
    answers = {k: v for k, v in RIGHT_HALF.items() if k != "0="}
    engine = Scripted(answers, ALL_WRONG)
    out = run(engine, config(refill_rounds=3), items(2))
    assert len(engine.calls) >= 2
    assert len(engine.calls[1][0]) == 1  # one dead group: one replacement asked for
    assert sum(out.advantages.live) >= 1
    dead = ~out.advantages.live
    assert not out.advantages.weight[dead].any()  # replaced groups leave the divisor
    assert {g.refill_round for g in out.groups} == set(range(len(engine.calls)))


def test_refill_gives_up_at_its_cap_and_trains_on_what_exists() -> None:
    engine = Scripted({}, ALL_WRONG)
    out = run(engine, config(refill_rounds=2), items(5))
    assert len(engine.calls) == 3
    assert len(out.groups) == 6
    assert not out.advantages.live.any()


def test_refill_leaves_the_first_draw_unchanged() -> None:
    plain, refilling = Scripted({}, ALL_WRONG), Scripted({}, ALL_WRONG)
    run(plain, config(), items(5))
    run(refilling, config(refill_rounds=1), items(5))
    assert refilling.calls[0] == plain.calls[0]


def test_unscorable_is_left_out_of_the_group_and_of_the_item_statistics() -> None:
    stats = ItemStats()
    mixed = [completion("0\n"), completion("?\n"), completion("9\n"), completion("?\n")]
    out = run(Scripted({"0=": mixed}, mixed), config(), items(1), stats)
    rewards = [t.reward for t in out.groups[0].trajectories]
    assert rewards[0] == 1.0 and np.isnan(rewards[1]) and rewards[2] == 0.0
    assert [t.kept for t in out.groups[0].trajectories] == [True, False, True, False]
    assert stats.counts["t/0"] == (2.0, 4.0)  # the item is drawn twice: 2 right of 4 scored


def test_engine_abort_is_unscorable_even_if_the_text_is_right() -> None:
    aborted = [completion("0", "abort")] * 4
    out = run(Scripted({}, aborted), config(), items(1))
    assert {t.grade.status for t in out.trajectories} == {"unscorable"}
    assert not out.advantages.weight.any()


def test_truncated_completions_can_be_left_out_of_the_loss() -> None:
    mixed = [completion("0\n"), completion("9\n"), completion("77", "length"), completion("0\n")]
    kept = run(Scripted({}, mixed), config(), items(1))
    assert kept.advantages.weight.all()
    out = run(Scripted({}, mixed), config(trajectory=["truncated"]), items(1))
    assert out.advantages.weight[0].tolist() == [True, True, False, True]
    # mean over the three kept members: 2/3
    assert out.advantages.advantages[0, 1] == pytest.approx(-2 / 3 / np.sqrt(1 / 3), abs=1e-3)


def test_shuffled_rewards_are_a_permutation_that_depends_on_the_step_only() -> None:
    cfg = config()
    cfg.train.shuffle_rewards = True
    engine = Scripted(RIGHT_HALF, ALL_WRONG)
    first, second = run(engine, cfg, items(8)), run(engine, cfg, items(8))
    rewards = [t.reward for t in first.trajectories]
    assert rewards == [t.reward for t in second.trajectories]
    honest = [float(t.grade.status == "correct") for t in first.trajectories]
    assert sorted(rewards) == sorted(honest)


def test_seeds_are_the_same_in_every_arm() -> None:
    one, two = Scripted({}, ALL_WRONG), Scripted(RIGHT_HALF, ALL_WRONG)
    cfg = config()
    run(one, cfg, items(8))
    cfg.algorithm.lr = 1.0
    run(two, cfg, items(8))
    assert one.calls[0] == two.calls[0]


def test_stop_ids_hold_every_token_with_the_stop_text() -> None:
    ids = stop_ids(TOKENIZER, items(1))
    assert TOKENIZER.encode("\n")[0] in ids
    assert set(TOKENIZER.eos_ids) <= set(ids)


def test_visible_text_is_cut_at_the_stop() -> None:
    item = items(1)[0]
    assert visible_text(TOKENIZER, item, completion("12\n")) == "12"
    assert visible_text(TOKENIZER, item, completion("12", "length")) == "12"
    assert encode_prompt(TOKENIZER, item).tolist() == TOKENIZER.encode("0=").tolist()
