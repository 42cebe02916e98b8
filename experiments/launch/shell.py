"""Commands of the launchers: printed with safe quoting, or run one after the other."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

NAME = re.compile(r"^[a-z]([a-z0-9-]{0,60}[a-z0-9])?$")


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        words: program and arguments, never parsed by a shell. text: given on standard input.
    """

    words: tuple[str, ...]
    text: str = ""

    def shown(self) -> str:
        """What to paste into a POSIX shell.

        >>> Command(("echo", "a b", "$HOME")).shown()
        "echo 'a b' '$HOME'"
        """
        line = shlex.join(self.words)
        if not self.text:
            return line
        return f"{line} <<'END_OF_INPUT'\n{self.text.rstrip()}\nEND_OF_INPUT"


def command(*words: object, text: str = "") -> Command:
    """A command from words; None is left out."""
    return Command(tuple(str(word) for word in words if word is not None), text)


def add_switches(parser: argparse.ArgumentParser) -> None:
    """``--dry-run`` (the default) and ``--execute``."""
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--dry-run", action="store_true", help="print the commands and run nothing (the default)"
    )
    choice.add_argument("--execute", action="store_true", help="run the commands")


def carry_out(commands: Sequence[Command], execute: bool) -> int:
    """Print the commands, or run them until one fails; the exit code of the last one that ran."""
    for one in commands:
        print(one.shown(), flush=True)
        if not execute:
            continue
        try:
            done = subprocess.run(one.words, input=one.text or None, text=True, check=False)
        except FileNotFoundError:
            print(f"launch: {one.words[0]} is not installed on this machine", file=sys.stderr)
            return 3
        if done.returncode:
            print(f"launch: the command ended with {done.returncode}", file=sys.stderr)
            return done.returncode
    return 0


def resource_name(text: str) -> str:
    """``text`` if it can name a cloud resource.

    Raises:
        argparse.ArgumentTypeError: it cannot.

    >>> resource_name("evojax-1")
    'evojax-1'
    """
    if not NAME.match(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name: lower-case letters, digits and dashes, a letter first"
        )
    return text


def evojax_words(overrides: Sequence[str], hardware: str, run_dir: str, retries: int) -> list[str]:
    """The command of every host: train, and go on from the checkpoint after an interruption.

    Args:
        overrides: of evojax. hardware: option of ``conf/hardware``. run_dir: one directory that
            all hosts see. retries: fresh starts after exit codes 3 and 130.
    """
    keeper = ["python", "-m", "experiments.launch.keep_going", "--run-dir", run_dir]
    run = ["python", "-m", "evojax.main", *overrides, f"hardware={hardware}"]
    return [*keeper, "--retries", str(retries), "--", *run]
