"""What a compiled program sends between devices, read from its text.

A compiled module is a list of computations; ``while``, ``call``, ``conditional`` and ``fusion``
refer to others by name. Collectives are counted as often as the loops around them turn; a loop
whose number of turns is not in the text (that over micro-batches) counts once.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
KINDS += ("collective-broadcast", "ragged-all-to-all")

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s*(.*)\{\s*$")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ASYNC = re.compile(r"called_computations=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_BELOW = re.compile(r"^\s*ROOT .* compare\(.*[ %]([\w.\-]+)\), direction=LT")
_CONSTANT = re.compile(r"^\s*%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_SCATTER = "all-reduce-scatter"  # how a TPU's program names a fused reduce-scatter
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf"=\s*(.*?)\s({'|'.join(KINDS)})(-start)?\(")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Args:
        kind: in ``KINDS``. shapes: of the results, e.g. ``f32[8,16]``.
        bytes: of the results on one device. times: how often it runs, see the module's text.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    times: int


def array_bytes(kind: str, dimensions: str) -> int:
    """Bytes of an array type.

    >>> array_bytes("f32", "2,3"), array_bytes("bf16", "8"), array_bytes("pred", "")
    (24, 16, 1)
    """
    size = math.prod(int(part) for part in dimensions.split(",") if part)
    found = _BITS.search(kind)
    bits = 8 if kind == "pred" or found is None else int(found[0])
    return -(-size * bits // 8)


@dataclass(frozen=True)
class Computation:
    """One computation: the type of its result, and its instructions, a line each."""

    result: str
    lines: list[str]


def computations(text: str) -> tuple[dict[str, Computation], str]:
    """Every computation by name, and the name of the entry."""
    found: dict[str, Computation] = {}
    name, entry = "", ""
    for line in text.splitlines():
        if not line.startswith((" ", "}")) and (match := _HEADER.match(line)):
            name = match[2]
            found[name] = Computation(match[3], [])
            entry = name if match[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name:
            found[name].lines.append(line)
    return found, entry


def _bound(condition: Computation) -> int:
    """Turns of a loop that counts from 0 to a constant; 1 for any other."""
    constants = {m[1]: m[2] for line in condition.lines if (m := _CONSTANT.match(line))}
    for line in condition.lines:
        if (match := _BELOW.match(line)) and match[1] in constants:
            return int(constants[match[1]])
    return 1


def _calls(line: str, parts: dict[str, Computation]) -> tuple[list[str], int]:
    """Computations that an instruction runs, and how often."""
    names = _CALLED.findall(line)
    for group in (*_BRANCHES.findall(line), *_ASYNC.findall(line)):
        names += [part.strip().lstrip("%") for part in group.split(",")]
    if " while(" not in line:
        return names, 1
    if turns := _TURNS.search(line):
        return names, int(turns[1])
    condition = _CONDITION.search(line)
    return names, _bound(parts[condition[1]]) if condition and condition[1] in parts else 1


def _turns(parts: dict[str, Computation], entry: str) -> dict[str, int]:
    """How often each computation runs when the program runs once."""
    times: defaultdict[str, int] = defaultdict(int)
    waiting = [(entry, 1)] if entry else []
    while waiting:
        name, count = waiting.pop()
        times[name] += count
        for line in parts[name].lines:
            names, turns = _calls(line, parts)
            waiting += [(called, count * turns) for called in names if called in parts]
    return dict(times)


def _collective(line: str, times: int) -> Collective | None:
    match = _COLLECTIVE.search(line)
    if match is None:
        return None
    arrays = _ARRAY.findall(match[1])
    if match[3] and len(arrays) > 1 and match[2] != "all-reduce":
        arrays = arrays[len(arrays) // 2 :] if match[2] != "collective-permute" else arrays[1:2]
    return _of(match[2], arrays, times)


def _of(kind: str, arrays: list[tuple[str, str]], times: int) -> Collective:
    shapes = tuple(f"{kind}[{dims}]" for kind, dims in arrays)
    return Collective(kind, shapes, sum(array_bytes(k, d) for k, d in arrays), times)


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program.

    Args:
        text: of the optimized module (``jax.stages.Compiled.as_text()``).

    >>> module = '''HloModule m
    ... ENTRY %main (p: f32[4]) -> f32[8] {
    ...   %p = f32[4]{0} parameter(0)
    ...   ROOT %g = f32[8]{0} all-gather(%p), dimensions={0}
    ... }
    ... '''
    >>> collectives(module)
    [Collective(kind='all-gather', shapes=('f32[8]',), bytes=32, times=1)]
    """
    parts, entry = computations(text)
    times = _turns(parts, entry)
    found = []
    for name, part in parts.items():
        for line in part.lines if name in times else ():
            if (one := _collective(line, times[name])) is not None:
                if name.startswith(_SCATTER) and one.kind == "all-reduce":
                    one = _of("reduce-scatter", _ARRAY.findall(part.result), times[name])
                found.append(one)
    return found


def totals(found: list[Collective]) -> dict[str, dict[str, int]]:
    """Places in the program, runs, and bytes of the results, by kind."""
    table: dict[str, dict[str, int]] = {}
    for one in found:
        row = table.setdefault(one.kind, {"places": 0, "runs": 0, "bytes": 0})
        row["places"] += 1
        row["runs"] += one.times
        row["bytes"] += one.bytes * one.times
    return table


def gathering(found: list[Collective], rows: int, vocabulary: int, hidden: int) -> list[Collective]:
    """Gathers of whole logits: results with the vocabulary in their shape and a row each slot.

    The output matrix has the vocabulary in its shape too, and may be gathered.

    Args:
        rows: scored positions of a device. hidden: width of the model.
    """

    def is_logits(shape: str) -> bool:
        sizes = [int(n) for n in shape[shape.index("[") + 1 : -1].split(",") if n]
        is_matrix = hidden in sizes and math.prod(sizes) == vocabulary * hidden
        large = math.prod(sizes) >= rows * vocabulary
        return vocabulary in sizes and large and not is_matrix

    moved = [one for one in found if one.kind in ("all-gather", "all-to-all")]
    return [one for one in moved if any(is_logits(shape) for shape in one.shapes)]
