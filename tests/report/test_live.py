"""The live view, on a recording terminal and on a plain stream."""

from __future__ import annotations

import io

from rich.console import Console

from evojax.report.live import LiveView, duration, one_line, sparkline


class Clock:
    """Seconds that only move when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=False, width=200), stream


def terminal() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=True, width=100, record=True, _environ={"TERM": "xterm"}
    )
    return console, stream


def test_plain_lines_without_control_codes() -> None:
    console, stream = plain()
    clock = Clock()
    with LiveView(True, 4, console, clock) as view:
        view.phase("train", "v001")
        clock.now = 10.0
        view.step("v001", 1, 4, 0.25, 0.5, 123.4)
        view.note("promoted: v002")
    assert stream.getvalue().splitlines() == [
        "v001 train",
        "v001 step 1/4, reward 0.250, dead groups 50%, tokens/s 123, ETA 30 s",
        "promoted: v002",
    ]
    assert "\x1b" not in stream.getvalue()


def test_plain_mode_shows_at_most_one_step_a_second_and_the_last() -> None:
    console, stream = plain()
    clock = Clock()
    with LiveView(True, 100, console, clock) as view:
        view.phase("train", "v001")
        for step in range(1, 31):
            clock.now += 0.1
            view.step("v001", step, 30, 0.0, 0.0, 1.0)
    shown = [line.split()[2] for line in stream.getvalue().splitlines()[1:]]
    assert shown[0] == "1/30," and shown[-1] == "30/30," and len(shown) <= 5


def test_disabled_view_is_plain_on_a_terminal_too() -> None:
    console, stream = terminal()
    with LiveView(False, 1, console, Clock()) as view:
        view.phase("train", "v001")
    assert stream.getvalue() == "v001 train\n"


def test_model_text_is_neither_markup_nor_control_code() -> None:
    hostile = "[bold red]x[/] [/nope] \x1b[2J\x07 \u202e \nnew"
    console, stream = plain()
    with LiveView(True, 1, console) as view:
        view.note(hostile)
    line = stream.getvalue()
    assert line == "[bold red]x[/] [/nope] \\x1b[2J\\x07 \\u202e \\nnew\n"
    console, stream = terminal()
    with LiveView(True, 1, console) as view:
        view.phase("[red]", "[/]")
        view.note(hostile)
    text = console.export_text()
    assert "[bold red]x[/] [/nope] \\x1b[2J\\x07" in text and "[red]" in text
    assert "\x1b[2J" not in stream.getvalue() and "\x07" not in stream.getvalue()


def test_live_panel_shows_numbers_and_notes() -> None:
    console, stream = terminal()
    clock = Clock()
    with LiveView(True, 4, console, clock) as view:
        view.phase("train", "v001")
        clock.now = 2.0
        view.step("v001", 1, 4, 0.25, 0.5, 123.4)
        clock.now = 4.0
        view.step("v001", 2, 4, 0.75, 0.25, 123.4)
        view.note("a note stays")
        view.close()
    text = stream.getvalue()
    assert "\x1b" in text
    for part in ("v001", "train", "2/4", "0.750", "25%", "123", "4 s", "▁█", "a note stays"):
        assert part in text, part


def test_the_eta_is_measured() -> None:
    clock = Clock()
    view = LiveView(True, 10, plain()[0], clock)
    assert view.eta() == "?"
    with view:
        for step, now in enumerate((3.0, 8.0, 12.0), 1):
            clock.now = now
            view.step("v001", step, 5, 0.0, 0.0, 0.0)
        assert view.eta() == "28 s"
        view.phase("evaluate", "v001")
        clock.now = 100.0
        view.phase("train", "v002")
        clock.now = 104.0
        view.step("v002", 1, 5, 0.0, 0.0, 0.0)
        assert view.eta() == "24 s"


def test_a_stream_without_unicode_gets_escapes() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with LiveView(True, 1, Console(file=stream, force_terminal=False)) as view:
        view.note("naïve")
    assert raw.getvalue() == b"na\\xefve\n"


def test_the_view_closes_when_the_run_fails() -> None:
    console, _ = terminal()
    view = LiveView(True, 1, console)
    try:
        with view:
            raise KeyError("x")
    except KeyError:
        pass
    assert view._live is not None and not view._live.is_started
    view.close()


def test_helpers() -> None:
    assert sparkline([]) == "" and sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert duration(59.6) == "1 min 00 s" and duration(3600) == "1 h 00 min"
    assert one_line("plain é") == "plain é"
