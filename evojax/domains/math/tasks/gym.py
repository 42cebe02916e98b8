"""Loads reasoning-gym, which takes seconds: only tasks that draw from its generators do so."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from evojax.errors import UnavailableError


def gym_module(name: str) -> ModuleType:
    """The module ``reasoning_gym.<name>``, without the syntax warnings of its dependencies.

    Raises:
        UnavailableError: reasoning-gym is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module(f"reasoning_gym.{name}")
    except ImportError as error:
        raise UnavailableError(f"reasoning-gym cannot be loaded: {error}") from error
