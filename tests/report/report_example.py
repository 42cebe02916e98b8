"""A made-up run that fills every section of the report."""

from __future__ import annotations

import math

from evojax.report.data import (
    CurvePoint,
    Delta,
    HealthAlert,
    ReportData,
    SampleCard,
    Score,
    VersionCard,
)

DIFF = """diff --git a/conf/filter/none.yaml b/conf/filter/none.yaml
index 3f1c2aa..9d0be11 100644
--- a/conf/filter/none.yaml
+++ b/conf/filter/none.yaml
@@ -1,3 +1,3 @@
 # What is left out of the update, and whether it is replaced.
-refill_rounds: 0  # dynamic sampling: extra draws to replace dead groups
+refill_rounds: 2  # dynamic sampling: extra draws to replace dead groups
 trajectory: []
"""


def _curve(first: int, steps: int, gain: float, bump: float) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(
            step=first + i,
            reward=0.25 + gain * (1 - math.exp(-(first + i) / 12)) + bump * math.sin(2.3 * i),
            dead=None if i == 3 else 0.25 + 0.01 * (first + i) + bump * math.cos(1.7 * i),
            entropy=0.95 * math.exp(-(first + i) / 30),
        )
        for i in range(steps)
    )


def example(hostile: str = "") -> ReportData:
    """The example; ``hostile`` is put into every text field."""
    h = hostile
    versions = (
        VersionCard("v000", None, "base", score=Score(0.281, (0.236, 0.329))),
        VersionCard(
            "v001",
            "v000",
            "trained",
            branch="main",
            commit="4fdcbb8d0c2b4a5e",
            factor="none",
            hypothesis="The base recipe.",
            reason="starting point of the first round" + h,
            score=Score(0.534, (0.471, 0.596)),
            delta=Delta("v000", 0.253, (0.19, 0.31), 0.0001),
            alerts=(
                HealthAlert("critical", "dead_group_share = 0.52 (alert when value > 0.5)" + h),
                HealthAlert("warn", "entropy = 0.27 (alert when value < 0.3)"),
            ),
        ),
        VersionCard("v002", "v001", "control", score=Score(0.571, (0.508, 0.633))),
        VersionCard(
            "v003",
            "v001",
            "promoted",
            branch="evo/math/v3-dynamic-sampling" + h,
            commit="9d0be11aa34f",
            factor="filter",
            hypothesis="Replacing dead groups by fresh draws should raise the share of groups that "
            "teach, because 52 % of the groups carried no signal." + h,
            predicted="update_dead_share falls by at least 0.15" + h,
            reason="better than the control on paired items; rests on one training seed",
            score=Score(0.648, (0.587, 0.707)),
            delta=Delta("v002", 0.077, (0.031, 0.122), 0.0012, 0.0024),
            diff=DIFF + h,
            backtest={
                "revived dead groups": 41,
                "extra_rollouts_share": 0.62,
                "note" + h: h or "-",
            },
        ),
        VersionCard(
            "v004",
            "v001",
            "undecided",
            branch="evo/math/v4-warmer",
            commit="77aa01ff0912",
            factor="sampling",
            hypothesis="A higher temperature should keep entropy above 0.3 nats.",
            reason="the interval holds 0; more seeds would be needed",
            score=Score(0.589, (0.527, 0.650)),
            delta=Delta("v002", 0.018, (-0.026, 0.061), 0.41, 0.41),
        ),
    )
    samples = tuple(
        SampleCard(
            version="v003",
            step=30,
            item=f"gcd/{12 + i},{8 + i}",
            task="gcd",
            prompt=f"gcd(12, 18) = 6\ngcd(9, 6) = 3\ngcd({12 + i}, {8 + i}) =" + h,
            text=[" 4\n", " 1", "", " 12 apples" + h][i % 4],
            expected="4",
            status=["correct", "wrong", "unscorable", "wrong"][i % 4],
            reward=[1.0, 0.0, None, 0.0][i % 4],
            advantage=[2.47, -0.35, 0.0, -1.2][i % 4],
        )
        for i in range(8)
    )
    return ReportData(
        experiment="math" + h,
        run="2026-01-31_10-00-00-a1b2" + h,
        seed=0,
        device="CPU, 2 cores" + h,
        wall_s=752.0,
        headline="Promoted v003 (filter): it beats the unchanged control by 7.7 points on the "
        "same items, and the base by 36.7." + h,
        base=Score(0.281, (0.236, 0.329)),
        final=Score(0.648, (0.587, 0.707)),
        audit=Score(0.631, (0.570, 0.690)),
        gain=Delta("v000", 0.367, (0.301, 0.431), 0.0001),
        promoted="v003",
        versions=versions,
        series={
            "v001" + h: _curve(0, 24, 0.35, 0.03),
            "v002": _curve(24, 12, 0.36, 0.03),
            "v003": _curve(24, 12, 0.45, 0.025),
            "v004": _curve(24, 12, 0.39, 0.035),
        },
        samples=samples,
        rerun="python -m evojax.main --config-dir harness/conf +experiment=math mode=train" + h,
        notes=("Verdicts rest on one training seed." + h,),
    )
