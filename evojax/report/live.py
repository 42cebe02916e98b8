"""Shows a run while it goes: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 40  # rewards shown
PLAIN_INTERVAL_S = 1.0


def sparkline(values: list[float], bars: str = BARS) -> str:
    """One character per value, scaled to the values' own range; non-finite ones are blanks.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    finite = [v for v in values if abs(v) < float("inf")]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = (high - low) or 1.0
    return "".join(
        bars[round((v - low) / span * (len(bars) - 1))] if abs(v) < float("inf") else " "
        for v in values
    )


def duration(seconds: float) -> str:
    """Seconds in a form to read.

    >>> duration(7.4), duration(83), duration(3725)
    ('7 s', '1 min 23 s', '1 h 02 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def one_line(text: str) -> str:
    """``text`` with every control character shown as an escape: no escape sequence gets through.

    >>> one_line("a\\x1b[31mb\\n")
    'a\\\\x1b[31mb\\\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class LiveView:
    """The view of one run, used as a context manager.

    Args:
        enabled: show the live panel if the output is a terminal; else one plain line per event.
        total_updates: optimizer updates that the whole run will make (for the ETA).
        console: where to show; standard output by default.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        enabled: bool,
        total_updates: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console = console or Console()
        self._clock = clock
        self._total = max(total_updates, 0)
        self._done = 0
        self._step_seconds = 0.0
        self._mark = clock()
        self._last_plain = -float("inf")
        self._phase = ("start", "")
        self._numbers: dict[str, str] = {}
        self._rewards: list[float] = []
        rich_mode = enabled and self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = Live(console=self.console, refresh_per_second=4) if rich_mode else None

    def __enter__(self) -> LiveView:
        self._mark = self._clock()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def phase(self, name: str, version: str) -> None:
        """A new phase (train, evaluate, ...) of a version begins."""
        if version != self._phase[1]:
            self._rewards.clear()
        self._phase = (one_line(name), one_line(version))
        self._numbers = {}
        self._mark = self._clock()
        self._last_plain = -float("inf")
        self._show(f"{self._phase[1]} {self._phase[0]}")

    def step(
        self,
        version: str,
        step: int,
        steps: int,
        reward: float,
        dead_share: float,
        tokens_per_s: float,
    ) -> None:
        """An update was made.

        Args:
            version: whose update. step: how many are made, of ``steps``.
            reward: mean of the batch (NaN when nothing could be scored).
            dead_share: share of groups without a gradient. tokens_per_s: sampled tokens per second.
        """
        now = self._clock()
        self._done += 1
        self._step_seconds += now - self._mark
        self._mark = now
        self._rewards = [*self._rewards[1 - HISTORY :], reward]
        self._numbers = {
            "step": f"{step}/{steps}",
            "reward": f"{reward:.3f}",
            "dead groups": f"{dead_share:.0%}",
            "tokens/s": f"{tokens_per_s:.0f}",
            "ETA": self.eta(),
        }
        due = now - self._last_plain >= PLAIN_INTERVAL_S or step >= steps
        if self._live is not None or due:
            self._last_plain = now
            shown = ", ".join(f"{key} {value}" for key, value in self._numbers.items())
            self._show(f"{one_line(version)} {shown}")

    def eta(self) -> str:
        """Time for the updates that are left, at the mean time of an update so far."""
        if not self._done:
            return "?"
        left = max(self._total - self._done, 0)
        return duration(left * self._step_seconds / self._done)

    def note(self, text: str) -> None:
        """A line that stays, above the live panel."""
        line = one_line(text)
        if self._live is not None:
            self._live.console.print(Text(line))
        else:
            self._plain(line)

    def close(self) -> None:
        """Stop the live panel; it stays on the screen as it last was. May be called again."""
        if self._live is not None:
            self._live.stop()

    def _show(self, line: str) -> None:
        if self._live is not None:
            self._live.update(self._panel())
        else:
            self._plain(line)

    def _plain(self, line: str) -> None:
        encoding = getattr(self.console.file, "encoding", None) or "utf-8"
        safe = line.encode(encoding, "backslashreplace").decode(encoding)
        self.console.file.write(safe + "\n")
        self.console.file.flush()

    def _panel(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_row(Text(self._phase[1], style="bold"), Text(self._phase[0], style="cyan"))
        for key, value in self._numbers.items():
            table.add_row(Text(key, style="dim"), Text(value))
        if self._rewards and self.console.encoding.lower().startswith("utf"):
            table.add_row(Text("reward so far", style="dim"), Text(sparkline(self._rewards)))
        return Group(table, ProgressBar(total=max(self._total, 1), completed=self._done, width=40))
