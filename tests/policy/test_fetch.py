from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from evojax.errors import UnavailableError
from evojax.policy.fetch import Wheel, cache_root, check_wheel, download, require_space

NAME = "evojax_toy-1.0-py3-none-any.whl"


def toy_wheel(directory: Path) -> Wheel:
    file = directory / NAME
    info = "evojax_toy-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("evojax_toy/data.txt", "hello")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: evojax-toy\nVersion: 1.0\n"
        )
        wheel = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return Wheel("evojax-toy", "1.0", NAME, len(content), digest)


@pytest.fixture
def offline(monkeypatch, tmp_path) -> Path:
    """pip sees one local folder and no index at all."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return shelf


def test_download_goes_through_the_users_pip_settings(offline, tmp_path, capsys):
    wheel = toy_wheel(offline)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    file = download(wheel, scratch, "remedy")
    assert file.read_bytes() == (offline / NAME).read_bytes()
    assert "Fetching evojax-toy 1.0 (0 MB)" in capsys.readouterr().err


def test_a_failed_download_says_what_pip_said_and_what_to_do(offline, tmp_path):
    wheel = Wheel("evojax-toy", "1.0", NAME, 1, "00")
    with pytest.raises(UnavailableError, match="pip exit code 1") as caught:
        download(wheel, tmp_path, "place it by hand")
    assert "No matching distribution" in str(caught.value)
    assert "Remedy: place it by hand" in str(caught.value)


def test_a_download_that_takes_too_long_is_ended(offline, tmp_path):
    wheel = toy_wheel(offline)
    with pytest.raises(UnavailableError, match="no end after 0 s"):
        download(wheel, tmp_path, "remedy", timeout_s=0.0)


def test_another_file_under_the_right_name_is_refused(tmp_path):
    wheel = toy_wheel(tmp_path)
    check_wheel(tmp_path / NAME, wheel, "remedy")
    (tmp_path / NAME).write_bytes(b"something else")
    with pytest.raises(UnavailableError, match="sha256"):
        check_wheel(tmp_path / NAME, wheel, "remedy")
    with pytest.raises(UnavailableError, match="no such file"):
        check_wheel(tmp_path / "absent.whl", wheel, "remedy")


def test_space_and_cache_directory(tmp_path, monkeypatch):
    require_space(tmp_path, 1)
    with pytest.raises(UnavailableError, match="MB are needed"):
        require_space(tmp_path, 10**18)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "evojax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == Path.home() / ".cache" / "evojax"
