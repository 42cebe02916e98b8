"""A small configuration tree of the real form."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from evojax.evolution.config_edit import compose_conf

FILES = {
    "config.yaml": """\
# root
defaults:
  - evojax_schema
  - data: uniform
  - sampling: default
  - reward: correct
  - filter: none
  - algorithm: grpo
  - eval: default
  - _self_

seed: 0  # every random stream
""",
    "experiment/math.yaml": """\
# @package _global_
# the main job
defaults:
  - override /data: uniform
  - _self_

experiment: math
algorithm:
  lr: 1.0e-5  # tuned
train:
  steps: 24
""",
    "data/uniform.yaml": "# every item alike\nselection: uniform\n",
    "data/difficulty.yaml": "selection: difficulty\ntarget_rate: 0.5\n",
    "sampling/default.yaml": "temperature: 1.0  # > 0\ngroup_size: 8\nmax_new_tokens: 6\n",
    "reward/correct.yaml": "components:\n  correct: 1.0\n",
    "filter/none.yaml": "# nothing is dropped\nrefill_rounds: 0\n# about cut answers\n"
    "trajectory: []\n",
    "filter/dynamic.yaml": "refill_rounds: 2\n",
    "algorithm/grpo.yaml": "lr: 1.0e-4\nepochs: 1\neps_high: 0.28\n",
    "eval/default.yaml": "samples: 8\n",
}


def write_tree(top: Path) -> Path:
    """Write the tree below ``top``."""
    for name, text in FILES.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return top


@pytest.fixture
def conf_dir(tmp_path: Path) -> Path:
    """The tree, freshly written, to be changed."""
    return write_tree(tmp_path / "conf")


@pytest.fixture(scope="session")
def shared_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree, written once, to be read."""
    return write_tree(tmp_path_factory.mktemp("shared") / "conf")


@pytest.fixture(scope="session")
def parent_cfg(shared_conf: Path) -> DictConfig:
    """The tree composed for its experiment, with the hydra node."""
    return compose_conf(shared_conf, ["+experiment=math"], with_hydra=True)
