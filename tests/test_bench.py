from __future__ import annotations

import json

import numpy as np
import pytest

from evojax import bench
from evojax.policy.decoder import ModelConfig


def test_quick_run_prints_one_json_with_every_figure(capsys):
    bench.main(["--quick", "--policy", "random"])
    captured = capsys.readouterr()
    out = json.loads(captured.out)
    assert [row["batch"] for row in out["decode"]] == [1, 8]
    assert set(out["update"]) == {"main_job", "plain"}
    figures = [row["tokens_per_s"] for row in out["decode"]]
    figures += [row["gflop_per_s"] for row in [*out["matmul"], *out["update"].values()]]
    figures += [out["compile"]["update"]["cold_s"], out["compile"]["update"]["warm_s"]]
    figures += list(out["ratios"].values())
    assert np.isfinite(figures).all() and min(figures) > 0
    assert out["update"]["main_job"]["n"] == 2 and "iqr_s" in out["update"]["main_job"]
    assert out["machine"]["cores"] >= 1 and out["machine"]["versions"]["jax"]
    assert "GFLOP/s" in captured.err


def test_flops_of_a_batch_by_hand():
    cfg = ModelConfig(16, 4, 8, 2, 2, 1, 2, 1e4, 1e-5, 64)
    plan = bench.Plan(plain_rows=2, plain_length=5)
    packed = bench.plain_batch(cfg, plan)
    # a layer: q, o 4 x 4 and k, v 4 x 2, three of 4 x 8; the head 4 x 16
    layer = 2 * 16 + 2 * 8 + 3 * 32
    nodes = packed.stats["tokens_packed"]
    assert nodes <= 1 + 2 * 3, "one shared first token, and the last tokens are only targets"
    assert bench.update_flops(cfg, packed) == pytest.approx(6 * nodes * (2 * layer + 64))


def test_the_main_job_shares_prompts_and_examples():
    cfg = ModelConfig(1000, 4, 8, 2, 2, 1, 2, 1e4, 1e-5, 64)
    stats = bench.main_job_batch(cfg, bench.Plan()).stats
    assert stats["groups_packed"] == 8
    assert stats["tokens_sequences"] == 64 * (60 + 5)
    assert stats["tokens_packed"] <= 4 * (50 + 2 * (10 + 8 * 5))
