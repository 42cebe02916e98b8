"""Plans that ask the TPU compiler (libtpu, no chip): run by make test-tpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evojax.evolution.config_edit import compose_conf
from evojax.evolution.workshop import typed
from evojax.paths import conf_dir
from evojax.plan.case import case_of, shape_of
from evojax.plan.compiler import compile_programs
from evojax.plan.report import plan_data

pytestmark = [pytest.mark.tpu, pytest.mark.timeout(600)]


def planned(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    cfg = compose_conf(conf_dir(), ["+experiment=plan", *overrides])
    conf = typed(cfg)
    compiled = compile_programs(cfg, tmp_path)
    assert "update" in compiled.report, compiled.why
    assert compiled.report["peak_rss_bytes"] < 8 * 1024**3
    return plan_data("tpu", "x", case_of(conf, shape_of(conf.policy)), compiled)


@pytest.mark.parametrize(("hardware", "fits"), [("tpu_v5e_16", True), ("tpu_v5e_4", False)])
def test_qwen3_4b_on_v5e(tmp_path: Path, hardware: str, fits: bool):
    data = planned(tmp_path, "policy=qwen3_4b", f"hardware={hardware}")
    found = data["compiled"]["update"]
    assert data["fits"] is fits and data["peak_by"] == "compiler"
    assert found["donated"] and found["gathers_logits"] == []
    assert fits or data["changes"]


def test_the_count_is_near_what_the_compiler_says(tmp_path: Path):
    data = planned(tmp_path, "policy=qwen3_0_6b", "hardware=tpu_v5e_8")
    counted = sum(data["memory"]["resident"][name] for name in ("weights", "optimizer"))
    counted += sum(data["memory"]["update"].values())
    assert 0.5 < counted / data["compiled"]["update"]["device_bytes"] < 2
