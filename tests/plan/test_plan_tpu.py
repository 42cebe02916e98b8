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
    assert "for" in compiled.report, compiled.why
    assert compiled.report["peak_rss_bytes"] < 8 * 1024**3
    return plan_data("tpu", "x", case_of(conf, shape_of(conf.policy)), compiled)


def test_qwen3_4b_fits_sixteen_chips_of_v5e(tmp_path: Path):
    data = planned(tmp_path, "policy=qwen3_4b", "hardware=tpu_v5e_16")
    update = data["compiled"]["update"]
    assert data["fits"] and data["peak_by"] == "compiler"
    assert update["donated"] and update["gathers_logits"] == []


def test_qwen3_4b_does_not_fit_four_chips_of_v5e(tmp_path: Path):
    data = planned(tmp_path, "policy=qwen3_4b", "hardware=tpu_v5e_4", "plan.programs=[update]")
    assert not data["fits"] and "RESOURCE_EXHAUSTED" in data["compiled"]["update_too_large"]
    assert data["together"] is not None and data["chips_needed"] == 16


def test_the_count_is_near_what_the_compiler_says(tmp_path: Path):
    mesh = "hardware.mesh={data:1,fsdp:2,tp:4}"
    words = ["policy=qwen3_0_6b", "hardware=tpu_v5e_8", mesh, "plan.programs=[update]"]
    data = planned(tmp_path, *words)
    counted = sum(data["memory"]["resident"][name] for name in ("weights", "optimizer"))
    counted += sum(data["memory"]["update"].values())
    assert 0.5 < counted / data["compiled"]["update"]["device_bytes"] < 2
