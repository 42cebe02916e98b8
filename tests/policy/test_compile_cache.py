from __future__ import annotations

import os
import subprocess
import sys

import pytest

from evojax.errors import UnavailableError
from evojax.policy.compile_cache import enable_compile_cache

PROGRAM = """
import jax, jax.numpy as jnp
from evojax.policy.compile_cache import enable_compile_cache
print(enable_compile_cache() == enable_compile_cache())
jax.jit(lambda a: a @ a + 1)(jnp.ones((4, 4))).block_until_ready()
"""


def test_programs_are_kept_in_a_private_directory(tmp_path):
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    kept = tmp_path / "evojax" / "xla"
    assert any(kept.iterdir()) and kept.stat().st_mode & 0o077 == 0


def test_a_place_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "xla"))
    with pytest.raises(UnavailableError, match="XDG_CACHE_HOME"):
        enable_compile_cache()
