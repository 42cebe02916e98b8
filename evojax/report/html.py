"""Writes the run's report: one self-contained static HTML file without scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evojax.errors import UnavailableError
from evojax.report.charts import SERIES_COLOURS, Line, css_name, dot_whisker, line_chart, lineage
from evojax.report.data import CurvePoint, Delta, ReportData, Score

_FULL_TINT = 2.0  # advantage that gets the strongest colour


def write_report(run_dir: Path, data: ReportData) -> Path:
    """Write ``report.html`` into ``run_dir`` (whole or not at all) and return its path.

    The page needs no network and holds no script, so text written by a model is inert in it.

    Raises:
        UnavailableError: the disk refused.
    """
    path = run_dir / "report.html"
    temporary = path.with_name(".report.html.tmp")
    try:
        temporary.write_text(render(data), encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError as error:
        raise UnavailableError(f"{path} could not be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def render(data: ReportData) -> str:
    """The report as HTML text."""
    environment = Environment(
        loader=PackageLoader("evojax.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "score": _score,
        "interval": _interval,
        "signed": _signed,
        "delta": _delta,
        "p": _p,
        "duration": _duration,
        "diff": diff_lines,
        "tint": tint,
        "css_name": css_name,
        "value": _value,
    }
    return environment.get_template("report.html.j2").render(
        data=data,
        lineage=lineage(data.versions),
        scores=dot_whisker(data.versions),
        curves=curves(data),
        legend=[(label, i % SERIES_COLOURS) for i, label in enumerate(data.series)],
    )


def curves(data: ReportData) -> list[Markup]:
    """Charts of reward, dead groups and entropy, all over the same steps."""
    steps = [p.step for points in data.series.values() for p in points]
    if not steps:
        return []
    span = (float(min(steps)), float(max(steps)))
    kinds: list[tuple[str, Callable[[CurvePoint], float | None], float | None]] = [
        ("Mean reward", lambda p: p.reward, None),
        ("Share of dead groups", lambda p: p.dead, 1.0),
        ("Entropy, nats per token", lambda p: p.entropy, None),
    ]
    return [line_chart(title, _lines(data.series, value), span, top) for title, value, top in kinds]


def _lines(
    series: dict[str, tuple[CurvePoint, ...]], value: Callable[[CurvePoint], float | None]
) -> list[Line]:
    return [
        Line(label, i, [(p.step, _finite(value(p))) for p in points])
        for i, (label, points) in enumerate(series.items())
    ]


def diff_lines(diff: str) -> list[tuple[str, str]]:
    """Lines of a unified diff with their kind: file, hunk, add, remove or same.

    >>> diff_lines("--- a/x\\n+++ b/x\\n@@ -1 +1 @@\\n-lr: 1\\n+lr: 2\\n")[2:]
    [('hunk', '@@ -1 +1 @@'), ('remove', '-lr: 1'), ('add', '+lr: 2')]
    """
    out = []
    in_hunk = False
    for line in diff.splitlines():
        if line.startswith("diff "):
            in_hunk = False
        if line.startswith("@@"):
            in_hunk = True
            kind = "hunk"
        elif not in_hunk:
            kind = "file"
        else:
            kind = {"+": "add", "-": "remove"}.get(line[:1], "same")
        out.append((kind, line))
    return out


def tint(advantage: float) -> str:
    """Colour class of a sample: t0 (no advantage), p1..p4 (above its group), n1..n4 (below).

    >>> tint(0.0), tint(0.4), tint(-2.47)
    ('t0', 'p1', 'n4')
    """
    if not math.isfinite(advantage) or abs(advantage) < 1e-9:
        return "t0"
    depth = max(1, math.ceil(4 * min(1.0, abs(advantage) / _FULL_TINT)))
    return f"{'p' if advantage > 0 else 'n'}{depth}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _score(score: Score | None) -> str:
    return "not scored" if score is None else f"{score.mean:.3f}"


def _interval(ci95: Sequence[float] | None) -> str:
    return "" if ci95 is None else f"[{ci95[0]:.3f}, {ci95[1]:.3f}]"


def _signed(value: float) -> str:
    return f"{value:+.3f}"


def _delta(delta: Delta | None) -> str:
    if delta is None:
        return "not compared"
    return " ".join(filter(None, [_signed(delta.mean), _interval(delta.ci95)]))


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
