"""The package as others install it: wheel, source archive, lock files, make targets."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent


def _setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def _locked(name: str) -> dict[str, str]:
    """Versions by package name; every entry must carry at least one hash."""
    entries = re.split(r"\n(?=[a-z0-9])", (ROOT / name).read_text())
    versions = {}
    for entry in entries:
        if match := re.match(r"([a-z0-9._-]+)==([^\s;]+)", entry):
            assert "--hash=sha256:" in entry, match[1]
            versions[match[1]] = match[2]
    return versions


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and a source archive made from a copy of the tracked and new files."""
    place = tmp_path_factory.mktemp("built")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    source = place / "source"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(source)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_setup_cfg_lists_every_package():
    listed = set(_setup_cfg()["options"]["packages"].split())
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("evojax/**/__init__.py")
    }
    assert listed == found | {"evojax.conf", "evojax.skills_library"}


def test_the_wheel_holds_every_file_of_the_three_trees(built: Path):
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith("evojax_rl-")
    names = set(zipfile.ZipFile(wheel).namelist())
    for tree, inside in [
        ("evojax", "evojax"),
        ("conf", "evojax/conf"),
        ("skills_library", "evojax/skills_library"),
    ]:
        for path in (built / "source" / tree).rglob("*"):
            if path.is_file() and "egg-info" not in str(path):
                name = f"{inside}/{path.relative_to(built / 'source' / tree).as_posix()}"
                assert name in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"evojax"}


def test_the_source_archive_holds_what_a_build_needs(built: Path):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {
        "conf/config.yaml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "setup.cfg",
        "requirements.lock",
        "tests/conftest.py",
    } <= names


def test_the_installed_wheel_composes_from_another_directory(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    site, away = tmp_path / "site", tmp_path / "away"
    away.mkdir()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--disable-pip-version-check",
            "--target",
            str(site),
            str(wheel),
        ],
        check=True,
        timeout=120,
    )
    shown = subprocess.run(
        [sys.executable, "-m", "evojax.main", "--cfg", "job", "+experiment=math"],
        cwd=away,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert OmegaConf.create(shown.stdout).experiment == "math"
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "from evojax.paths import conf_dir, skills_dir; print(conf_dir(), skills_dir())",
        ],
        cwd=away,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.split() == [str(site / "evojax/conf"), str(site / "evojax/skills_library")]


def test_lock_files_agree_and_hold_every_declared_dependency():
    runtime, dev = _locked("requirements.lock"), _locked("requirements-dev.lock")
    assert runtime.items() <= dev.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(lines: list[str]) -> set[str]:
        found = (re.match(r"[A-Za-z0-9._-]+", line) for line in lines)
        return {re.sub(r"[._-]+", "-", match[0]).lower() for match in found if match}

    extras = project["optional-dependencies"]
    assert names(project["dependencies"] + extras["build"]) <= set(runtime)
    assert names(extras["dev"]) <= set(dev)
    assert "torch" not in dev


def test_the_environment_is_the_locked_one():
    locked = _locked("requirements.lock")
    for name in ("jax", "flax", "optax", "hydra-core", "duckdb", "pyarrow", "tokenizers"):
        assert metadata.version(name) == locked[name]


def test_case_M16_one_antlr_runtime_serves_hydra_and_the_grader():
    assert _locked("requirements.lock")["antlr4-python3-runtime"] == "4.9.3"
    code = (
        "from hydra import compose, initialize_config_dir\n"
        "from evojax import cli, paths\n"
        "from math_verify import parse, verify\n"
        "with initialize_config_dir(str(paths.conf_dir()), version_base='1.3'):\n"
        "    assert compose('config', ['+experiment=math']).experiment == 'math'\n"
        "assert verify(parse(r'$\\boxed{\\frac12}$'), parse(r'$\\boxed{\\frac{1}{2}}$'))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_make_refuses_an_old_or_missing_python(tmp_path: Path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    arguments = ["make", "-C", str(ROOT), f"VENV={tmp_path}/venv", "setup"]
    for choice in (f"PYTHON={old}", "PYTHON="):
        done = subprocess.run(
            [*arguments, choice], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0 and "Python 3.11 or newer" in done.stdout
    assert not (tmp_path / "venv").exists()
