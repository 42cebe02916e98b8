"""The loop with adapters: begun from a GGUF file, stopped and resumed, exported for PEFT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from evojax.cli import main
from evojax.config import LoraConf
from evojax.policy.decoder import ModelConfig, init_params
from evojax.policy.gguf_in import load_gguf
from evojax.policy.hf import load_hf
from evojax.policy.lora import merge, scale_of
from evojax.policy.peft import load_peft
from evojax.training.interrupt import InterruptGuard

sys.path.insert(0, str(Path(__file__).parents[1] / "policy"))
from gguf_files import symbol_vocabulary, write_gguf  # noqa: E402  # pyright: ignore[reportMissingImports]

LORA = LoraConf(rank=2, alpha=8.0, targets=["q", "down"])
CFG = ModelConfig(17, 32, 64, 2, 4, 2, 8, 10000.0, 1e-5, 64)
BUDGET = ["train.steps=6", "train.candidate_steps=3", "train.checkpoint_every=2"]
BUDGET += ["train.prompts_per_step=4", "evolution.gate.resamples=200", "evolution.candidates=1"]
OPTIONS = ["policy=local", "policy.lora.rank=2", "policy.lora.alpha=8", "algorithm.lr=0.02"]
OPTIONS += ["policy.lora.targets=[q,down]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(file, CFG, init_params(CFG, 3), pre="qwen2", vocabulary=symbol_vocabulary)
    return file


def run(root: Path, model: Path, *more: str) -> Path:
    command = ["+experiment=math_tiny", f"output_root={root}", f"policy.path={model}"]
    main([*command, *OPTIONS, *BUDGET, *more])
    (found,) = (root / "math_tiny").iterdir()
    return found


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("straight"), model)


def test_each_version_is_the_base_and_its_adapters(finished: Path, model: Path) -> None:
    _, base, _ = load_gguf(model)
    summary = json.loads((finished / "summary.json").read_text())
    names = [v["version"] for v in summary["versions"] if v["role"] != "base"]
    assert names == ["v001", "r1-control", "v002"]
    seen = []
    for name in names:
        folder = finished / "versions" / name
        cfg, stored = load_hf(folder / "policy")
        assert cfg == CFG
        adapters = load_peft(folder / "adapter", CFG, base, LORA)
        seen.append(np.asarray(adapters["layers"]["q"]["b"]))
        assert np.abs(seen[-1]).max() > 0
        merged = merge(base, adapters, scale_of(LORA))
        jax.tree.map(np.testing.assert_array_equal, stored, merged)
        settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(model)
        assert not (folder / "checkpoint").exists()
    assert not np.array_equal(seen[0], seen[1])


def test_a_stopped_run_goes_on_to_the_same_adapters(
    finished: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = iter([False] * 3 + [True] + [False] * 1000)
    real = InterruptGuard.check

    def check(guard: InterruptGuard) -> None:
        if next(stop):
            guard.requested = True
        real(guard)

    monkeypatch.setattr(InterruptGuard, "check", check)
    half = run(tmp_path, model, "mode=train")
    assert not (half / "versions" / "v001" / "result.json").exists()
    assert main([f"resume={half}", "mode=train"]) == 0
    file = Path("versions/v001/adapter/adapter_model.safetensors")
    assert (half / file).read_bytes() == (finished / file).read_bytes()
