"""What a run is computed on, in words."""

from __future__ import annotations

from typing import Any


def hardware_words(hardware: Any) -> str:
    """What a run is spread over, in one sentence.

    >>> from evojax.config import HardwareConf, MeshConf
    >>> hardware_words(HardwareConf(mesh=MeshConf(fsdp=4)))
    'Hardware local: a mesh of data 1 x fsdp 4 x tp 1 devices, in one process.'
    """
    sizes = " x ".join(f"{axis} {getattr(hardware.mesh, axis)}" for axis in ("data", "fsdp", "tp"))
    processes = "several processes" if hardware.distributed else "one process"
    return f"Hardware {hardware.name}: a mesh of {sizes} devices, in {processes}."


def hardware_notes(hardware: Any) -> list[str]:
    """What a reader of the results must know of it: nothing of one device of one process."""
    mesh = hardware.mesh
    several = mesh.data * mesh.fsdp * mesh.tp > 1 or hardware.distributed
    return [hardware_words(hardware)] if several else []
