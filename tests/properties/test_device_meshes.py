"""One update on meshes of 8 fake devices is that of one device, and moves nothing it need not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "device_script.py"
# The programs run once: compiling them well would cost more than it gains.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
FLAGS += "--xla_llvm_disable_expensive_passes=true"


def run(argument):
    env = os.environ | {"XLA_FLAGS": FLAGS}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(argument)], capture_output=True, text=True, env=env,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Involuntary full rematerialization" not in done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(tmp_path_factory.mktemp("state"))


def assert_equal_to_rounding(errors, times=1):
    """Gradients to 2e-6 of their largest element; Adam's first step makes signs of the small."""
    assert errors["gradient"] < 2e-6 * times and errors["weights"] < 2e-4 * times
    assert errors["metrics"]["loss"] < 1e-6 * times and len(errors["metrics"]) > 15
    assert max(errors["metrics"].values()) < 1e-5 * times


@pytest.mark.parametrize("mesh", ["8,1,1", "1,8,1", "1,1,8", "2,2,2", "4,1,2"])
def test_gradient_loss_and_weights_equal_those_of_one_device(found, mesh):
    assert_equal_to_rounding(found["equality"][mesh])


@pytest.mark.slow
def test_adapters_bfloat16_remat_and_hybrids_equal_those_of_one_device():
    for name, errors in run("traits").items():
        # The hybrid's memory multiplies the rounding of these large weights along the sequence.
        assert_equal_to_rounding(errors, 20 if name == "hybrid" else 1)


def test_no_collective_gathers_the_logits(found):
    """Vocabulary 48 over tp 2: nothing that is sent has all 48 logits of a token."""
    text = found["program"]["text"]
    lines = [line for line in text.splitlines() if re.search(r"= .*\b(all-|collective-)", line)]
    sent = [re.findall(r"[a-z]\w*\[([\d,]+)\]", line.split(" = ", 1)[1]) for line in lines]
    shapes = [tuple(map(int, s.split(","))) for line in sent for s in line]
    assert any("all-reduce" in line for line in lines) and shapes
    assert not [shape for shape in shapes if 48 in shape]


def test_the_state_is_donated_shard_by_shard(found):
    assert found["program"]["aliased"] >= found["program"]["state"] > 10_000


def test_case_K02_a_checkpoint_of_four_devices_goes_on_on_one_two_and_eight(found):
    for mesh, devices in (("1,1,1", 1), ("1,1,2", 2), ("1,2,4", 8)):
        restored = found["checkpoints"][mesh]
        assert restored["same"] and restored["devices"] == devices
        assert restored["loss"] == pytest.approx(found["checkpoints"]["loss"], abs=1e-5)
