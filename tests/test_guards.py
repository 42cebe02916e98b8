"""What hides which key, that hidden values are refused, and that the table fits the schema."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from evojax import guards
from evojax.config import EvojaxConf
from evojax.ranges import RANGES
from evojax.schema import default_of, leaf_keys


def conf(**changes: Any) -> DictConfig:
    """The schema's defaults with ``changes``; ``__`` in a name stands for a dot."""
    cfg = OmegaConf.structured(EvojaxConf(experiment="t"))
    assert isinstance(cfg, DictConfig)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False)
    return cfg


def refused(**changes: Any) -> list[str]:
    return [problem.where for problem in guards.problems(conf(**changes))]


def test_the_defaults_are_free_of_problems_and_notes():
    assert guards.problems(conf()) == [] and guards.notes(conf()) == []


def test_every_key_of_the_table_is_in_the_schema():
    for guard in guards.GUARDS:
        assert any(leaf == guard.hider for leaf in leaf_keys()), guard.hider
        for key in guard.keys:
            assert any(guard.covers(leaf) for leaf in leaf_keys()), key
            remedy = guard.remedy.split()[1].split("=")[0]
            assert remedy == "the" or remedy in leaf_keys(), guard.remedy


@pytest.mark.parametrize(
    ("key", "value", "enabling"),
    [
        ("version", "v001", {"mode": "evaluate"}),
        ("policy__path", "/m", {"policy__source": "path"}),
        ("policy__arch__num_layers", 3, {"policy__source": "random"}),
        ("domain__chat", True, {"domain__path": "x.jsonl"}),
        ("domain__grader_timeout_s", 1.0, {"domain__path": "x.jsonl"}),
        ("data__target_rate", 0.4, {"data__selection": "difficulty"}),
        ("data__sharpness", 3.0, {"data__selection": "difficulty"}),
        ("reward__overlong_buffer", 2, {"reward__components": {"correct": 1, "overlong": 1}}),
        ("filter__keep", 0.5, {"filter__group": "top_p_mass"}),
        ("filter__keep", 0.5, {"filter__group": "uncertainty"}),
        ("filter__min_std", 0.2, {"filter__group": "absolute"}),
        ("filter__ema_decay", 0.2, {"filter__group": "ema_quantile"}),
        ("filter__ema_warmup", 2, {"filter__group": "ema_quantile"}),
        ("filter__min_keep", 0.2, {"filter__group": "ema_quantile"}),
        ("algorithm__correction", "token_tis", {"algorithm__old_logprobs": "trainer"}),
        (
            "algorithm__correction_high",
            3.0,
            {"algorithm__old_logprobs": "trainer", "algorithm__correction": "token_tis"},
        ),
        (
            "algorithm__correction_low",
            0.9,
            {"algorithm__old_logprobs": "trainer", "algorithm__correction": "token_mask"},
        ),
        ("algorithm__kl_loss", "k3_is", {"algorithm__kl_coef": 0.1}),
        ("algorithm__decay_steps", 7, {"algorithm__schedule": "linear"}),
        ("algorithm__lr_floor", 0.1, {"algorithm__schedule": "cosine"}),
    ],
)
def test_a_hidden_key_is_refused_until_it_acts(key: str, value: Any, enabling: dict[str, Any]):
    dotted = key.replace("__", ".")
    assert refused(**{key: value}) == [dotted]
    assert refused(**enabling, **{key: value}) == []
    assert dotted not in guards.hidden(conf(**enabling))


@pytest.mark.parametrize(
    ("key", "value", "hiding"),
    [
        ("algorithm__eps_low", 0.1, {"algorithm__objective": "cispo"}),
        ("algorithm__dual_clip", 3.0, {"algorithm__objective": "gspo"}),
        ("algorithm__kl_every", 2, {"algorithm__kl_coef": 0.1}),
        ("algorithm__beta1", 0.8, {"algorithm__optimizer": "adafactor"}),
        ("algorithm__beta2", 0.8, {"algorithm__optimizer": "adafactor"}),
        ("evolution__candidates", 3, {"evolution__rounds": 0}),
        ("evolution__gate__alpha", 0.1, {"evolution__rounds": 0}),
        ("evolution__boundary__mutable", ["reward"], {"evolution__rounds": 0}),
    ],
)
def test_a_live_key_is_refused_once_it_is_hidden(key: str, value: Any, hiding: dict[str, Any]):
    dotted = key.replace("__", ".")
    assert refused(**{key: value}) == []
    assert refused(**hiding, **{key: value}) == [dotted]


def test_a_key_may_have_two_conditions():
    drawn = {"data__selection": "difficulty", "data__target_rate": 0.4}
    assert refused(**drawn) == []
    assert refused(**drawn, data__sharpness=0.0) == ["data.target_rate"]


@pytest.mark.parametrize(
    ("key", "value", "hiding"),
    [
        ("algorithm__eps_high", 0.3, {"algorithm__old_logprobs": "trainer"}),
        ("algorithm__dual_clip", 3.0, {"algorithm__old_logprobs": "trainer"}),
        ("train__candidate_steps", 5, {"evolution__rounds": 0}),
        ("domain__tasks", ["gcd"], {"domain__path": "x.jsonl"}),
    ],
)
def test_some_hidden_keys_are_noted_and_permitted(key: str, value: Any, hiding: dict[str, Any]):
    assert refused(**hiding, **{key: value}) == []
    (note,) = guards.notes(conf(**hiding, **{key: value}))
    assert note.startswith(key.replace("__", ".")) and "no effect" in note


def test_all_hidden_keys_are_listed_at_once_with_what_hides_them_and_the_default():
    found = guards.problems(conf(data__target_rate=0.4, algorithm__correction="token_tis"))
    assert [p.where for p in found] == ["data.target_rate", "algorithm.correction"]
    assert found[0].what == "has no effect while data.selection is uniform"
    assert found[0].remedy == "set data.selection=difficulty, or leave it out (default 0.5)"
    assert "apply it twice" in found[1].what


def test_a_clip_can_act_with_a_second_step_or_with_the_samplers_own_probabilities():
    assert guards.clip_can_act(conf())
    anew = {"algorithm__old_logprobs": "trainer"}
    assert not guards.clip_can_act(conf(**anew))
    assert guards.clip_can_act(conf(**anew, algorithm__epochs=2))
    assert guards.clip_can_act(conf(**anew, algorithm__minibatches=2))


def test_a_hidden_number_has_limits_all_the_same():
    numbers = [leaf for leaf in leaf_keys() if type(default_of(leaf)) in (int, float)]
    assert {leaf for leaf in numbers if not leaf.startswith("policy.arch.")} <= set(RANGES)
