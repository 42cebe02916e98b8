"""The peer's own environment: found, or made once with pip from the pinned requirements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "peer-requirements.txt"
# glibc gives big buffers back to the system and faults them in again at every step unless told
# otherwise; keeping them is the largest single gain that the peer has on a CPU.
TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def requirements() -> dict[str, str]:
    """Pinned packages of the peer, name to version."""
    lines = [line.split("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def peer_python(given: Path | None, directory: Path) -> Path:
    """Interpreter of an environment that holds exactly the pinned packages.

    Args:
        given: an interpreter to use as it is. directory: where the environment is made otherwise.

    Raises:
        SystemExit: the environment lacks a package or has another version of it.
    """
    if given is None:
        given = directory / "bin" / "python"
        if not given.exists():
            print(f"peer: new environment in {directory}, some minutes", flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
            torch = f"torch=={requirements()['torch']}"
            install = [str(given), "-m", "pip", "install", "--quiet"]
            subprocess.run([*install, torch], check=True)
            subprocess.run([*install, "-r", str(REQUIREMENTS)], check=True)
    wrong = _wrong(given)
    if wrong:
        raise SystemExit(f"peer: {given} differs from {REQUIREMENTS.name}: {', '.join(wrong)}")
    return given


def _wrong(python: Path) -> list[str]:
    """What differs from the pins, in words; a local version part such as +cpu is no difference."""
    script = (
        "import importlib.metadata as m, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(m.version(name).split('+')[0])\n"
        "    except m.PackageNotFoundError: print('missing')\n"
    )
    names = list(requirements())
    out = subprocess.run([python, "-c", script, *names], check=True, capture_output=True, text=True)
    found = dict(zip(names, out.stdout.split(), strict=True))
    return [f"{n} {found[n]}" for n, pin in requirements().items() if found[n] != pin]
