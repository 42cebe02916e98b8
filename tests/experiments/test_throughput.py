from __future__ import annotations

import ast
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from evojax.bench.shapes import SHAPES, tiny
from evojax.config import PolicyConf
from evojax.policy.hf import save_hf
from evojax.policy.load import load_policy
from experiments.study import replace_block
from experiments.throughput import ours, peer, peer_env, run
from experiments.throughput.job import make_job
from experiments.throughput.table import markdown, row_of, summarise, write


@pytest.fixture(scope="module")
def policy():
    return load_policy(PolicyConf(source="random"), 0)


def job_for(policy, name: str, model: Path, **changed) -> dict:
    settings = {"dtype": "f32", "reward": "live", "steps": 3, "micro": 2} | changed
    return make_job(model, policy.tokenizer, tiny(SHAPES[name]), **settings)


def test_a_job_names_the_items_in_order(policy, tmp_path):
    job = job_for(policy, "medium", tmp_path)
    assert len(job["items"]) == 3 * 4 and len(job["prompt_tokens"]) == 12
    assert max(job["prompt_tokens"]) <= job["prompt"]
    assert job["items_sha256"] == job_for(policy, "medium", tmp_path, dtype="bf16")["items_sha256"]
    assert policy.tokenizer.eos_id in job["stop_ids"]
    assert json.loads(json.dumps(job)) == {**job, "tasks": list(job["tasks"])}


@pytest.mark.parametrize("name", ["main_job", "medium"])
def test_our_side_goes_through_the_trainer(policy, tmp_path, capsys, name):
    save_hf(tmp_path / "model", policy.cfg, policy.params, policy.tokenizer)
    job = job_for(policy, name, tmp_path / "model")
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    ours.main(path)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    row = row_of(lines, job)
    assert row["n"] == 2 and row["live_share"] == 1.0
    assert row["step_s"] == pytest.approx(row["step_s_all"][0], abs=1.0)
    if job["forced"]:
        assert row["response_tokens"] == 4 * 4 * job["new"]
    assert 0 < row["update_to_matmul"] < 10 and row["peak_rss_gb"] > 0
    assert 0 <= row["padding_share"] < 1 and row["shared_share"] > 0


def test_our_side_refuses_other_items(policy, tmp_path):
    save_hf(tmp_path / "model", policy.cfg, policy.params, policy.tokenizer)
    job = job_for(policy, "main_job", tmp_path / "model", steps=1)
    job["items"][0]["prompt"] = "00="
    (tmp_path / "job.json").write_text(json.dumps(job))
    with pytest.raises(RuntimeError, match="other items"):
        ours.main(tmp_path / "job.json")


def test_the_peer_never_imports_evojax():
    names = set()
    for node in ast.walk(ast.parse(Path(peer.__file__).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    assert not any(name.startswith(("evojax", "experiments")) for name in names)
    assert "torch" not in sys.modules or "transformers" in sys.modules


def test_the_peer_has_the_recipe_of_our_side(policy, tmp_path):
    job = job_for(policy, "long", tmp_path, micro=8, dtype="bf16")
    found = peer.settings(job)
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 16
    assert found["num_generations"] == 4 and found["bf16"] and not found["gradient_checkpointing"]
    assert found["generation_kwargs"] == {"min_new_tokens": job["new"]}
    assert (found["epsilon"], found["epsilon_high"], found["beta"]) == (0.2, 0.28, 0.0)
    assert found["learning_rate"] == 1e-5
    with pytest.raises(ValueError, match="micro 5"):
        peer.settings(job | {"micro": 5})


def test_rewards_of_the_peer():
    assert peer.live_share(peer.alternating(8, 64), 8) == 1.0
    assert peer.exact(["7", " 7 \nx", "07", ""], ["7"] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_pins_are_read():
    assert peer_env.requirements()["torch"] == "2.13.0"
    assert set(peer_env.requirements()) >= {"trl", "transformers", "datasets"}


def options(**changed) -> Namespace:
    chosen = vars(run.parser().parse_args([])) | changed
    return Namespace(**chosen)


def test_sides_alternate_and_take_turns_in_being_first():
    wanted = list(run.order(options(shapes=["main_job"], rewards=["live"], repeats=2)))
    sides = [(w["repeat"], w["side"], w["dtype"]) for w in wanted]
    assert sides == [
        (0, "evojax", "f32"),
        (0, "trl", "f32"),
        (0, "evojax", "bf16"),
        (0, "trl", "bf16"),
        (1, "trl", "bf16"),
        (1, "evojax", "bf16"),
        (1, "trl", "f32"),
        (1, "evojax", "f32"),
    ]
    only = list(run.order(options(ours_only=True, repeats=1)))
    assert {w["side"] for w in only} == {"evojax"}
    assert [w["shape"] for w in only if w["reward"] == "natural"] == ["main_job"] * 2
    assert {w["side"] for w in run.order(options(peer_only=True))} == {"trl"}


def test_the_fastest_micro_size_of_the_tuning_is_used():
    want = {"side": "trl", "shape": "long", "dtype": "f32"}
    rows = [
        {"kind": "tuning", **want, "micro": 8, "step_s": 3.0},
        {"kind": "tuning", **want, "micro": 16, "step_s": 2.0},
        {"kind": "run", **want, "micro": 32, "step_s": 1.0},
    ]
    assert run.best_micro(rows, want, None) == 16
    assert run.best_micro([], want, None) == run.PEER_MICRO["long"]
    assert run.best_micro(rows, want | {"side": "evojax"}, 4) == 4
    tuned = list(run.tuning(options(shapes=["long"], dtypes=["f32"])))
    assert [w["micro"] for w in tuned] == [8, 16, 32], "no more than the sequences of a step"


def lines_of(seconds: list[float], live: float = 1.0) -> list[dict]:
    steps = [
        {"step": i, "step_s": s, "rollout_s": s / 4, "update_s": s / 2, "live_share": live,
         "natural_live_share": 0.5, "response_tokens": 100}
        for i, s in enumerate(seconds)
    ]  # fmt: skip
    return [*steps, {"peak_rss_gb": 2.0, "versions": {}}]


JOB = {"steps": 4, "warmup": 1, "reward": "live", "prompt_tokens": [10, 20], "items_sha256": "x"}


def test_the_warm_up_is_not_counted():
    row = row_of(lines_of([100.0, 1.0, 2.0, 3.0]), JOB)
    assert (row["n"], row["step_s"], row["step_s_iqr"]) == (3, 2.0, 1.0)
    assert row["prompt_tokens"] == 15.0 and "update_to_matmul" not in row


def test_dead_groups_and_missing_steps_are_refused():
    with pytest.raises(ValueError, match="dead"):
        row_of(lines_of([1.0] * 4, live=0.75), JOB)
    with pytest.raises(ValueError, match="4 steps"):
        row_of(lines_of([1.0] * 3), JOB)


def rows_for(side: str, dtype: str, seconds: list[float], **more) -> list[dict]:
    return [
        {
            "kind": "run", "side": side, "dtype": dtype, "shape": "main_job", "reward": "live",
            "repeat": i, "micro": 8, "items_sha256": "x", **row_of(lines_of([9.0] + [s] * 3), JOB),
            **more,
        }
        for i, s in enumerate(seconds)
    ]  # fmt: skip


def test_ratios_with_n_and_range_by_hand(tmp_path):
    rows = rows_for("evojax", "f32", [1.0, 2.0, 4.0]) + rows_for("trl", "f32", [4.0, 4.0, 4.0])
    rows += rows_for("trl", "bf16", [3.0], items_sha256="other items")
    (entry,) = summarise(rows)
    assert entry["ratio"] == 2.0 and entry["ratio_range"] == [1.0, 4.0]
    assert (entry["repeats"], entry["steps_each"]) == (3, 3)
    assert (entry["dtype"], entry["peer_dtype"]) == ("f32", "f32")
    assert entry["evojax"]["step_s_range"] == [1.0, 4.0]
    assert "| 2.00 [1.00, 4.00] | 3 x 3 |" in markdown([entry])
    rows += rows_for("evojax", "bf16", [0.5])
    assert [(e["dtype"], e["ratio"]) for e in summarise(rows)] == [("f32", 2.0), ("bf16", 8.0)]
    readme, front = tmp_path / "README.md", tmp_path / "front.md"
    readme.write_text("above\n<!-- table: begin -->\nold\n<!-- table: end -->\nbelow\n")
    front.write_text("<!-- speed: begin -->\n<!-- speed: end -->\n")
    write(rows, tmp_path, front)
    assert "| 2.00 [1.00, 4.00] | 3 x 3 |" in front.read_text()
    text = readme.read_text()
    assert "old" not in text and text.startswith("above") and text.endswith("below\n")
    assert json.loads((tmp_path / "summary.json").read_text())[0]["ratio"] == 2.0
    with pytest.raises(ValueError, match="no block"):
        readme.write_text("nothing")
        replace_block(readme, "x")
