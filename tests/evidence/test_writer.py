from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest
from evidence_fixtures import make_trajectory

from evojax.errors import UnavailableError
from evojax.evidence.reader import load
from evojax.evidence.writer import EvidenceWriter


def _writer(tmp_path):
    return EvidenceWriter(tmp_path / "evidence", "run-a", "v001")


def test_one_row_holds_prompt_and_completion(tmp_path):
    writer = _writer(tmp_path)
    writer.rollouts([make_trajectory(step=5, group=2, sample=3)], "train", refill_round=1)
    writer.flush("000005")
    (row,) = load(tmp_path).rollouts("train").to_pylist()
    assert row["token_ids"] == [3, 9, 4, 7, 0]
    assert row["loss_mask"] == [0, 0, 0, 1, 1]
    assert row["rollout_logprobs"] == [-0.5, -0.25] and row["entropies"] == [1.0, 0.5]
    assert (row["prompt_tokens"], row["response_tokens"]) == (3, 2)
    assert (row["step"], row["group"], row["sample"], row["refill_round"]) == (5, 2, 3, 1)
    assert (row["run"], row["version"], row["policy_version"]) == ("run-a", "v001", "v001@0")
    assert row["seed"] == 2**63 + 5
    assert dict(row["components"]) == {"correct": 1.0, "format": 1.0}
    assert dict(row["features"]) == {"chars": 2.0}
    assert (row["prompt"], row["text"], row["answer"]) == ("3 + 4 =", " 7", "7")
    (turn,) = load(tmp_path).turns().to_pylist()
    assert (turn["role"], turn["turn"], turn["mean_logprob"]) == ("policy", 0, -0.375)


def test_unscorable_reward_is_null_not_zero(tmp_path):
    writer = _writer(tmp_path)
    lost = make_trajectory(
        status="unscorable", reward=float("nan"), components={"correct": float("nan")}
    )
    writer.rollouts([lost], "eval")
    writer.flush("eval")
    (row,) = load(tmp_path).rollouts("eval").to_pylist()
    assert row["reward"] is None
    assert dict(row["components"]) == {"correct": None}


@pytest.mark.parametrize(
    ("stop", "reason", "truncated"),
    [(("\n",), "length", True), (("\n",), "stop", False), ((), "length", False)],
)
def test_truncated_needs_a_stop_rule(tmp_path, stop, reason, truncated):
    writer = _writer(tmp_path)
    writer.rollouts([make_trajectory(stop=stop, reason=reason)], "train")
    writer.flush("p")
    (row,) = load(tmp_path).rollouts().to_pylist()
    assert row["truncated"] is truncated and row["stop_reason"] == reason


def test_a_part_written_again_replaces_its_rows_byte_for_byte(tmp_path):
    def write():
        writer = _writer(tmp_path)
        writer.rollouts([make_trajectory(sample=i) for i in range(4)], "train")
        writer.update({"step": 0, "skipped": False, "loss": np.float32(0.5)})
        writer.flush("000000")
        return {p.name: p.read_bytes() for p in (tmp_path / "evidence").iterdir()}

    first = write()
    assert write() == first
    assert sorted(first) == [
        "rollouts-000000.parquet",
        "turns-000000.parquet",
        "updates-000000.parquet",
    ]
    assert load(tmp_path).rollouts().num_rows == 4


def test_a_part_that_lost_a_table_removes_its_old_file(tmp_path):
    writer = _writer(tmp_path)
    writer.update({"step": 0, "skipped": False})
    writer.flush("p")
    writer.rollouts([make_trajectory()], "train")
    writer.flush("p")
    assert load(tmp_path).updates().num_rows == 0


def test_update_row_nan_is_null_and_unknown_keys_are_refused(tmp_path):
    writer = _writer(tmp_path)
    with pytest.raises(ValueError, match=r"unknown keys \['los'\], missing keys \['skipped'\]"):
        writer.update({"step": 0, "los": 1.0})
    writer.update({"step": 1, "skipped": True, "grad_norm": float("nan")})
    writer.flush("p")
    (row,) = load(tmp_path).updates().to_pylist()
    assert row["grad_norm"] is None and row["skipped"] is True and row["loss"] is None


def test_update_counters_may_arrive_as_whole_floats(tmp_path):
    writer = _writer(tmp_path)
    counters = {"nonfinite_consecutive": 2.0, "no_signal": 0.0, "tokens": 96.0}
    writer.update({"step": 0, "skipped": True} | counters)
    writer.flush("p")
    (row,) = load(tmp_path).updates().to_pylist()
    assert {name: row[name] for name in counters} == counters


def test_lengths_that_differ_are_refused(tmp_path):
    good = make_trajectory()
    bad = dataclasses.replace(good.completion, logprobs=np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="equally long"):
        _writer(tmp_path).rollouts([dataclasses.replace(good, completion=bad)], "train")


def test_half_a_surrogate_pair_does_not_stop_the_run(tmp_path):
    writer = _writer(tmp_path)
    writer.rollouts([make_trajectory(text="a\ud83db")], "train")
    writer.flush("p")
    assert load(tmp_path).rollouts().to_pylist()[0]["text"] == "a?b"


@pytest.mark.parametrize("part", ["", "../x", "a/b", ".hidden", "a b"])
def test_part_names_stay_inside_the_directory(tmp_path, part):
    with pytest.raises(ValueError, match="part name"):
        _writer(tmp_path).flush(part)


def test_full_disk_keeps_rows_and_leaves_no_half_file(tmp_path, monkeypatch):
    writer = _writer(tmp_path)
    writer.rollouts([make_trajectory()], "train")
    real = pq.write_table

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(UnavailableError, match="No space left on device"):
        writer.flush("p")
    assert list((tmp_path / "evidence").iterdir()) == []
    monkeypatch.setattr(pq, "write_table", real)
    writer.flush("p")
    assert load(tmp_path).rollouts().num_rows == 1
