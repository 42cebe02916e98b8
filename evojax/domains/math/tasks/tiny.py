"""Two one-token tasks for tiny models with a 16-symbol alphabet (digits ``+ - = ?`` blank newline).

``37=`` -> ``7`` copies the last digit, ``37+1=`` -> ``8`` counts it up by one, modulo 10. There is
no stop text: the answer is exactly one token, so completions of one token are complete.
"""

from __future__ import annotations

from collections.abc import Iterator

from evojax.domains.math.tasks.base import TASKS, Problem, Task


def copies() -> Iterator[Problem]:
    """All two-digit strings, answered by their last digit."""
    return (Problem(f"{n:02d}", f"{n:02d}=", str(n % 10)) for n in range(100))


def successors() -> Iterator[Problem]:
    """All two-digit strings, answered by their last digit plus one, modulo 10."""
    return (Problem(f"{n:02d}", f"{n:02d}+1=", str((n + 1) % 10)) for n in range(100))


TASKS.register("tiny_copy")(Task(copies, stop=()))
TASKS.register("tiny_succ")(Task(successors, stop=()))
