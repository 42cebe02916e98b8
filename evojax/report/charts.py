"""Small inline SVG charts. Colours come from the page's CSS; every text is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from evojax.report.data import VersionCard

SERIES_COLOURS = 8  # CSS classes c0..c7; later series reuse them with a dashed line
_MAX_TICKS = 5


@dataclass(frozen=True)
class Line:
    """One curve: (x, y) pairs, y None where nothing was measured; ``index`` picks the colour."""

    label: str
    index: int
    points: Sequence[tuple[float, float | None]]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that cover ``[low, high]``.

    >>> ticks(0, 1)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(0, 36)
    [0.0, 10.0, 20.0, 30.0]
    """
    span = high - low
    magnitude = 10 ** math.floor(math.log10(span / _MAX_TICKS))
    steps = [m * magnitude for m in (1, 2, 2.5, 5, 10)]
    step = next(s for s in steps if span / s <= _MAX_TICKS)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(round(i * step, 10)) for i in range(first, last + 1)]


def line_chart(
    title: str, lines: Sequence[Line], x_range: tuple[float, float], y_max: float | None
) -> Markup:
    """Curves over a shared step axis; faint = as measured, bold = running mean of three.

    Args:
        x_range: steps, equal for all charts that are to be compared.
        y_max: top of the axis; None takes it from the data.
    """
    width, height, left, right, top, bottom = 380, 210, 42, 12, 30, 26
    values = [y for line in lines for _, y in line.points if y is not None]
    low = min([0.0, *values])
    high = max([y_max or 0.0, *values])
    high = low + 1.0 if high <= low else high
    x0, x1 = x_range
    x1 = max(x1, x0 + 1)

    def px(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (width - left - right)

    def py(y: float) -> float:
        return height - bottom - (y - low) / (high - low) * (height - top - bottom)

    out = [f'<text class="title" x="{left}" y="16">{escape(title)}</text>']
    for y in ticks(low, high):
        out.append(_hline(left, width - right, py(y)))
        out.append(_text(left - 6, py(y) + 4, f"{y:g}", "end"))
    for x in ticks(x0, x1):
        if x == int(x):
            out.append(_text(px(x), height - bottom + 16, f"{x:g}", "middle"))
    for line in lines:
        style = f"c{line.index % SERIES_COLOURS}" + (
            " dashed" if line.index >= SERIES_COLOURS else ""
        )
        at = [(px(x), None if y is None else py(y)) for x, y in line.points]
        out.append(f'<path class="raw {style}" d="{_path(at)}"/>')
        out.append(f'<path class="mean {style}" d="{_path(_running_mean(at))}"/>')
        for (x, y), (cx, cy) in zip(line.points, at, strict=True):
            if y is not None:
                tip = escape(f"{line.label}, update {x:g}: {y:.3g}")
                out.append(
                    f'<circle class="dot {style}" cx="{cx:.1f}" cy="{cy:.1f}" r="2.2">'
                    f"<title>{tip}</title></circle>"
                )
    return _svg(width, height, title, out)


def dot_whisker(versions: Sequence[VersionCard]) -> Markup:
    """Score of every scored version with its 95 % interval, one row each."""
    rows = [v for v in versions if v.score is not None]
    width, row, left, right, top = 720, 30, 150, 150, 26
    height = top + row * max(len(rows), 1) + 26
    ends = [e for v in rows if v.score for e in (v.score.mean, *(v.score.ci95 or ()))]
    low = max(0.0, math.floor((min(ends, default=0.0) - 0.02) * 10) / 10)
    high = min(1.0, math.ceil((max(ends, default=1.0) + 0.02) * 10) / 10)
    high = low + 0.1 if high <= low else high

    def px(x: float) -> float:
        return left + (x - low) / (high - low) * (width - left - right)

    bottom = height - 22
    out = []
    for x in ticks(low, high):
        out.append(f'<path class="grid" d="M{px(x):.1f} {top - 8}V{bottom}"/>')
        out.append(_text(px(x), bottom + 16, f"{x:g}", "middle"))
    for i, v in enumerate(rows):
        y = top + row * i + row / 2
        out += _whisker(v, px, y, left, width - right, i == 0, top - 8, bottom)
    return _svg(width, height, "Score per version with 95 % intervals", out)


def _whisker(v: VersionCard, px, y: float, left: int, right: int, first: bool, top, bottom):
    assert v.score is not None
    x = px(v.score.mean)
    out = []
    if first:
        out.append(f'<path class="reference" d="M{x:.1f} {top}V{bottom}"/>')
    kind = f"v-{css_name(v.verdict)}"
    words = f"{v.score.mean:.3f}"
    if v.score.ci95 is not None:
        a, b = v.score.ci95
        out.append(f'<path class="whisker {kind}" d="M{px(a):.1f} {y}H{px(b):.1f}"/>')
        words += f"  [{a:.2f}, {b:.2f}]"
    out.append(f'<circle class="point {kind}" cx="{x:.1f}" cy="{y}" r="5.5"/>')
    out.append(_text(left - 14, y + 4, f"{v.id} · {v.verdict}", "end", "label"))
    out.append(_text(right + 14, y + 4, words, "start", "label"))
    return out


def lineage(versions: Sequence[VersionCard]) -> Markup:
    """Versions as a graph: parents left of their children, the kept line at the top."""
    depth: dict[str, int] = {}
    for v in versions:
        depth[v.id] = depth.get(v.parent or "", -1) + 1
    kept = {"base", "trained", "promoted"}
    place: dict[str, tuple[int, int]] = {}
    lanes: dict[int, int] = {}
    for v in sorted(versions, key=lambda v: (depth[v.id], v.verdict not in kept)):
        column = depth[v.id]
        place[v.id] = (column, lanes.get(column, 0))
        lanes[column] = lanes.get(column, 0) + 1
    dx, dy, box = 190, 74, 146
    width = dx * (max(depth.values(), default=0) + 1)
    height = dy * (max(lanes.values(), default=1) - 1) + 70
    out, nodes = [], []
    for v in versions:
        column, lane = place[v.id]
        x, y = 8 + column * dx, 8 + lane * dy
        if v.parent in place:
            pc, pl = place[v.parent]
            sx, sy = 8 + pc * dx + box, 8 + pl * dy + 27
            bend = (sx + x) / 2
            out.append(
                f'<path class="edge" d="M{sx} {sy}C{bend} {sy} {bend} {y + 27} {x} {y + 27}"/>'
            )
        nodes += _node(v, x, y, box)
    return _svg(width, height, "Lineage of the versions", out + nodes)


def _node(v: VersionCard, x: int, y: int, width: int) -> list[str]:
    kind = f"v-{css_name(v.verdict)}"
    score = "not scored" if v.score is None else f"{v.score.mean:.3f}"
    tip = escape(f"{v.id}: {v.verdict}. {v.hypothesis}")
    under = v.verdict if v.factor in ("", "none") else f"{v.verdict} · {v.factor}"
    return [
        f'<g><title>{tip}</title><rect class="node {kind}" x="{x}" y="{y}" width="{width}" '
        f'height="54" rx="9"/>',
        _text(x + 12, y + 23, v.id, "start", "label strong"),
        _text(x + width - 12, y + 23, score, "end", "label"),
        _text(x + 12, y + 42, under, "start"),
        "</g>",
    ]


def css_name(verdict: str) -> str:
    """A verdict as a CSS class; anything unknown is ``other``."""
    known = ("base", "control", "trained", "promoted", "rejected", "undecided", "invalid", "failed")
    return verdict if verdict in known else "other"


def _running_mean(
    points: Sequence[tuple[float, float | None]],
) -> list[tuple[float, float | None]]:
    out: list[tuple[float, float | None]] = []
    for i, (x, y) in enumerate(points):
        near = [v for _, v in points[max(0, i - 1) : i + 2] if v is not None]
        out.append((x, None if y is None else sum(near) / len(near)))
    return out


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    parts, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        parts.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return "".join(parts)


def _hline(x0: float, x1: float, y: float) -> str:
    return f'<path class="grid" d="M{x0} {y:.1f}H{x1}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> Markup:
    body = "".join(parts)
    return Markup(  # every text in ``parts`` went through escape()
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(label)}">{body}</svg>'
    )
