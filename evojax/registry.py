"""The whole plug-in system: a dictionary from a registered name to a component.

Configuration picks components by name only; an import path never comes from a config.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from evojax.errors import InputError

T = TypeVar("T")


class Registry(Generic[T]):
    """Named components of one kind.

    >>> shapes: Registry[type] = Registry("shape")
    >>> @shapes.register("circle")
    ... class Circle: ...
    >>> shapes.get("circle", where="draw.shape").__name__
    'Circle'
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files a component under ``name``; a second use of a name is a bug."""

        def add(item: T) -> T:
            if name in self._items:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._items[name] = item
            return item

        return add

    def get(self, name: str, where: str) -> T:
        """Component called ``name``; ``where`` is the config key that asked for it.

        Raises:
            InputError: no such name; the message lists the nearest and all valid names.
        """
        if name not in self._items:
            near = difflib.get_close_matches(name, self._items, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InputError.one(
                f"unknown {self.kind}",
                where,
                name,
                f"{hint}valid: {', '.join(sorted(self._items))}",
            )
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))
