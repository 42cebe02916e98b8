"""The process that compares answers: one JSON request a line on stdin, one reply a line on stdout.

Started as ``python -I verify_worker.py SECONDS BYTES``; it is not imported. Computer algebra on
text that a model wrote can run for ever or eat all memory: whoever started it kills it then. As a
second net it ends itself through SIGALRM well after the time limit, and at the end of stdin, so it
outlives nobody.

Request ``{"gold": ..., "answer": ...}``; reply ``{"result": "correct" | "wrong" | "bad_gold"}`` or
``{"error": ...}`` when the comparison itself failed.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path


def serve(seconds: float, memory: int) -> None:
    """Answer requests until stdin ends.

    Args:
        seconds: after this long on one request the process ends itself.
        memory: limit of the address space, bytes.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from evojax.domains.math.equality import judge

    judge("\\frac{1}{2}", "\\frac{2}{4}")  # builds the parser's tables before the clock runs
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    replies = sys.stdout
    sys.stdout = sys.stderr  # nothing a library prints may look like a reply
    print(json.dumps({"result": "ready"}), file=replies, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        request = json.loads(line)
        try:
            reply = {"result": judge(request["gold"], request["answer"])}
        except (Exception, RecursionError, MemoryError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
