from __future__ import annotations

import numpy as np
import pytest

from evojax.config import ArchConf, PolicyConf
from evojax.errors import InputError
from evojax.policy.hf import save_hf
from evojax.policy.load import load_policy
from evojax.policy.tokenizer import CharTokenizer


def test_random_policy_follows_the_seed():
    conf = PolicyConf(source="random", arch=ArchConf(vocab_size=16))
    one, again, other = load_policy(conf, 1), load_policy(conf, 1), load_policy(conf, 2)
    np.testing.assert_array_equal(one.params["embed"], again.params["embed"])
    assert not np.array_equal(one.params["embed"], other.params["embed"])
    assert one.source_dir is None and one.label == "random-2x32"
    assert one.cfg.head_dim == 8 and one.tokenizer.vocab_size == one.cfg.vocab_size == 16


def test_path_policy_reads_weights_and_tokenizer(tmp_path):
    policy = load_policy(PolicyConf(source="random", arch=ArchConf(vocab_size=20)), 0)
    save_hf(tmp_path / "mine", policy.cfg, policy.params, policy.tokenizer)
    loaded = load_policy(PolicyConf(source="path", path=str(tmp_path / "mine")), 0)
    assert loaded.cfg == policy.cfg and loaded.label == "mine"
    np.testing.assert_array_equal(loaded.params["layers"]["q"], policy.params["layers"]["q"])
    assert loaded.tokenizer.encode("1+1=").tolist() == [1, 10, 1, 12]


def test_every_wrong_size_is_listed_at_once():
    arch = ArchConf(vocab_size=8, hidden_size=30, num_heads=4, num_kv_heads=3)
    with pytest.raises(InputError) as caught:
        load_policy(PolicyConf(source="random", arch=arch), 0)
    text = str(caught.value)
    assert "num_kv_heads 3" in text and "is odd" in text and "below the 16 symbols" in text
    assert {p.where for p in caught.value.problems} == {
        *("policy.arch.num_heads", "policy.arch.head_dim", "policy.arch.hidden_size"),
        "policy.arch.vocab_size",
    }


def test_unknown_source_missing_path_and_foreign_tokenizer(tmp_path):
    with pytest.raises(InputError, match="valid: smollm2_135m, path, hub, random"):
        load_policy(PolicyConf(source="hubs"), 0)
    with pytest.raises(InputError, match="needs a directory"):
        load_policy(PolicyConf(source="path"), 0)
    policy = load_policy(PolicyConf(source="random"), 0)
    small = load_policy(PolicyConf(source="random", arch=ArchConf(vocab_size=16)), 0)
    save_hf(tmp_path, small.cfg, small.params, policy.tokenizer)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"\\n": 15', '"\\n": 40'))
    with pytest.raises(InputError, match="the tokenizer has 41 ids, the model only 16"):
        load_policy(PolicyConf(source="path", path=str(tmp_path)), 0)
    assert CharTokenizer(16).vocab_size == 16


def test_products_are_computed_in_the_type_that_is_configured(tmp_path):
    conf = PolicyConf(source="random", compute_dtype="bfloat16")
    policy = load_policy(conf, 0)
    assert policy.cfg.compute_dtype == "bfloat16"
    save_hf(tmp_path, policy.cfg, policy.params, policy.tokenizer)
    for dtype in ("float32", "bfloat16"):
        stored = load_policy(PolicyConf("path", str(tmp_path), dtype), 0)
        assert stored.cfg.compute_dtype == dtype and stored.params["embed"].dtype == "float32"
