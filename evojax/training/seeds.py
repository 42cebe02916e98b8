"""All randomness flows from one root seed through named streams.

A seed depends on *what* is drawn (stream name, step, slot), never on how many draws came before,
so that arms of one round see the same items and noise, and a resumed run repeats the draws.
"""

from __future__ import annotations

import hashlib

import numpy as np


def _words(part: int | str) -> list[int]:
    digest = hashlib.sha256(f"{type(part).__name__}:{part}".encode()).digest()
    return list(np.frombuffer(digest[:8], dtype=np.uint32))


def derive(*parts: int | str) -> int:
    """A 31-bit seed from a path of names and numbers.

    >>> derive(0, "sampling", 3, 1) == derive(0, "sampling", 3, 1)
    True
    >>> derive(0, "sampling", 3, 1) == derive(0, "sampling", 3, 2)
    False
    """
    words = [word for part in parts for word in _words(part)]
    return int(np.random.SeedSequence(words).generate_state(1)[0] & 0x7FFFFFFF)


def stream(*parts: int | str) -> np.random.Generator:
    """A NumPy generator for the stream named by ``parts``."""
    return np.random.default_rng(derive(*parts))
