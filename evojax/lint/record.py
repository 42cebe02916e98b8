"""A configuration that remembers which of its keys were read."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def recorded(conf: T, seen: set[str], prefix: str = "") -> T:
    """A copy of ``conf``, equal in type and values, that adds each key to ``seen`` when it is read.

    Args:
        conf: a dataclass instance, sections included. seen: dotted keys. prefix: of its own key.

    >>> from evojax.config import EvojaxConf
    >>> seen: set[str] = set()
    >>> recorded(EvojaxConf(experiment="t"), seen).algorithm.lr
    1e-05
    >>> sorted(seen)
    ['algorithm', 'algorithm.lr']
    """

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("_") and name in object.__getattribute__(self, "__dict__"):
            seen.add(prefix + name)
        return value

    kind: Any = type(type(conf).__name__, (type(conf),), {"__getattribute__": read})
    copy = object.__new__(kind)
    for name, value in vars(conf).items():
        section = dataclasses.is_dataclass(value) and not isinstance(value, type)
        inner = recorded(value, seen, f"{prefix}{name}.") if section else value
        object.__setattr__(copy, name, inner)
    return copy
