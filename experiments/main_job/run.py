"""Does the main job raise held-out accuracy, on every seed?

python -m experiments.main_job.run [--seeds 0 1 2] [--output-root outputs/studies/main_job]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.study import draw, run_missing

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run the seeds that the table lacks and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output-root", type=Path, default=Path("outputs/studies/main_job"))
    args = parser.parse_args()
    wanted = [{"arm": "math", "seed": seed} for seed in args.seeds]
    rows = run_missing(
        HERE / "results.jsonl", wanted, {"math": ["+experiment=math"]}, args.output_root.resolve()
    )
    draw(rows, "Main job: gain of the final version over the base, Avg@8", HERE / "results.svg")


if __name__ == "__main__":
    main()
