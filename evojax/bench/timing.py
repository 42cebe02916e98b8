"""A clock that leaves the first call out, and what machine its figures belong to."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

BUDGET_S = 20.0
_CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_min_compile_time_secs",
)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def note(text: str) -> None:
    """Progress, on stderr: stdout carries the JSON alone."""
    print(text, file=sys.stderr, flush=True)


def spread(seconds: list[float]) -> dict[str, Any]:
    """{n, median_s, iqr_s} of some seconds.

    >>> spread([3.0, 1.0, 2.0])
    {'n': 3, 'median_s': 2.0, 'iqr_s': 1.0}
    """
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return {"n": len(seconds), "median_s": float(middle), "iqr_s": float(high - low)}


def timed(run: Callable[[], Any], repeats: int, budget_s: float = BUDGET_S) -> dict[str, Any]:
    """Seconds of ``run`` as {n, median_s, iqr_s}; the first call (compilation) is left out.

    Something slow is repeated less often: no further run begins after ``budget_s`` seconds.

    >>> timed(lambda: None, 3)["n"]
    3
    """
    run()
    seconds: list[float] = []
    while len(seconds) < repeats and (not seconds or sum(seconds) < budget_s):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return spread(seconds)


@contextmanager
def empty_compile_cache() -> Iterator[None]:
    """An empty persistent compile cache; afterwards the one that was set before."""
    before = {name: jax.config.values[name] for name in _CACHE_SETTINGS}
    with TemporaryDirectory() as directory:
        _configure(dict(zip(_CACHE_SETTINGS, (directory, -1, 0), strict=True)))
        try:
            yield
        finally:
            _configure(before)


def _configure(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1m": os.getloadavg()[0],
        "devices": [d.device_kind for d in jax.devices()],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
    }
