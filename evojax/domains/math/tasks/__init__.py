"""Generated tasks by name: importing this package registers every one of them."""

from evojax.domains.math.tasks import (  # noqa: F401
    add_sub,
    first_alphabetical,
    gcd,
    letter_count,
    max_of_two,
    next_number,
    parity,
    remainder,
    times,
    tiny,
)
from evojax.domains.math.tasks.base import TASKS, Problem, Task

__all__ = ["TASKS", "Problem", "Task"]
