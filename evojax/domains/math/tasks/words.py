"""Common English words for the word tasks: those of the story that reasoning-gym ships."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path

from evojax.errors import UnavailableError

STORY = "in_the_year_2889.txt"


@lru_cache(maxsize=1)
def common_words() -> tuple[str, ...]:
    """Lower-case words of 3 to 8 letters, each once, in alphabetical order.

    The file is found through the package's location, for importing reasoning-gym takes seconds.

    Raises:
        UnavailableError: reasoning-gym is not installed.
    """
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError("reasoning-gym is not installed: its word list is needed")
    path = Path(spec.submodule_search_locations[0]) / "data" / STORY
    try:
        story = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnavailableError(f"cannot read the word list {path}: {error}") from error
    return tuple(sorted(set(re.findall(r"(?<![\w'’-])[a-z]{3,8}(?![\w'’-])", story))))
