"""XLA programs kept on disk, so that a second start compiles nothing it compiled before."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from evojax.errors import UnavailableError
from evojax.policy.fetch import cache_root


def enable_compile_cache() -> Path:
    """Keep every compiled program under ``cache_root()/xla``; may be called again.

    A directory that the user chose (JAX_COMPILATION_CACHE_DIR) is left as it is. The directory is
    readable by its owner only, for what is in it gets executed.

    Returns:
        The directory in use.

    Raises:
        UnavailableError: the directory cannot be made.
    """
    directory = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_root() / "xla")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as fault:
        raise UnavailableError(
            f"the compile cache {directory} cannot be made ({fault}). "
            "Remedy: make it writable, or point XDG_CACHE_HOME elsewhere"
        ) from fault
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return directory
