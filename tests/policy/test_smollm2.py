from __future__ import annotations

import hashlib
import json
import threading
import time
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import write_gguf

from evojax.errors import UnavailableError
from evojax.policy import decoder, smollm2
from evojax.policy.decoder import ModelConfig, init_params
from evojax.policy.fetch import Wheel
from evojax.policy.hf import load_hf
from evojax.policy.tokenizer import HFTokenizer

CFG = ModelConfig(6, 8, 32, 2, 2, 1, 4, 100.0, 1e-5, 64)


def test_conversion_restores_weights_shape_and_tokenizer(tmp_path):
    params = init_params(CFG, 4)
    write_gguf(tmp_path / "m.gguf", CFG, params)
    smollm2.convert(tmp_path / "m.gguf", tmp_path / "out")
    cfg, loaded = load_hf(tmp_path / "out")
    assert cfg == CFG
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    tokenizer = HFTokenizer.load(tmp_path / "out")
    assert tokenizer.encode("<|start|>1a2").tolist() == [1, 2, 4, 3]  # digits stand alone
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) == ((0,), 1, 0)
    assert tokenizer.chat([{"role": "user", "content": "a"}]).tolist() == [4]


@pytest.fixture
def toy(tmp_path, monkeypatch) -> list[Path]:
    """A stand-in wheel given by hand, and a conversion that takes a moment; counts its calls."""
    file = tmp_path / "toy.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(smollm2._MEMBER, "weights")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "WHEEL", Wheel("toy", "1", "toy.whl", 1, digest))
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, str(file))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[Path] = []

    def slow_convert(source: Path, directory: Path) -> None:
        calls.append(directory)
        directory.mkdir()
        time.sleep(0.2)
        (directory / "model.safetensors").write_text(source.read_text())

    monkeypatch.setattr(smollm2, "convert", slow_convert)
    return calls


def test_two_at_once_convert_once_and_later_calls_never(toy):
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(smollm2.smollm2_directory())) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == smollm2.smollm2_directory()
    assert len(toy) == 1
    left = sorted(p.name for p in found[0].parent.iterdir() if not p.name.endswith(".lock"))
    assert left == [found[0].name]


def test_a_damaged_copy_is_made_anew(toy):
    directory = smollm2.smollm2_directory()
    (directory / "model.safetensors").write_text("cut")
    assert (smollm2.smollm2_directory() / "model.safetensors").read_text() == "weights"
    manifest = directory / "evojax.json"
    manifest.write_text(json.dumps({"wheel_sha256": "old", "sizes": {}}))
    smollm2.smollm2_directory()
    assert len(toy) == 3


def test_a_failed_conversion_leaves_nothing_that_looks_like_a_model(toy, monkeypatch):
    def broken(source: Path, directory: Path) -> None:
        directory.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "convert", broken)
    with pytest.raises(UnavailableError, match="No space left"):
        smollm2.smollm2_directory()
    assert [p.suffix for p in smollm2.cache_root().iterdir()] in ([], [".lock"])


def test_a_wrong_wheel_given_by_hand_is_refused(toy, tmp_path, monkeypatch):
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, str(tmp_path / "absent.whl"))
    with pytest.raises(UnavailableError, match=f"set {smollm2.WHEEL_VARIABLE}"):
        smollm2.smollm2_directory()
    assert toy == []


def _ours(directory: Path, ids: np.ndarray) -> np.ndarray:
    cfg, params = load_hf(directory)

    @jax.jit
    def run(params, tokens):
        size = tokens.shape[1]
        mask = jnp.tril(jnp.ones((1, size, size), bool))
        hidden = decoder.hidden_states(params, cfg, tokens, jnp.arange(size)[None], mask)
        return decoder.lm_logits(params, cfg, hidden)[0]

    return np.asarray(run(params, ids[None]))


def test_smollm2_matches_the_golden_logits_on_a_long_mixed_text():
    from torch_reference import GOLDEN, TEXT

    directory = smollm2.smollm2_directory()
    golden = np.load(GOLDEN)
    tokenizer = HFTokenizer.load(directory)
    ids = tokenizer.encode(TEXT)
    np.testing.assert_array_equal(ids, golden["ids"])
    assert tokenizer.decode(ids) == TEXT
    logits = _ours(directory, ids)
    assert np.abs(logits[:, golden["chosen"]] - golden["logits"]).max() < 1e-3
    np.testing.assert_array_equal(logits.argmax(-1), golden["best"])


@pytest.mark.slow
def test_smollm2_matches_transformers_over_the_whole_vocabulary():
    pytest.importorskip("torch")
    from torch_reference import reference_ids, reference_logits

    directory = smollm2.smollm2_directory()
    ids = reference_ids(directory)
    assert np.abs(_ours(directory, ids) - reference_logits(directory, ids)).max() < 1e-3
