"""The gate: hand-computed values, null data, and lucky scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evojax.evolution.gate import (
    Arm,
    GateRule,
    bootstrap_mean,
    holm,
    judge_all,
    paired_bootstrap,
    sign_flip_p,
    validity_problems,
)

RULE = GateRule(resamples=1000)


def arm(version: str, values: np.ndarray | list[float], protocol: object = "p") -> Arm:
    return Arm(version, {f"i{n}": float(v) for n, v in enumerate(values)}, protocol)


def test_sign_flip_by_hand() -> None:
    assert sign_flip_p(np.array([1.0, 2.0])) == 0.5
    assert sign_flip_p(np.array([1.0, -1.0])) == 1.0
    assert sign_flip_p(np.array([0.0, 0.0])) == 1.0
    assert sign_flip_p(np.array([0.1] * 6 + [0.0] * 30)) == pytest.approx(2 / 64)
    assert sign_flip_p(np.full(40, 0.1), 999) == pytest.approx(1 / 1000)


def test_monte_carlo_agrees_with_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    delta = np.random.default_rng(0).normal(0.3, 1.0, 12)
    exact = sign_flip_p(delta)
    monkeypatch.setattr("evojax.evolution.gate.EXACT_ITEMS", 2)
    assert sign_flip_p(delta, 20_000) == pytest.approx(exact, abs=0.015)


def test_bootstrap_interval_has_the_textbook_width() -> None:
    scores = {str(i): float(i % 2) for i in range(400)}
    mean, (low, high) = bootstrap_mean(scores)
    assert mean == 0.5
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.06)
    assert bootstrap_mean(scores) == bootstrap_mean(dict(reversed(scores.items())))
    assert math.isnan(bootstrap_mean({"a": math.nan})[0])


def test_unscorable_items_are_left_out_not_zero() -> None:
    found = paired_bootstrap({"a": 0.5, "b": math.nan, "c": 0.0}, {"a": 1.0, "b": 1.0, "c": 0.5})
    assert (found.mean, found.items, found.left_out) == (0.5, 2, 1)


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01]) == [0.04, 0.02]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_between_p_and_bonferroni(ps: list[float]) -> None:
    for p, q in zip(ps, holm(ps), strict=True):
        assert p <= q <= min(1.0, len(ps) * p) or q == pytest.approx(p)
    assert [x for _, x in sorted(zip(ps, holm(ps), strict=True))] == sorted(holm(ps))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20), st.integers(0, 5))
def test_swapping_the_arms_mirrors_the_result(delta: list[float], seed: int) -> None:
    a = {str(i): 0.0 for i in range(len(delta))}
    b = {str(i): d for i, d in enumerate(delta)}
    one, two = paired_bootstrap(a, b, 200, seed), paired_bootstrap(b, a, 200, seed)
    assert one.mean == pytest.approx(-two.mean) and one.p == two.p
    assert one.ci95[0] == pytest.approx(-two.ci95[1], abs=1e-12)


def test_null_data_is_promoted_no_more_often_than_alpha() -> None:
    rng = np.random.default_rng(7)
    promoted = decided = 0
    for trial in range(400):
        p = rng.uniform(0.1, 0.9, 40)
        a, b = rng.binomial(8, p) / 8, rng.binomial(8, p) / 8
        rule = GateRule(resamples=400, seed=trial)
        (verdict,) = judge_all(arm("c", a), [arm("x", b)], rule)
        promoted += verdict.outcome == "promoted"
        decided += verdict.p_holm is not None and verdict.p_holm < 0.05
    assert 8 <= decided <= 33  # 400 * 0.05 = 20, three binomial deviations
    assert 2 <= promoted <= 20  # only the upper half of them is a promotion


def test_a_real_gain_is_promoted_and_a_loss_rejected() -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(0.2, 0.5, 48)
    better, worse, same = base + rng.normal(0.1, 0.1, 48), base - 0.1, base
    got = judge_all(arm("c", base), [arm("b", better), arm("w", worse), arm("s", same)], RULE)
    assert [v.outcome for v in got] == ["promoted", "rejected", "rejected"]
    assert got[0].comparison is not None and got[0].comparison.items == 48
    assert "one training seed" in got[0].words and got[0].vs == "c"
    noisy = arm("n", base + np.tile([0.3, -0.28], 24))
    assert judge_all(arm("c", base), [noisy], RULE)[0].outcome == "undecided"
    strict = GateRule(resamples=1000, min_delta=0.2)
    assert judge_all(arm("c", base), [arm("b", better)], strict)[0].outcome == "rejected"


def test_few_items_can_never_decide() -> None:
    (verdict,) = judge_all(arm("c", [0.0] * 5), [arm("x", [1.0] * 5)], RULE)
    assert verdict.outcome == "undecided" and verdict.p_holm == 2 / 32


def test_case_E01_a_lucky_score_is_not_promoted_and_b_ends_on_top() -> None:
    rng = np.random.default_rng(3)

    def noisy(true: float) -> np.ndarray:
        return true + rng.normal(0, 10, size=(30, 8)).mean(axis=1)

    parent, lucky, b = noisy(50.0), noisy(50.0), noisy(80.0)
    lucky[0] = 200.0
    verdicts = judge_all(arm("parent", parent), [arm("a", lucky), arm("b", b)], RULE)
    assert [v.outcome for v in verdicts] == ["undecided", "promoted"]
    found = verdicts[0].comparison
    assert found is not None and found.items == 30 and found.spread > 20


def test_case_E03_a_state_is_never_a_number() -> None:
    control = arm("c", [0.5] * 10)
    for bad in (math.inf, -math.inf, "0.9", None, True):
        broken = Arm("x", {**control.scores, "i0": bad}, "p")  # type: ignore[dict-item]
        assert judge_all(control, [broken], RULE)[0].outcome == "invalid"
    nothing = Arm("x", {k: math.nan for k in control.scores}, "p")
    assert judge_all(control, [nothing], RULE)[0].outcome == "invalid"
    assert judge_all(control, [Arm("x", {}, "p")], RULE)[0].outcome == "invalid"


def test_case_E06_another_evaluation_is_invalid_and_a_jump_is_flagged() -> None:
    control = arm("c", [0.1] * 20)
    shrunk = Arm("x", {"i0": 1.0}, "p")
    other = arm("x", [0.9] * 20, protocol="samples=1")
    broken = Arm("x", control.scores, "p", unscorable=0.5)
    for bad in (shrunk, other, broken):
        verdict = judge_all(control, [bad], RULE)[0]
        assert verdict.outcome == "invalid" and verdict.problems and verdict.comparison is None
    jump = judge_all(control, [arm("x", [0.9] * 20)], RULE)[0]
    assert jump.flags and "implausible" in jump.words
    assert validity_problems(control, control) == []


def test_invalid_candidates_do_not_cost_the_others() -> None:
    rng = np.random.default_rng(1)
    base = rng.uniform(0.2, 0.5, 30)
    good = arm("g", base + rng.normal(0.06, 0.12, 30))
    alone = judge_all(arm("c", base), [good], RULE)[0]
    both = judge_all(arm("c", base), [arm("x", base, "other"), good], RULE)
    assert both[1].p_holm == alone.p_holm
