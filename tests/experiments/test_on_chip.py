"""The prepared accelerator script: it runs from end to end, and refuses to pretend."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.throughput import on_chip


def test_a_rehearsal_measures_everything_and_says_what_it_is(tmp_path: Path, capsys):
    out = tmp_path / "on_chip.jsonl"
    words = ["--hardware", "local", "--rehearse", "--repeats", "1", "--out", str(out)]
    assert on_chip.main(words) == 0
    row = json.loads(capsys.readouterr().out)
    assert row == json.loads(out.read_text())
    assert row["rehearsal"] is True and row["device"] == "cpu"
    assert set(row["difference_from_cpu"].values()) == {0.0}
    assert row["update"]["mfu"] > 0 and row["update"]["n"] == 1
    assert [one["batch"] for one in row["decode"]] == [2]


def test_without_an_accelerator_nothing_is_measured(capsys):
    assert on_chip.main(["--hardware", "h200_1"]) == 3
    assert "no accelerator" in capsys.readouterr().err


def test_the_timed_model_is_of_the_stated_shape():
    conf, case = on_chip.planned("h200_1", rehearse=False)
    assert conf.policy.repo == "Qwen/Qwen3-0.6B" and case.mesh == (1, 1, 1)
    assert abs(on_chip.num_params(case.model) / 0.596e9 - 1) < 0.01
