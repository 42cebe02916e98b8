"""What to change when a plan does not fit: each remedy tried alone, then one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from evojax.errors import InputError
from evojax.plan.case import Case
from evojax.plan.memory import memory

_LORA = ("q", "k", "v", "o", "gate", "up", "down")
_RANK = 16
_MOST_CHIPS = 4096
_MOST_CHANGES = 16


@dataclass(frozen=True)
class Remedy:
    """One change of the configuration.

    Args:
        overrides: as typed on the command line. case: what is planned with it.
        peak: bytes of the fullest device then. fits: whether that is enough.
    """

    overrides: tuple[str, ...]
    case: Case
    peak: float
    fits: bool


def _with_model(case: Case, **changes: str) -> Case:
    return dataclasses.replace(case, model=dataclasses.replace(case.model, **changes))


def _with_work(case: Case, **changes: int) -> Case:
    return dataclasses.replace(case, work=dataclasses.replace(case.work, **changes))


def _meshes(case: Case) -> Iterator[tuple[int, int, int]]:
    """Other meshes of the same chips: more cuts of the weights, then heads cut over 2, 4, 8."""
    for tp in (1, 2, 4, 8):
        if case.chips % tp == 0:
            mesh = (1, case.chips // tp, tp)
            if mesh != case.mesh:
                yield mesh


def changes(case: Case) -> Iterator[tuple[tuple[str, ...], Case]]:
    """Every single change that can save memory, the cheapest in quality and time first."""
    if case.model.compute_dtype != "bfloat16":
        yield ("policy.compute_dtype=bfloat16",), _with_model(case, compute_dtype="bfloat16")
    if case.model.remat != "full":
        yield ("policy.remat=full",), _with_model(case, remat="full")
    if case.work.micro_groups > 1:
        yield ("train.micro_batch_groups=1",), _with_work(case, micro_groups=1)
    if case.work.max_batch > case.work.samples:
        rows = case.work.samples
        yield (f"rollout.max_batch={rows}",), _with_work(case, max_batch=rows)
    for data, fsdp, tp in _meshes(case):
        words = (f"hardware.mesh={{data:{data},fsdp:{fsdp},tp:{tp}}}",)
        yield words, dataclasses.replace(case, mesh=(data, fsdp, tp))
    if case.optimizer != "adafactor":
        words = ("algorithm.optimizer=adafactor",)
        yield words, dataclasses.replace(case, optimizer="adafactor")
    if not case.lora_rank:
        words = (f"policy.lora.rank={_RANK}",)
        yield words, dataclasses.replace(case, lora_rank=_RANK, lora_targets=_LORA)
    if case.work.new > 64:
        half = case.work.new // 2
        yield (f"sampling.max_new_tokens={half}",), _with_work(case, new=half)


def _weighed(words: tuple[str, ...], case: Case) -> Remedy | None:
    """The change with its peak; None for a mesh that does not divide the weights."""
    try:
        found = memory(case)
    except InputError:
        return None
    return Remedy(words, case, found.peak, found.fits)


def single_changes(case: Case) -> list[Remedy]:
    """Changes that save memory by themselves, the most saving first."""
    before = memory(case).peak
    tried = (_weighed(words, changed) for words, changed in changes(case))
    found = [one for one in tried if one is not None and one.peak < before]
    return sorted(found, key=lambda one: one.peak)


def together(case: Case) -> Remedy | None:
    """Changes that are enough together; None when all of them are not.

    They are added in the order of ``changes``, so what costs least comes first, each only if it
    saves something on top of the others. Then those without which it fits too are left out again.
    """
    taken: list[tuple[str, ...]] = []
    here, peak = case, memory(case).peak
    while True:
        better = (_weighed(words, changed) for words, changed in changes(here))
        step = next((one for one in better if one is not None and one.peak < 0.99 * peak), None)
        if step is None or len(taken) == _MOST_CHANGES:
            return None
        taken, here, peak = [*taken, step.overrides], step.case, step.peak
        if step.fits:
            return _fewest(case, taken)


def _fewest(case: Case, taken: list[tuple[str, ...]]) -> Remedy | None:
    """The changes in ``taken`` without those that are not needed, the first ones tried last."""
    for words in reversed(taken[:-1]):
        fewer = [other for other in taken if other != words]
        if (one := _applied(case, fewer)) is not None and one.fits:
            taken = fewer
    return _applied(case, taken)


def _applied(case: Case, taken: list[tuple[str, ...]]) -> Remedy | None:
    """All changes in ``taken``, one on top of the other; None when one is no longer offered."""
    words: tuple[str, ...] = ()
    for wanted in taken:
        found = next((changed for offered, changed in changes(case) if offered == wanted), None)
        if found is None:
            return None
        words, case = _merged(words, wanted), found
    return _weighed(words, case)


def _merged(words: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides with a later value of the same key in place of the earlier one."""
    table = dict(word.split("=", 1) for word in (*words, *more))
    return tuple(f"{key}={value}" for key, value in table.items())


def chips_needed(case: Case) -> int | None:
    """The smallest doubling of the chips with which the case fits as it is; None if none does."""
    factor = 2
    while case.chips * factor <= _MOST_CHIPS:
        data, fsdp, tp = case.mesh
        larger = dataclasses.replace(
            case, chips=case.chips * factor, mesh=(data, fsdp * factor, tp)
        )
        one = _weighed((), larger)
        if one is not None and one.fits:
            return larger.chips
        factor *= 2
    return None


def remarks(case: Case, rows: int) -> list[str]:
    """What is worth knowing beside the numbers.

    Args:
        rows: rows of the batch that hold groups.
    """
    found = []
    if (spare := -rows % case.rows_abreast) and rows:
        found.append(
            f"{spare} of the {rows + spare} rows of a pass are empty: a step has {rows} rows of "
            f"train.micro_batch_groups={case.work.micro_groups} groups for {case.rows_abreast} "
            "shards of the batch. Raise train.prompts_per_step, or lower data x fsdp for more tp."
        )
    if case.model.compute_dtype == "float32":
        found.append(
            "policy.compute_dtype is float32: the times assume the chip's bfloat16 rate, which "
            "float32 products do not reach."
        )
    return found
