"""Models of the hub, from a cache as its client keeps it; the network is never asked."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from family_shapes import SHAPES, family_params

from evojax.config import ArchConf, PolicyConf
from evojax.errors import InputError, UnavailableError
from evojax.policy import hub
from evojax.policy.conf import arch_shape
from evojax.policy.hf import save_hf
from evojax.policy.load import load_policy, policy_shape
from evojax.policy.tokenizer import CharTokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/small-qwen3"
SHAPE = SHAPES["qwen3"]
ARCH = ArchConf(
    family="qwen3",
    vocab_size=32,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=256,
)
CONF = PolicyConf(source="hub", repo=REPO, arch=ARCH)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a client that has no network."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def cached(cache: Path) -> Path:
    """The cache with one model in it."""
    place = cache / "models--someone--small-qwen3"
    save_hf(place / "snapshots" / COMMIT, SHAPE, family_params("qwen3"), CharTokenizer(32))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return place


def test_a_cached_model_is_loaded_without_a_network(cached: Path):
    policy = load_policy(dataclasses.replace(CONF, compute_dtype="bfloat16", remat="dots"), 0)
    assert policy.cfg == dataclasses.replace(SHAPE, compute_dtype="bfloat16", remat="dots")
    assert policy.label == "someone/small-qwen3 (01234567)"
    assert policy.source_dir == cached / "snapshots" / COMMIT
    np.testing.assert_array_equal(policy.params["embed"], family_params("qwen3")["embed"])
    pinned = load_policy(dataclasses.replace(CONF, revision=COMMIT), 0)
    assert pinned.label == policy.label


def test_a_model_of_another_shape_than_stated_is_refused_key_by_key(cached: Path):
    arch = dataclasses.replace(ARCH, num_layers=3, rope_theta=5e5)
    with pytest.raises(InputError) as caught:
        load_policy(dataclasses.replace(CONF, arch=arch), 0)
    assert {(p.where, p.value) for p in caught.value.problems} == {
        ("policy.arch.num_layers", 3),
        ("policy.arch.rope_theta", 5e5),
    }


def test_without_a_network_the_message_says_what_to_do(cache: Path):
    with pytest.raises(UnavailableError, match="cannot be fetched from the hub") as caught:
        load_policy(CONF, 0)
    assert "hf download someone/small-qwen3 --local-dir DIR" in str(caught.value)
    assert caught.value.exit_code == 3


def test_without_the_client_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnavailableError, match=r"pip install 'evojax-rl\[hub\]'"):
        load_policy(CONF, 0)


def test_what_the_hub_refuses_is_the_users_to_correct():
    from huggingface_hub import errors

    def blank(kind: type[Exception]) -> Exception:
        """Made without the answer of a server, which every version wants in another form."""
        return kind.__new__(kind)

    def raising(fault: Exception):
        def download(**_: object) -> str:
            raise fault

        return download

    with pytest.raises(InputError) as caught:
        hub._asked(raising(blank(errors.RepositoryNotFoundError)), REPO, None)
    assert caught.value.problems[0].where == "policy.repo"
    with pytest.raises(InputError) as caught:
        hub._asked(raising(blank(errors.RevisionNotFoundError)), REPO, "v9")
    assert caught.value.problems[0].where == "policy.revision"
    with pytest.raises(UnavailableError, match="TimeoutError: no details"):
        hub._asked(raising(TimeoutError()), REPO, None)


def test_a_repository_must_be_named():
    with pytest.raises(InputError, match="needs a repository"):
        load_policy(PolicyConf(source="hub", arch=ARCH), 0)


def test_the_shape_is_known_before_anything_is_fetched(tmp_path: Path):
    assert policy_shape(CONF) == SHAPE == arch_shape(CONF)
    assert policy_shape(PolicyConf()).num_layers == 30
    save_hf(tmp_path, SHAPE, family_params("qwen3"), CharTokenizer(32))
    local = PolicyConf(source="path", path=str(tmp_path), remat="full")
    assert policy_shape(local) == dataclasses.replace(SHAPE, remat="full")
    with pytest.raises(InputError, match="unknown policy source"):
        policy_shape(PolicyConf(source="elsewhere"))
    wrong = dataclasses.replace(ARCH, num_kv_heads=3)
    with pytest.raises(InputError, match="num_heads 4 is not a multiple of num_kv_heads 3"):
        policy_shape(PolicyConf(source="hub", repo=REPO, arch=wrong))
