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
from evojax.training.evaluate import evaluate
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
    assert rewards == [t.components["correct"] for t in first.trajectories]


def test_shuffling_leaves_the_unscorable_without_a_reward() -> None:
    cfg = config()
    cfg.train.shuffle_rewards = True
    mixed = [completion("0\n"), completion("?\n"), completion("9\n"), completion("?\n")]
    out = run(Scripted({}, mixed), cfg, items(1))
    for t in out.trajectories:
        assert np.isnan(t.reward) == (t.grade.status == "unscorable") == (not t.components)


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


def test_case_G01_dynamic_sampling_with_nothing_but_dead_groups_falls_back() -> None:
    out = run(Scripted({}, ALL_WRONG), config(refill_rounds=2, group="top_p_mass"), items(5))
    assert out.shortfall == 2 and not out.advantages.weight.any()
    assert np.isfinite(out.advantages.advantages).all()
    counters = out.counters()
    assert (counters["groups_drawn"], counters["groups_kept"], counters["shortfall"]) == (6, 0, 2)
    assert counters["filter_emptied"] == 0 and np.isnan(counters["filter_threshold"])


GRADED = {  # partial credit: 9 is far from every answer, its neighbours are near
    "0=": [completion("0\n"), completion("9\n"), completion("0\n"), completion("9\n")],
    "1=": [completion("9\n"), completion("8\n"), completion("9\n"), completion("8\n")],
}


def test_filtered_groups_are_refilled_like_dead_ones() -> None:
    cfg = config(group="absolute", min_std=0.2, refill_rounds=4)
    cfg.reward.components = {"correct": 1.0, "partial": 0.5}
    engine = Scripted(GRADED, GRADED["1="])
    out = run(engine, cfg, items(2))
    assert len(engine.calls[1][0]) == 1  # the weak group is drawn anew
    strong = np.array([g.item.id == "t/0" for g in out.groups])
    assert out.signal.kept.tolist() == strong.tolist()
    assert out.advantages.weight.any(axis=1).tolist() == strong.tolist()
    assert out.counters()["groups_filtered"] == (~strong).sum()
    assert out.shortfall == 2 - strong.sum() and strong.sum() <= 2


def test_a_share_of_all_groups_of_the_step_is_kept_however_many_draws_it_took() -> None:
    engine = Scripted(RIGHT_HALF, ALL_WRONG)
    cfg = config(group="uncertainty", keep=0.5, refill_rounds=3)
    cfg.train.prompts_per_step = 4
    out = run(engine, cfg, items(8))
    # 4 drawn keep 2; 6 keep 3; 7 keep 3; 8 keep 4
    assert [len(call[0]) for call in engine.calls] == [4, 2, 1, 1]
    assert int(out.signal.kept.sum()) == 4 and out.shortfall == 0


def test_the_filters_state_sees_every_group_of_a_step_once() -> None:
    cfg = config(group="ema_quantile", refill_rounds=3)
    answers = {k: v for k, v in RIGHT_HALF.items() if k != "0="}
    before = FilterState(mean=0.5, variance=0.01, seen=100)
    out = run(Scripted(answers, ALL_WRONG), cfg, items(2), state=before)
    assert out.filter_state.seen == 100 + int(out.advantages.live.sum())
    again = run(Scripted(answers, ALL_WRONG), cfg, items(2), state=before)
    assert again.filter_state == out.filter_state and before.seen == 100


def test_rollouts_that_a_rule_takes_are_counted_by_rule() -> None:
    mixed = [completion("0\n"), completion("9\n"), completion("77", "length"), completion("0\n")]
    out = run(Scripted({}, mixed), config(trajectory=["truncated"]), items(1))
    counters = out.counters()
    assert counters["filtered_truncated"] == counters["trajectories_filtered"] == 2
    assert [t.kept for t in out.groups[0].trajectories] == [True, True, False, True]


def test_lengths_are_measured_in_tokens_against_the_budget_in_force() -> None:
    cfg = config()
    cfg.reward.components = {"correct": 1.0, "overlong": 0.5}
    cfg.reward.overlong_buffer = 2
    cfg.sampling.max_new_tokens, cfg.eval.max_new_tokens, cfg.eval.samples = 4, 3, 4
    texts = [completion("0\n"), completion("00\n"), completion("000\n"), completion("00", "length")]
    sampler = Sampler(Scripted({}, texts), LastDigit(), TOKENIZER)
    out = collect(sampler, cfg, items(1), ItemStats(), 0, FilterState())
    # lengths 2, 3, 4, 2 with the stop token; the budget is 4, the penalty starts after 2
    assert [t.components["overlong"] for t in out.groups[0].trajectories] == [0, -0.5, -1, 0]
    assert [t.reward for t in out.groups[0].trajectories] == [1.0, -0.25, -0.5, 0.0]
    scored = evaluate(sampler, cfg, items(1), step=0).trajectories
    assert [t.components["overlong"] for t in scored] == [-0.5, -1, -1, -0.5]


def test_the_composed_reward_is_clipped() -> None:
    cfg = config()
    cfg.reward.components = {"correct": 5.0}
    cfg.reward.clip = 2.0
    out = run(Scripted(RIGHT_HALF, ALL_WRONG), cfg, items(2))
    assert {t.reward for t in out.trajectories} == {0.0, 2.0}


def test_seconds_are_split_between_sampling_and_the_rest() -> None:
    out = run(Scripted(RIGHT_HALF, ALL_WRONG), config(), items(2))
    assert out.sample_s > 0 and out.reward_s > 0
    assert out.seconds == out.sample_s + out.reward_s
