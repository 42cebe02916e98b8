"""From the rows of results.jsonl to ratios with n and spread: summary.json, the README table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from evojax.bench.shapes import SHAPES
from experiments.study import replace_block

Row = Mapping[str, Any]


def row_of(lines: Sequence[Mapping[str, Any]], job: Mapping[str, Any]) -> dict[str, Any]:
    """One results row from a side's JSON lines; the steps of the warm-up are left out.

    Raises:
        ValueError: steps are missing, or a step asked to be live was not.
    """
    *steps, process = lines
    if len(steps) != job["steps"] or "peak_rss_gb" not in process:
        raise ValueError(f"{job['steps']} steps and a last line were expected, got {len(lines)}")
    if job["reward"] == "live" and min(s["live_share"] for s in steps) < 1.0:
        raise ValueError("a group was dead although all were to be live")
    counted = steps[job["warmup"] :]
    row: dict[str, Any] = {"n": len(counted), **process}
    for name in ("step_s", "rollout_s", "update_s", "sync_s", "update_gflop"):
        values = [s[name] for s in counted if name in s]
        if values:
            row[name] = median(values)
    row["step_s_iqr"] = _iqr([s["step_s"] for s in counted])
    row["step_s_all"] = [round(s["step_s"], 3) for s in counted]
    row["response_tokens"] = _mean(s["response_tokens"] for s in counted)
    row["live_share"] = _mean(s["live_share"] for s in counted)
    row["natural_live_share"] = _mean(s["natural_live_share"] for s in counted)
    row["prompt_tokens"] = _mean(job["prompt_tokens"])
    padded = [1 - s["tokens_packed"] / s["tokens_padded"] for s in counted if "tokens_padded" in s]
    if padded:
        row["padding_share"] = median(padded)
        row["shared_share"] = median(
            [
                1 - s["tokens_packed"] / s["tokens_sequences"]
                for s in counted
                if "tokens_padded" in s
            ]
        )
    if "update_gflop" in row:
        row["update_gflop_per_s"] = row["update_gflop"] / row["update_s"]
        row["update_to_matmul"] = row["update_gflop_per_s"] / process["matmul_gflop_per_s"]
    return row


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _iqr(values: Sequence[float]) -> float:
    """Third quartile less first, between neighbours in proportion.

    >>> _iqr([1.0, 2.0, 3.0, 4.0, 5.0])
    2.0
    """
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.75) - at(0.25)


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each shape, reward, dtype of evojax and dtype of the peer that were measured.

    ``ratio = median over repeats of the peer's step seconds / the same of evojax's``; its range is
    that of the ratios within single repeats, whose sides ran one after the other.
    """
    runs = [r for r in rows if r["kind"] == "run"]

    def by_repeat(side: str, shape: str, reward: str, dtype: str) -> dict[int, Row]:
        wanted = (side, shape, reward, dtype)
        return {
            r["repeat"]: r
            for r in runs
            if (r["side"], r["shape"], r["reward"], r["dtype"]) == wanted
        }

    out = []
    for shape, reward in sorted({(r["shape"], r["reward"]) for r in runs}, key=_in_order):
        for dtype, peer_dtype in product(("f32", "bf16"), repeat=2):
            mine = by_repeat("evojax", shape, reward, dtype)
            theirs = by_repeat("trl", shape, reward, peer_dtype)
            pairs = [
                (mine[k], theirs[k])
                for k in sorted(mine.keys() & theirs.keys())
                if mine[k]["items_sha256"] == theirs[k]["items_sha256"]
            ]
            if pairs:
                what = {"shape": shape, "reward": reward, "dtype": dtype, "peer_dtype": peer_dtype}
                out.append(what | _entry(pairs))
    return out


def _in_order(key: tuple[str, str]) -> tuple[int, str]:
    """Shapes from short to long."""
    return [*SHAPES].index(key[0]), key[1]


def _entry(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    single = [theirs["step_s"] / mine["step_s"] for mine, theirs in pairs]
    entry: dict[str, Any] = {"repeats": len(pairs), "steps_each": pairs[0][0]["n"]}
    for side, rows in (("evojax", [p[0] for p in pairs]), ("trl", [p[1] for p in pairs])):
        entry[side] = {
            name: median([r[name] for r in rows])
            for name in ("step_s", "rollout_s", "update_s", "peak_rss_gb", "live_share")
        }
        entry[side]["step_s_range"] = [
            min(r["step_s"] for r in rows),
            max(r["step_s"] for r in rows),
        ]
    for name in ("update_gflop_per_s", "update_to_matmul", "matmul_gflop_per_s", "padding_share"):
        values = [p[0][name] for p in pairs if name in p[0]]
        entry["evojax"][name] = median(values) if values else None
    entry["ratio"] = entry["trl"]["step_s"] / entry["evojax"]["step_s"]
    entry["ratio_range"] = [min(single), max(single)]
    entry["trl_micro"] = pairs[0][1]["micro"]
    return entry


def markdown(entries: Sequence[Mapping[str, Any]]) -> str:
    """The table of the README, one line an entry."""
    lines = [
        "| shape | rewards | evojax, s a step | TRL, s a step | ratio [range] | n | peak GB "
        "| update / matmul |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for e in entries:
        mine, theirs = e["evojax"], e["trl"]
        share = mine["update_to_matmul"]
        lines.append(
            f"| {e['shape']} | {e['reward']} | {e['dtype']}: {_seconds(mine)} "
            f"| {e['peer_dtype']}: {_seconds(theirs)} "
            f"| {e['ratio']:.2f} [{e['ratio_range'][0]:.2f}, {e['ratio_range'][1]:.2f}] "
            f"| {e['repeats']} x {e['steps_each']} "
            f"| {mine['peak_rss_gb']:.1f}, {theirs['peak_rss_gb']:.1f} "
            f"| {'' if share is None else f'{share:.0%}'} |"
        )
    return "\n".join(lines)


def _seconds(side: Mapping[str, Any]) -> str:
    return f"{side['step_s']:.2f} ({side['rollout_s']:.2f} + {side['update_s']:.2f})"


def write(rows: Sequence[Row], directory: Path, front: Path) -> None:
    """summary.json, and the table in the study's README and on the ``front`` page."""
    entries = summarise(rows)
    (directory / "summary.json").write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    replace_block(directory / "README.md", markdown(entries))
    replace_block(front, markdown(entries), "speed")
