"""The picture of the study: each recipe's gain with its interval, and its single seeds."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH, LEFT, STEP = 680, 150, 40


def ticks(low: float, high: float, step: float = 0.05) -> list[float]:
    """Multiples of ``step`` from low to high.

    >>> ticks(-0.06, 0.11)
    [-0.05, 0.0, 0.05, 0.1]
    """
    return [round(i * step, 6) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw(entries: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write an SVG: a bar for the 95 % interval, a dot for the mean, a stroke for every seed."""
    ends = [value for e in entries for value in (*e["ci95"], *e["by_seed"])]
    low, high = min(-0.05, *ends), max(0.05, *ends)
    height = 80 + STEP * len(entries)

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - 90)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="15">{html.escape(title)}</text>',
    ]
    for tick in ticks(low, high):
        at, shade = x(tick), "#999" if tick == 0 else "#ddd"
        parts += [
            f'<line x1="{at:.1f}" y1="40" x2="{at:.1f}" y2="{height - 30}" stroke="{shade}"/>',
            f'<text x="{at:.1f}" y="{height - 12}" fill="#666" text-anchor="middle">'
            f"{f'{tick:+.2f}' if tick else '0'}</text>",
        ]
    for i, entry in enumerate(entries):
        y = 62 + STEP * i
        a, b = entry["ci95"]
        parts += [
            f'<text x="16" y="{y + 4}">{html.escape(entry["recipe"])}</text>',
            f'<line x1="{x(a):.1f}" y1="{y}" x2="{x(b):.1f}" y2="{y}" stroke="#36c" '
            'stroke-width="3"/>',
            f'<circle cx="{x(entry["gain"]):.1f}" cy="{y}" r="5" fill="#36c"/>',
            *(
                f'<line x1="{x(v):.1f}" y1="{y - 9}" x2="{x(v):.1f}" y2="{y + 9}" stroke="#c63"/>'
                for v in entry["by_seed"]
            ),
            f'<text x="{WIDTH - 80}" y="{y + 4}">{entry["gain"]:+.3f}</text>',
        ]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")
