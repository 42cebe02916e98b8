"""Entry point: ``python -m evojax.main +experiment=math [key=value ...] [-m]``."""

from __future__ import annotations

import sys

from evojax.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
