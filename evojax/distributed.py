"""Several processes, one program: process 0 runs it, the others mirror its work on devices.

Process 0 is the only one that decides, reads problems, grades and writes git, ledger, evidence and
report. What all devices must do together it tells the others first: a name and arguments, see
``evojax.training.crew``. Messages go through the key-value store of ``jax.distributed``, where
waiting costs nothing; what is large follows by a collective.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from evojax.errors import InputError

_INLINE = 1 << 16  # bytes of a message that need no collective
_PATIENCE_MS = 60_000  # of one look for a message; there is no limit to the looks
_TOLD = itertools.count()
_HEARD = itertools.count()
Tree = Any


def join() -> bool:
    """Meet the other processes, once; whether this one is process 0.

    Address, number of processes and number of this one come from the cluster (Slurm, TPU, Open
    MPI, Kubernetes) or from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
        InputError: neither says them.
    """
    if not jax.distributed.is_initialized():
        names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
        try:
            given: dict[str, Any] = {
                k: int(os.environ[name]) for k, name in names.items() if name in os.environ
            }
            jax.distributed.initialize(**given)
        except (ValueError, RuntimeError) as error:
            raise InputError.one(
                f"the other processes cannot be found: {error}",
                "hardware.distributed",
                True,
                "start it under Slurm, on a TPU pod, or with JAX_COORDINATOR_ADDRESS, "
                "JAX_NUM_PROCESSES and JAX_PROCESS_ID",
            ) from error
    return jax.process_index() == 0


def several() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _client() -> Any:
    from jax._src import distributed  # the key-value store has no public name

    return distributed.global_state.client


def tell(name: str, *args: Any) -> None:
    """Process 0: the next thing that all processes do."""
    message = pickle.dumps((name, args))
    inline = len(message) <= _INLINE
    header = pickle.dumps((len(message), message if inline else None))
    number = next(_TOLD)
    _client().key_value_set_bytes(f"evojax/{number}", header)
    if not inline:
        _shared(np.frombuffer(message, np.uint8))


def dismiss() -> None:
    """Process 0: the others may end."""
    if several():
        tell("stop")


def hear() -> tuple[str, tuple[Any, ...]]:
    """The others: what process 0 told next, however long it takes."""
    key = f"evojax/{next(_HEARD)}"
    while True:
        try:
            size, message = pickle.loads(_client().blocking_key_value_get_bytes(key, _PATIENCE_MS))
            break
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    if message is None:
        message = _shared(np.zeros(size, np.uint8)).tobytes()
    return pickle.loads(message)


def _shared(data: np.ndarray) -> np.ndarray:
    """Bytes of process 0 in every process; padded, so that few programs are compiled."""
    padded = np.zeros(1 << max(len(data) - 1, 1).bit_length(), np.uint8)
    padded[: len(data)] = data
    return np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)[: len(data)]


def shapes_of(tree: Tree) -> Tree:
    """What the others need to know to receive a tree: shapes and types."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def broadcast(tree: Tree) -> Tree:
    """Arrays of process 0 in every process, leaf by leaf.

    Args:
        tree: process 0 gives the arrays, the others their ``shapes_of``.
    """

    def one(x: Any) -> np.ndarray:
        mine = np.asarray(x) if jax.process_index() == 0 else np.zeros(x.shape, x.dtype)
        return multihost_utils.broadcast_one_to_all(mine)

    return jax.tree.map(one, tree)


def exchange(value: Any) -> list[Any]:
    """Every process's value, in the order of the processes."""
    if not several():
        return [value]
    mine = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(mine)], np.int32)).reshape(-1)
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: len(mine)] = mine
    rows = np.asarray(multihost_utils.process_allgather(padded), np.uint8)
    rows = rows.reshape(len(sizes), -1)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def is_first() -> bool:
    """Whether this is process 0, or the only one."""
    return not several() or jax.process_index() == 0


def agreed(number: int) -> int:
    """Process 0's number in every process."""
    return exchange(number)[0]


def share_of(values: Sequence[Any]) -> list[Any]:
    """This process's part of a list; ``merged`` puts the parts together again."""
    return list(values[jax.process_index() :: jax.process_count()])


def merged(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """What ``share_of`` took apart.

    >>> merged([["a", "c", "e"], ["b", "d"]])
    ['a', 'b', 'c', 'd', 'e']
    """
    total, count = sum(map(len, parts)), len(parts)
    return [parts[i % count][i // count] for i in range(total)]
