from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_example import example

from evojax.errors import UnavailableError
from evojax.report.charts import Line, dot_whisker, line_chart, lineage, ticks
from evojax.report.data import CurvePoint, Score, VersionCard
from evojax.report.html import curves, diff_lines, render, tint, write_report

HOSTILE = (
    "</script></style></svg><img src=x onerror=alert(1)>\"'{{ 7 * 7 }}<script>alert(2)</script>"
)
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "article"),
    *("h1", "h2", "h3", "h4", "p", "div", "span", "b", "i", "small", "ul", "li", "dl", "dt", "dd"),
    *("code", "pre", "details", "summary", "figure", "svg", "g", "path", "rect", "circle", "text"),
}


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {(k, v or "") for k, v in attrs}

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_needs_nothing_from_outside(tmp_path):
    path = write_report(tmp_path, example())
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "report.html" and len(text) < 1_000_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html"]
    assert not re.search(r"https?:|url\(|@import|\bsrc=|\bhref=|<script|<link|<iframe", text)
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_hostile_text_is_shown_and_inert():
    page = Page(render(example(HOSTILE)))
    assert page.tags <= TAGS
    assert not any(name.startswith("on") for name, _ in page.attributes)
    shown = "".join(page.words)
    assert shown.count("<img src=x onerror=alert(1)>") > 15
    assert "{{ 7 * 7 }}" in shown and "49" not in re.findall(r"'(\d+)<script", shown)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40))
def test_any_text_leaves_the_page_well_formed(text):
    page = Page(render(example(text)))
    assert page.tags <= TAGS


def test_every_part_of_a_run_is_on_the_page():
    shown = " ".join(" ".join(Page(render(example())).words).split())
    for part in (
        "Promoted v003 (filter)",
        "0.648 [0.587, 0.707]",
        "+0.367 [0.301, 0.431]",
        "0.631",
        "12 min 32 s",
        "evo/math/v3-dynamic-sampling",
        "9d0be11aa34f",
        "update_dead_share falls by at least 0.15",
        "against v002, paired +0.077 [0.031, 0.122] p 0.001 p, Holm 0.002",
        "revived dead groups 41",
        "+refill_rounds: 2",
        "dead_group_share = 0.52",
        "advantage +2.470",
        "reward none",
        "python -m evojax.main",
        "Verdicts rest on one training seed.",
    ):
        assert part in shown, part


def test_a_run_with_nothing_but_a_base_still_has_a_report(tmp_path):
    bare = dataclasses.replace(
        example(),
        versions=(VersionCard("v000", None, "base"),),
        series={},
        samples=(),
        base=None,
        final=None,
        audit=None,
        gain=None,
        promoted=None,
        notes=(),
    )
    text = write_report(tmp_path, bare).read_text()
    assert "not scored" in text and "Training curves" not in text


def test_a_report_that_cannot_be_written_is_unavailable(tmp_path):
    with pytest.raises(UnavailableError, match=r"report\.html could not be written"):
        write_report(tmp_path / "missing", example())


def test_half_a_surrogate_pair_does_not_stop_the_report(tmp_path):
    write_report(tmp_path, example("\ud83d"))


def test_charts_share_the_step_axis_and_leave_gaps():
    data = dataclasses.replace(
        example(),
        series={
            "a": (CurvePoint(0, 0.5, None, 1.0), CurvePoint(1, float("nan"), 0.2, 0.9)),
            "b": (CurvePoint(10, 0.7, 0.1, 0.8), CurvePoint(11, 0.8, 0.1, 0.7)),
        },
    )
    charts = curves(data)
    assert len(charts) == 3
    for chart in charts:
        root = ElementTree.fromstring(chart)
        assert "nan" not in chart and root.tag == "svg"
    dots = [e.attrib["cx"] for e in ElementTree.fromstring(charts[0]).iter("circle")]
    assert len(dots) == 3 and dots[0] == "42.0" and dots[-1] == "368.0"
    broken = line_chart("t", [Line("x", 0, [(0, 1.0), (1, None), (2, 1.0)])], (0, 2), 1.0)
    raw = next(e for e in ElementTree.fromstring(broken).iter("path") if "raw" in e.attrib["class"])
    assert raw.attrib["d"] == "M42.0 30.0M368.0 30.0"


def test_lineage_draws_an_edge_per_known_parent():
    root = ElementTree.fromstring(lineage(example().versions))
    assert len(list(root.iter("rect"))) == 5
    assert sum(e.attrib["class"] == "edge" for e in root.iter("path")) == 4


def test_whiskers_are_drawn_to_scale():
    versions = [VersionCard("v0", None, "base", score=Score(0.5, (0.4, 0.6)))]
    root = ElementTree.fromstring(dot_whisker(versions))
    (whisker,) = (e for e in root.iter("path") if "whisker" in e.attrib["class"])
    (dot,) = root.iter("circle")
    start, end = map(float, re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", whisker.attrib["d"])[0])
    assert float(dot.attrib["cx"]) == pytest.approx((start + end) / 2, abs=0.1)


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_ticks_are_few_ordered_and_inside(low, span):
    got = ticks(low, low + span)
    assert len(got) <= 7 and got == sorted(set(got))
    assert all(low - 1e-6 * span <= t + 1e-9 and t - 1e-9 <= low + span * (1 + 1e-6) for t in got)


def test_diff_kinds_and_tints():
    text = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n--- b\n+++ c\n"
    kinds = [k for k, _ in diff_lines(text)]
    assert kinds == ["file", "file", "file", "hunk", "same", "remove", "add"]
    assert [tint(a) for a in (0.0, 0.1, 2.0, -0.6, float("nan"))] == ["t0", "p1", "p4", "n2", "t0"]
