"""What every study does: run evojax for each row that is missing, append it, draw the table."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def rows_of(table: Path) -> list[dict[str, Any]]:
    """Rows of a results file; none when it does not exist yet."""
    if not table.exists():
        return []
    return [json.loads(line) for line in table.read_text().splitlines() if line.strip()]


def run_missing(
    table: Path,
    wanted: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Sequence[str]],
    output_root: Path,
    details: Callable[[Path], dict[str, Any]] = lambda run_dir: {},
) -> list[dict[str, Any]]:
    """Run what the table lacks and append one row for each finished run.

    Args:
        wanted: rows to have, as ``{"arm": ..., "seed": ...}``.
        arguments: arm -> command line of evojax without the seed.
        output_root: where run directories go.
        details: what else of a finished run directory belongs into its row.
    """
    done = {(row["arm"], row["seed"]) for row in rows_of(table)}
    for want in wanted:
        key = (want["arm"], want["seed"])
        if key in done:
            print(f"{key[0]} seed {key[1]}: in the table already", flush=True)
            continue
        root = output_root / f"{key[0]}-{key[1]}"
        summary, process_s = run_one(arguments[key[0]], key[1], root)
        row = {"arm": key[0], "seed": key[1], **measured(read_json(summary), process_s)}
        append(table, row | details(summary.parent))
    return rows_of(table)


def append(table: Path, row: Mapping[str, Any]) -> None:
    """Add one row to a results file, and show it without its scores of single items."""
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("a") as file:
        file.write(json.dumps(row, sort_keys=True) + "\n")
    shown = {key: value for key, value in row.items() if not key.endswith("scores")}
    print(json.dumps(shown, sort_keys=True), flush=True)


def read_json(path: Path) -> Any:
    """Content of a JSON file."""
    return json.loads(path.read_text())


def run_one(arguments: Sequence[str], seed: int, root: Path) -> tuple[Path, float]:
    """One run of evojax below ``root``, resumed when an earlier one was cut short.

    Returns:
        Its summary.json, and the seconds of the process.
    """
    cut = sorted(p.parent for p in root.glob("*/*/run.json"))
    words = [f"resume={cut[-1]}"] if cut else [*arguments, f"seed={seed}", f"output_root={root}"]
    mode = [w for w in arguments if w.startswith("mode=")]
    command = [sys.executable, "-m", "evojax.main", *words, *(mode if cut else []), "live=false"]
    print("+ " + " ".join(command), flush=True)
    began = time.perf_counter()
    subprocess.run(command, check=True)
    (path,) = root.glob("*/*/summary.json")
    return path, time.perf_counter() - began


def measured(summary: Mapping[str, Any], process_s: float) -> dict[str, Any]:
    """The numbers of a summary that a study keeps."""
    final = summary["final"]
    return {
        "base": summary["base"]["score"],
        "final": final["score"],
        "final_version": final["version"],
        "delta": final["delta"],
        "audit": final["audit"],
        "promoted": summary["promoted"],
        "verdicts": {
            v["version"]: {"factor": v["factor"], "verdict": v["verdict"], "score": v["score"],
                           "delta": v["delta"]}
            for v in summary["versions"]
        },
        "updates": summary["updates"],
        "rollouts": summary["rollouts"],
        "unscorable": summary["unscorable"],
        "device": summary["device"],
        "wall_s": summary["wall_s"],
        "process_s": round(process_s, 1),
    }  # fmt: skip


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Paired gain of every row with its 95 % interval, as an SVG."""
    rows = sorted(rows, key=lambda r: (r["arm"], r["seed"]))
    width, left, step = 640, 170, 34
    height = 70 + step * len(rows)
    low = min(-0.1, *(r["delta"]["ci95"][0] for r in rows))
    high = max(0.1, *(r["delta"]["ci95"][1] for r in rows))

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - 80)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="15">{html.escape(title)}</text>',
        f'<line x1="{x(0):.1f}" y1="40" x2="{x(0):.1f}" y2="{height - 20}" stroke="#999"/>',
    ]
    for i, row in enumerate(rows):
        y = 60 + step * i
        delta, (a, b) = row["delta"]["mean"], row["delta"]["ci95"]
        label = html.escape(f"{row['arm']} seed {row['seed']}")
        parts += [
            f'<text x="16" y="{y + 4}">{label}</text>',
            f'<line x1="{x(a):.1f}" y1="{y}" x2="{x(b):.1f}" y2="{y}" stroke="#36c" '
            'stroke-width="3"/>',
            f'<circle cx="{x(delta):.1f}" cy="{y}" r="5" fill="#36c"/>',
            f'<text x="{width - 70}" y="{y + 4}">{delta:+.3f}</text>',
        ]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def replace_block(readme: Path, block: str, name: str = "table") -> None:
    """Put ``block`` between the marks ``<!-- name: begin -->`` and ``<!-- name: end -->``.

    Raises:
        ValueError: the marks are not there.
    """
    text = readme.read_text()
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{readme} has no block {begin} ... {end}")
    readme.write_text(pattern.sub(lambda _: f"{begin}\n{block}\n{end}", text))
