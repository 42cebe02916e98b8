"""A plan as data, and as tables on the terminal."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from evojax.plan import advice, rates
from evojax.plan.case import GIGA, Case, row_shape
from evojax.plan.compiler import Compiled
from evojax.plan.memory import memory
from evojax.policy.shape import num_params

SCHEMA = 1
_SHOWN_CHANGES = 6
_REFUSED = 1.05  # of the limit: what is taken to be needed where a compiler found no room


@dataclass(frozen=True)
class Verdict:
    """Whether the plan fits, and who says so.

    Args:
        peak: bytes of the fullest device. by: what was asked: the compiler, or the count.
        refused: the compiler found no room for a program.
    """

    peak: float
    limit: float
    by: str
    refused: bool = False

    @property
    def fits(self) -> bool:
        """Whether it is within the limit."""
        return self.peak <= self.limit and not self.refused


def verdict(case: Case, compiled: Compiled) -> Verdict:
    """From the compiler where it knows the chip, else from the count, phase by phase.

    The compiler sees one program at a time: what the other one keeps on the device is added.
    """
    counted, report = memory(case), compiled.report
    stays = counted.resident
    state = sum(stays[name] for name in ("weights", "adapters", "optimizer"))
    own = {"update": state, "rollout": stays["engine_weights"]}
    added = {"update": counted.update, "rollout": counted.rollout}
    peaks, asked = [sum(stays.values()) + sum(counted.sync.values())], 0
    for name, kept in own.items():
        here = kept + sum(added[name].values())
        if name in report and report["for"] != "cuda":
            here, asked = report[name]["device_bytes"], asked + 1
        peaks.append(here + sum(stays.values()) - kept)
    by = ("count", "compiler and the count", "compiler")[asked]
    if any(f"{name}_too_large" in report for name in own):
        return Verdict(max(peaks), counted.limit, "compiler, which found no room; counted", True)
    return Verdict(max(peaks), counted.limit, by)


def _phase(phase: rates.Phase, case: Case) -> dict[str, Any]:
    row = dataclasses.asdict(phase) | {"seconds": phase.seconds, "bound": phase.bound}
    row["tokens_per_s"] = phase.tokens / phase.seconds
    return row | {"tokens_per_s_chip": row["tokens_per_s"] / case.chips}


def plan_data(name: str, policy: str, case: Case, compiled: Compiled) -> dict[str, Any]:
    """Everything that a plan says, JSON-ready.

    Args:
        name: of the hardware. policy: its source, in words.
    """
    counted, found = memory(case), verdict(case, compiled)
    update, rollout = rates.update(case), rates.rollout(case)
    rows = -(-case.work.groups // case.work.micro_groups)
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "hardware": {"name": name, "chips": case.chips, "processes": case.processes}
        | {"mesh": dict(zip(("data", "fsdp", "tp"), case.mesh, strict=True))}
        | dataclasses.asdict(case.chip),
        "policy": {"name": policy, "parameters": num_params(case.model)}
        | dataclasses.asdict(case.model),
        "work": dataclasses.asdict(case.work),
        "row": dataclasses.asdict(row_shape(case)) | {"micro_batches": rates.micro_batches(case)},
        "memory": {
            "resident": counted.resident,
            "update": counted.update,
            "sync": counted.sync,
            "rollout": counted.rollout,
            "counted_peak": counted.peak,
        },
        "fits": found.fits,
        "peak_bytes": found.peak,
        "limit_bytes": found.limit,
        "peak_by": found.by,
        "update": _phase(update, case),
        "rollout": _phase(rollout, case),
        "step_s": update.seconds + rollout.seconds,
        "compiled": compiled.report,
        "compiled_not_run": compiled.why,
        "compile_process_s": compiled.seconds,
        "remarks": advice.remarks(case, rows),
    }
    return data | _advice(case, found)


def _advice(case: Case, found: Verdict) -> dict[str, Any]:
    if found.fits:
        return {"changes": [], "together": None, "chips_needed": case.chips}
    # What the compiler finds beyond the count is kept in mind: the changes must save that too.
    counted = memory(case).peak
    extra = max(found.peak - counted, _REFUSED * found.limit - counted if found.refused else 0.0)
    tight = dataclasses.replace(
        case, chip=dataclasses.replace(case.chip, memory=case.chip.memory - extra)
    )
    single = [
        {"overrides": list(one.overrides), "peak_bytes": one.peak + extra, "fits": one.fits}
        for one in advice.single_changes(tight)
    ]
    all_of_them = advice.together(tight)
    return {
        "changes": single,
        "together": None
        if all_of_them is None
        else {"overrides": list(all_of_them.overrides), "peak_bytes": all_of_them.peak + extra},
        "chips_needed": advice.chips_needed(tight),
    }


def gigabytes(value: float) -> str:
    """
    >>> gigabytes(1.234e9), gigabytes(2.5e6)
    ('1.23 GB', '0.00 GB')
    """
    return f"{value / GIGA:.2f} GB"


def seconds(value: float) -> str:
    """
    >>> seconds(0.0123), seconds(75.0)
    ('12.3 ms', '75.0 s')
    """
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def show(data: dict[str, Any], console: Console) -> None:
    """The plan on a console."""
    _show_head(data, console)
    _show_memory(data, console)
    _show_times(data, console)
    _show_compiled(data, console)
    for remark in data["remarks"]:
        console.print(f"Note: {remark}", highlight=False)
    _show_verdict(data, console)


def _show_head(data: dict[str, Any], console: Console) -> None:
    hardware, work, policy = data["hardware"], data["work"], data["policy"]
    mesh = " x ".join(f"{name} {size}" for name, size in hardware["mesh"].items())
    console.print(
        f"{policy['name']}: {policy['parameters'] / GIGA:.3f} G parameters, {policy['family']}, "
        f"{policy['compute_dtype']}, remat {policy['remat']}\n"
        f"{hardware['name']}: {hardware['chips']} chips, {hardware['processes']} processes, "
        f"mesh {mesh}, {gigabytes(hardware['memory'])} each\n"
        f"A step: {work['groups']} prompts x {work['samples']} responses, "
        f"{work['prompt']} + {work['new']} tokens, {data['row']['micro_batches']} micro-batches",
        highlight=False,
    )


def _show_memory(data: dict[str, Any], console: Console) -> None:
    table = Table("memory of the fullest device", "GB, counted", "when")
    for phase in ("resident", "update", "sync", "rollout"):
        for name, size in data["memory"][phase].items():
            if size:
                words = "always" if phase == "resident" else phase
                table.add_row(name.replace("_", " "), f"{size / GIGA:.2f}", words)
    table.add_row("peak", f"{data['memory']['counted_peak'] / GIGA:.2f}", "", style="bold")
    console.print(table)


def _show_times(data: dict[str, Any], console: Console) -> None:
    table = Table(
        "roofline", "TFLOP", "compute", "memory", "links", "sent, GB", "bound", "tokens/s"
    )
    for name in ("update", "rollout"):
        row = data[name]
        table.add_row(
            name,
            f"{row['flops'] / 1e12:.1f}",
            *(seconds(row[f"{part}_s"]) for part in ("compute", "memory", "links")),
            f"{row['link_bytes'] / GIGA:.2f}",
            row["bound"],
            f"{row['tokens_per_s']:.0f}",
        )
    console.print(table)
    console.print(
        f"A step at least {seconds(data['step_s'])}: every unit at its published peak, everything "
        "overlapped.",
        highlight=False,
    )


def _show_compiled(data: dict[str, Any], console: Console) -> None:
    report = data["compiled"]
    if data["compiled_not_run"]:
        console.print(f"Not compiled: {data['compiled_not_run']}.", highlight=False)
    programs = [name for name in ("update", "rollout") if name in report]
    if not programs:
        return
    table = Table(
        f"compiled for {report['for']} ({report['device']})",
        "device GB", "arguments", "temporary", "collectives", "compile",
    )  # fmt: skip
    for name in programs:
        row = report[name]
        kinds = [f"{k} {v['runs']}x {gigabytes(v['bytes'])}" for k, v in row["collectives"].items()]
        table.add_row(
            name,
            f"{row['device_bytes'] / GIGA:.2f}",
            f"{row['memory']['arguments'] / GIGA:.2f}",
            f"{row['memory']['temporary'] / GIGA:.2f}",
            "\n".join(kinds) or "none",
            seconds(row["compile_s"]),
        )
    console.print(table)
    if "update" in report:
        _show_promises(report["update"], console)
    if "cross_lowered" in report:
        console.print(
            "Lowered for CUDA; collectives are those of as many CPU devices, and the memory above "
            "is the CPU compiler's. No GPU compiler was asked.",
            highlight=False,
        )


def _show_promises(update: dict[str, Any], console: Console) -> None:
    donated = "in place" if update["donated"] else "NOT in place"
    gathered = update["gathers_logits"]
    words = f"gathers whole logits: {', '.join(gathered)}" if gathered else "gathers no logits"
    console.print(f"The update writes its state {donated} and {words}.", highlight=False)


def _show_verdict(data: dict[str, Any], console: Console) -> None:
    room = f"{gigabytes(data['peak_bytes'])} of {gigabytes(data['limit_bytes'])}"
    if data["fits"]:
        console.print(f"FITS: {room} a device, by the {data['peak_by']}.", style="bold green")
        return
    console.print(f"DOES NOT FIT: {room} a device, by the {data['peak_by']}.", style="bold red")
    table = Table("change", "GB then", "fits")
    for one in data["changes"][:_SHOWN_CHANGES]:
        fits = "yes" if one["fits"] else "no"
        table.add_row(" ".join(one["overrides"]), f"{one['peak_bytes'] / GIGA:.2f}", fits)
    console.print(table)
    if data["together"] is not None:
        words = " ".join(data["together"]["overrides"])
        console.print(f"Enough: {words} ({gigabytes(data['together']['peak_bytes'])})")
    if data["chips_needed"] is not None:
        console.print(f"As it is, it takes {data['chips_needed']} such chips.", highlight=False)
    elif data["together"] is None:
        console.print("No number of such chips helps: what does not fit is not cut over them.")
