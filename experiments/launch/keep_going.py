"""Run evojax until it is done: after an interruption or an outage, the same run is resumed.

``python -m experiments.launch.keep_going --run-dir DIR -- python -m evojax.main +experiment=math``

runs the command with ``hydra.run.dir=DIR``. Exit codes 3 (something is unavailable), 130
(interrupted) and death by a signal lead to ``python -m evojax.main resume=DIR``; any other code is
final. A directory that holds a run already is resumed at once, so after a preemption the machine's
start-up script only repeats this line. SIGTERM and SIGINT go to evojax, which saves its state, and
then nothing is started again: the machine is being taken away.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

UNAVAILABLE, INTERRUPTED = 3, 130


def resumes(code: int) -> bool:
    """Whether a run that ended with ``code`` can go on.

    >>> [resumes(code) for code in (0, 1, 2, 3, 130, -9, 137)]
    [False, False, False, True, True, True, True]
    """
    return code in (UNAVAILABLE, INTERRUPTED) or code < 0 or code in (128 + 9, 128 + 15)


def line_for(words: Sequence[str], run_dir: Path) -> list[str]:
    """The command for the state that ``run_dir`` is in: a first start, or a resumption.

    A resumed run keeps its own configuration, so its overrides are left out.

    >>> line_for(["python", "-m", "evojax.main", "seed=1"], Path("/nonexistent"))
    ['python', '-m', 'evojax.main', 'seed=1', 'hydra.run.dir=/nonexistent']
    """
    if (run_dir / "run.json").is_file():
        program = list(words[: words.index("evojax.main") + 1])
        return [*program, f"resume={run_dir}"]
    return [*words, f"hydra.run.dir={run_dir}"]


class Keeper:
    """Starts the command, passes signals on to it, and starts it again where that helps."""

    def __init__(self, words: Sequence[str], run_dir: Path, retries: int, wait_s: float):
        self.words, self.run_dir = words, run_dir
        self.retries, self.wait_s = retries, wait_s
        self.stopping = False
        self.child: subprocess.Popen[bytes] | None = None

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def run(self) -> int:
        """The exit code of the last start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        for left in range(self.retries, -1, -1):
            line = line_for(self.words, self.run_dir)
            # A group of its own: Ctrl-C reaches evojax once, through this process.
            self.child = subprocess.Popen(line, start_new_session=True)
            code = self.child.wait()
            if self.stopping or not resumes(code) or not left:
                return code if code >= 0 else 128 - code
            print(f"keep_going: ended with {code}; {left} more starts", file=sys.stderr, flush=True)
            time.sleep(self.wait_s)
            if self.stopping:
                return INTERRUPTED
        return INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.launch.keep_going", description=__doc__
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="seen by every host")
    parser.add_argument("--retries", type=int, default=10, help="further starts at most")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds before each of them")
    parser.add_argument("words", nargs="+", help="-- and the command, python -m evojax.main ...")
    options = parser.parse_args(argv)
    if "evojax.main" not in options.words:
        parser.error("the command must run evojax.main")
    run_dir = Path(os.path.abspath(options.run_dir))
    return Keeper(options.words, run_dir, options.retries, options.wait).run()


if __name__ == "__main__":
    sys.exit(main())
