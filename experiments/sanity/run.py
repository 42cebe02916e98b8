"""With rewards shuffled within the batch there is nothing to learn: does anything rise?

The arm runs the main job's first training, all settings equal, with ``train.shuffle_rewards=true``.

    python -m experiments.sanity.run [--seeds 0 1 2] [--output-root outputs/studies/sanity]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.study import draw, run_missing

HERE = Path(__file__).resolve().parent
ARMS = {"shuffled": ["+experiment=math", "mode=train", "train.shuffle_rewards=true"]}


def main() -> None:
    """Run the seeds that the table lacks and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output-root", type=Path, default=Path("outputs/studies/sanity"))
    args = parser.parse_args()
    wanted = [{"arm": arm, "seed": seed} for seed in args.seeds for arm in ARMS]
    rows = run_missing(HERE / "results.jsonl", wanted, ARMS, args.output_root.resolve())
    draw(rows, "Shuffled rewards: gain over the base, Avg@8", HERE / "results.svg")


if __name__ == "__main__":
    main()
