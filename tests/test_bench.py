from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from evojax.bench import __main__ as bench
from evojax.bench.flops import layer_products, predicting_nodes, update_flops
from evojax.bench.rates import plain_batch
from evojax.bench.shapes import SHAPES, shape_items, tiny
from evojax.bench.step import run_steps, step_conf
from evojax.config import PolicyConf
from evojax.errors import InputError
from evojax.policy.decoder import ModelConfig
from evojax.policy.load import load_policy

TINY = ModelConfig(16, 4, 8, 2, 2, 1, 2, 1e4, 1e-5, 64)


@pytest.fixture(scope="module")
def policy():
    return load_policy(PolicyConf(source="random"), 0)


@pytest.fixture(scope="module")
def report():
    """One quick run: its JSON and its progress lines."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        bench.main(["--quick", "--policy", "random", "--shapes", "main_job"])
    return json.loads(out.getvalue()), err.getvalue()


def test_quick_run_prints_one_json_with_every_figure(report):
    out, progress = report
    assert out["schema"] == bench.SCHEMA and set(out["shapes"]) == {"main_job"}
    assert [row["batch"] for row in out["decode"]] == [1, 8]
    figures = [row["tokens_per_s"] for row in out["decode"]]
    figures += list(out["compile"]["update"].values())
    figures += [out["plain_update"]["gflop_per_s"]]
    for shape in out["shapes"].values():
        assert set(shape["parts"]) == {"rollout_s", "reward_s", "update_s", "sync_s"}
        figures += [*shape["parts"].values(), *shape["tokens_per_s"].values()]
        figures += [*shape["update"].values(), shape["matmul"]["gflop_per_s"]]
        figures += [shape["peak_rss_gb"], shape["step"]["median_s"]]
        figures.append(shape["beside"]["checkpoint_s"])
        assert shape["step"]["n"] == 2, "neither the one that compiles nor the last one"
    assert np.isfinite(figures).all() and min(figures) > 0
    assert out["machine"]["cores"] >= 1 and out["machine"]["versions"]["jax"]
    assert "GFLOP/s" in progress


def test_headline_steps_are_all_live_and_the_natural_share_stands_beside(report):
    for shape in report[0]["shapes"].values():
        assert shape["live_share"] == 1.0
        assert 0.0 <= shape["natural_dead_share"] <= 1.0
        assert shape["tokens_per_s"]["useful"] == shape["tokens_per_s"]["raw"]
        assert 0.0 <= shape["padding_share"] < 1.0


def test_parts_of_a_step_add_up(report):
    for shape in report[0]["shapes"].values():
        assert sum(shape["parts"].values()) == pytest.approx(shape["step"]["median_s"], rel=0.5)


def test_natural_grades_leave_dead_groups_out(policy):
    shape = tiny(SHAPES["main_job"])
    conf = step_conf(shape, PolicyConf(source="random"), 3)
    steps = run_steps(policy, shape, conf, live=False)
    assert [s.live_share for s in steps] == [s.natural_live_share for s in steps]
    for step in steps:
        size = shape.samples * shape.new
        assert step.row["tokens"] == shape.prompts * size
        assert step.row["useful_tokens"] == round(step.live_share * shape.prompts) * size
        assert (step.repacked(conf) is None) == (step.live_share == 0)


def test_forced_completions_have_their_full_length(policy):
    shape = tiny(SHAPES["medium"])
    conf = step_conf(shape, PolicyConf(source="random"), 1)
    (step,) = run_steps(policy, shape, conf, live=True)
    lengths = {len(c.token_ids) for group in step.groups for c in group.completions}
    assert lengths == {shape.new}
    assert [group.rewards for group in step.groups] == [[1.0, 0.0, 1.0, 0.0]] * shape.prompts


def test_prompts_fill_the_shape_and_never_show_their_own_answer(policy):
    shape = tiny(SHAPES["long"])
    items = shape_items(shape, policy.tokenizer)
    lengths = [len(policy.tokenizer.encode(item.prompt)) for item in items]
    assert max(lengths) <= shape.prompt < max(lengths) + 9, "one more example does not fit"
    for item in items:
        *examples, question = item.prompt.splitlines()
        assert examples and all(not line.startswith(question) for line in examples)
    with pytest.raises(InputError, match="tokens"):
        shape_items(replace(shape, prompt=2), policy.tokenizer)


def test_flops_of_a_batch_by_hand():
    packed = plain_batch(TINY, rows=2, length=5)
    # a layer: q, o 4 x 4 and k, v 4 x 2, three of 4 x 8; the head 4 x 16
    layer = 2 * 16 + 2 * 8 + 3 * 32
    assert sum(k * n * t for (k, n), t in layer_products(TINY).items()) == layer
    nodes = packed.stats["tokens_packed"]
    assert nodes <= 1 + 2 * 3, "one shared first token, and the last tokens are only targets"
    assert predicting_nodes(packed) == nodes
    assert update_flops(TINY, packed) == pytest.approx(6 * nodes * (2 * layer + 64))


def test_unknown_shapes_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--shapes", "huge"])
    assert "main_job" in capsys.readouterr().err
