"""Settings of every test: JAX on the CPU, strict about implicit broadcasting, compiling once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "evojax" / "jax-tests"
if not os.access(_CACHE.parent if _CACHE.parent.exists() else Path.home(), os.W_OK):
    _CACHE = Path(tempfile.gettempdir()) / "evojax-jax-tests"

# Read by JAX when it is first imported, in this process and in the programs that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

from hypothesis import settings  # noqa: E402

settings.register_profile("evojax", deadline=None)
settings.load_profile("evojax")
