"""What a probe left behind, mark by mark, and the first mark in which another run differs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from evojax.errors import EvojaxError


class Differs(Exception):
    """The run has left the trail that it is compared with; the argument names the mark."""


def digest(value: Any) -> str:
    """A fingerprint of arrays, plain data, and nestings of both: equal values, equal text.

    >>> digest({"a": np.zeros(2)}) == digest({"a": np.zeros(2)})
    True
    >>> digest(np.zeros(2)) == digest(np.zeros(3)) or digest(1.0) == digest(1)
    False
    """
    total = hashlib.sha256()
    for part in _parts(value):
        total.update(part)
    return total.hexdigest()


def _parts(value: Any) -> Iterable[bytes]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield repr(key).encode()
            yield from _parts(inner)
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}".encode()
        for inner in value:
            yield from _parts(inner)
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes()
    else:
        yield repr(value).encode()


class Trail:
    """Marks of one run, recorded, or compared one by one with those of an earlier run.

    Args:
        before: the other run's trail; None records. ignore: names of marks that do not count.
    """

    def __init__(self, before: Trail | None = None, ignore: frozenset[str] = frozenset()):
        self.marks: list[tuple[str, str]] = []
        self.refusal: EvojaxError | None = None
        self._ignore = ignore
        self._before: list[tuple[str, str]] | None = None
        if before is not None:  # a last mark stands for the end, so that there always is another
            self._before = [m for m in before.marks if m[0] not in ignore] + [("nothing", "")]

    def mark(self, name: str, value: Any) -> None:
        """Put down a fingerprint of ``value``.

        Raises:
            Differs: the other run left another mark here, so that there is no need to go on.
        """
        if name in self._ignore:
            return
        self.marks.append((name, digest(value)))
        at = len(self.marks) - 1
        if self._before is None or self.marks[at : at + 1] == self._before[at : at + 1]:
            return
        here = [other for other, _ in self._before[at : at + 1]]
        raise Differs(name if here == [name] else f"{name}, where there was {here[0]}")

    def walk(self, probe: Callable[[Trail], None]) -> str | None:
        """Run ``probe``; returns the name of the first mark that differs, None without one.

        A refusal (of a setting, of a run that cannot go on) is a mark like any other.
        """
        try:
            try:
                probe(self)
            except EvojaxError as error:
                self.refusal = error
                self.mark(f"refusal: {type(error).__name__}", str(error))
            self.mark("end", None)
        except Differs as found:
            return str(found)
        return None
