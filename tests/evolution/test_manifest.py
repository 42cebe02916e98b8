from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from evojax.config import EvojaxConf
from evojax.errors import InputError
from evojax.evolution.manifest import changed, read_manifest, stored_config, write_manifest
from evojax.evolution.workshop import config_hash


def config(**keys):
    cfg = OmegaConf.structured(EvojaxConf)
    cfg.experiment = "x"
    for key, value in keys.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return cfg


def test_round_trip_and_what_counts_as_a_change(tmp_path: Path) -> None:
    write_manifest(tmp_path, config(), ["seed=0"], "tiny", {"items": 3})
    manifest = read_manifest(tmp_path)
    assert manifest["policy"] == "tiny" and manifest["data"] == {"items": 3}
    assert manifest["device"]["platform"] == "cpu"
    assert changed(manifest, config(mode="report", live=False, version="v001")) == {}
    assert changed(manifest, config(algorithm__lr=1.0)) == {"algorithm.lr": (1e-5, 1.0)}
    stored = stored_config(manifest, config(mode="report", seed=9))
    assert (stored.mode, stored.seed) == ("report", 0)


def test_hash_ignores_where_and_how_but_nothing_else() -> None:
    assert config_hash(config()) == config_hash(config(mode="train", output_root="/x", live=False))
    assert config_hash(config()) != config_hash(config(seed=1))
    assert config_hash(config()) != config_hash(config(filter__refill_rounds=1))


def test_missing_and_damaged_manifests_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run.json"):
        read_manifest(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": 1')
    with pytest.raises(InputError, match="damaged"):
        read_manifest(tmp_path)
