"""Ctrl-C and SIGTERM become a flag that the loops read between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from evojax.errors import Interrupted


class InterruptGuard:
    """Context manager: the first signal asks for a clean stop, a second one ends at once.

    >>> with InterruptGuard() as guard:
    ...     guard.requested
    False
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def check(self) -> None:
        """Raise `Interrupted` when a stop was asked for.

        Raises:
            Interrupted: a signal arrived since the guard was entered.
        """
        if self.requested:
            raise Interrupted("stopped by a signal")

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for signum in self.SIGNALS:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)  # type: ignore[arg-type]
