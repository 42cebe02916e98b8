"""Compares answers in a worker process that is killed when it takes too long.

math-verify limits its own time with SIGALRM, which only works on the main thread. Here the limit
lives outside the library: the caller waits on a pipe and kills. So it works from any thread.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

WORKER = Path(__file__).with_name("verify_worker.py")
MAX_CHARS = 2000  # per side; a final answer is never that long
MEMORY_BYTES = 2 << 30
START_SECONDS = 120.0  # importing the computer algebra takes seconds on a busy machine
CACHE_SIZE = 4096

Result = Literal["correct", "wrong", "bad_gold", "failed"]


class WorkerFailure(Exception):
    """The worker gave no usable reply; it has been killed."""


@dataclass
class Counters:
    """What happened so far: comparisons asked, answered from memory, failed; workers started."""

    asked: int = 0
    cached: int = 0
    timeouts: int = 0
    crashes: int = 0
    errors: int = 0
    starts: int = 0


class Verifier:
    """Decides whether a mathematical answer equals a reference. Safe to share between threads.

    The worker starts with the first comparison, starts anew after a kill, and ends with ``close``.

    Args:
        timeout_s: limit of one comparison, seconds.
        command: program to start; by default this Python, isolated, on the worker file.
    """

    def __init__(self, timeout_s: float, command: tuple[str, ...] | None = None):
        self.timeout_s = timeout_s
        self.counters = Counters()
        limits = (str(2 * timeout_s + 5), str(MEMORY_BYTES))
        self._command = command or (sys.executable, "-I", str(WORKER), *limits)
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], tuple[Result, str]] = OrderedDict()

    def compare(self, gold: str, answer: str) -> tuple[Result, str]:
        """Result and a detail in words.

        Returns:
            ``correct`` or ``wrong``; ``bad_gold`` when the reference cannot be read; ``failed``
            when the comparison timed out, crashed or raised (that is never the answer's fault).
        """
        if len(gold) > MAX_CHARS:
            return "bad_gold", f"reference longer than {MAX_CHARS} characters"
        if len(answer) > MAX_CHARS:
            return "wrong", f"answer longer than {MAX_CHARS} characters"
        with self._lock:
            self.counters.asked += 1
            if (gold, answer) in self._known:
                self.counters.cached += 1
                self._known.move_to_end((gold, answer))
                return self._known[gold, answer]
            try:
                result = self._ask(gold, answer)
            except WorkerFailure as failure:
                return "failed", str(failure)
            self._known[gold, answer] = result
            if len(self._known) > CACHE_SIZE:
                self._known.popitem(last=False)
            return result

    def works(self) -> bool:
        """Whether the worker can compare anything at all, asked anew each time."""
        with self._lock:
            try:
                return self._ask("1", "\\frac{2}{2}")[0] == "correct"
            except WorkerFailure:
                return False

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._kill()

    def describe(self) -> dict[str, int]:
        """The counters, by name."""
        return asdict(self.counters)

    def _ask(self, gold: str, answer: str) -> tuple[Result, str]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        reply = self._exchange({"gold": gold, "answer": answer}, self.timeout_s)
        if "error" in reply:
            self.counters.errors += 1
            raise WorkerFailure(f"grader error: {reply['error']}")
        if reply.get("result") not in ("correct", "wrong", "bad_gold"):
            self._crashed("the grader gave an unknown reply")
        return reply["result"], "" if reply["result"] != "bad_gold" else "reference is unreadable"

    def _start(self) -> None:
        self._kill()
        self.counters.starts += 1
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._crashed(f"the grader cannot be started: {error}")
        if self._exchange(None, START_SECONDS).get("result") != "ready":
            self._crashed("the grader did not start properly")

    def _exchange(self, request: dict[str, str] | None, seconds: float) -> dict[str, Any]:
        """Send a request, if any, and wait for one line."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            self._crashed("the grader is not running")
        try:
            if request is not None:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            return json.loads(self._read_line(process.stdout.fileno(), seconds))
        except TimeoutError:
            self.counters.timeouts += 1
            self._kill()
            raise WorkerFailure(f"grader timeout after {seconds:g} s") from None
        except (OSError, ValueError, EOFError) as error:
            self._crashed(f"the grader crashed: {type(error).__name__}")
        except BaseException:  # interrupted: a late reply must not answer the next request
            self._kill()
            raise

    def _read_line(self, pipe: int, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._received:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError
                chunk = os.read(pipe, 65536)
                if not chunk:
                    raise EOFError
                self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _crashed(self, what: str) -> NoReturn:
        self.counters.crashes += 1
        self._kill()
        raise WorkerFailure(what)

    def _kill(self) -> None:
        process, self._process, self._received = self._process, None, b""
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # bytes for the dead process are left in the buffer
                    continue
