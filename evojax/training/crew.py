"""The engine and the updater that a run has in every one of its processes.

With one process they are the plain ones. With several, process 0 holds those made here, which tell
the others what to do before they do it; the others hold plain ones and ``follow``. Every process
samples its share of the prompts, and all get all completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evojax import distributed
from evojax.config import AlgorithmConf, LoraConf, MeshConf
from evojax.errors import EvojaxError
from evojax.evidence.types import Completion
from evojax.grpo.pack import Packed
from evojax.grpo.update import State, Updater
from evojax.policy.compile_cache import enable_compile_cache
from evojax.policy.decoder import ModelConfig, Params
from evojax.policy.home import home_mesh
from evojax.policy.sharding import make_mesh
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine
from evojax.training import checkpoint
from evojax.training.interrupt import InterruptGuard

Samples = list[list[Completion]]


def make_engine(cfg: ModelConfig, pad_id: int, max_batch: int, mesh: MeshConf) -> EmbeddedEngine:
    """The run's engine, on this process's devices of the mesh; see ``EmbeddedEngine``."""
    home = home_mesh(make_mesh(mesh))
    if not distributed.several():
        return EmbeddedEngine(cfg, pad_id, max_batch, home)
    distributed.tell("engine", cfg, pad_id, max_batch, mesh)
    return SharedEngine(cfg, pad_id, max_batch, home)


def make_updater(
    cfg: ModelConfig,
    algorithm: AlgorithmConf,
    temperature: float,
    mesh: MeshConf,
    lora: LoraConf,
) -> Updater:
    """A version's updater, see ``Updater`` for the arguments."""
    if not distributed.several():
        return Updater(cfg, algorithm, temperature, mesh=make_mesh(mesh), lora=lora)
    distributed.tell("updater", cfg, algorithm, temperature, mesh, lora)
    return ToldUpdater(cfg, algorithm, temperature, mesh=make_mesh(mesh), lora=lora)


def save(directory: Path, step: int, state: State, meta: dict[str, Any]) -> None:
    """``checkpoint.save``, every process its part; two are kept."""
    if distributed.several():
        distributed.tell("save", directory, step)
    checkpoint.save(directory, step, state, meta, keep=2)


def restore(directory: Path, updater: Updater) -> checkpoint.Restored | None:
    """``checkpoint.restore`` of the newest training state, every process its part."""
    if distributed.several():
        distributed.tell("restore", directory)
    return checkpoint.restore(directory, updater.abstract_state())


class SharedEngine(EmbeddedEngine):
    """Process 0's engine: each process samples a share of the prompts."""

    def load_weights(self, params: Params, version: str) -> None:
        """See ``Engine``; weights that were not just gathered go to all processes."""
        known = params is _LATEST.weights
        distributed.tell("load_weights", None if known else distributed.shapes_of(params), version)
        super().load_weights(params if known else distributed.broadcast(params), version)
        if known:
            _LATEST.weights = None

    def generate(
        self,
        token_prompts: Sequence[np.ndarray],
        sampling: SamplingParams,
        n: int,
        seeds: Sequence[int],
    ) -> Samples:
        """See ``Engine``."""
        distributed.tell("generate", list(token_prompts), sampling, n, list(seeds))
        return _generate(super().generate, token_prompts, sampling, n, seeds)


def _generate(
    generate: Any,
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    n: int,
    seeds: Sequence[int],
) -> Samples:
    """Sample this process's share, then put the shares of all together.

    Raises:
        EvojaxError: a process's share was refused.
    """
    share = distributed.share_of
    try:
        mine = generate(share(prompts), sampling, n, share(seeds))
    except EvojaxError as error:
        mine = error
    found = distributed.exchange(mine)
    for part in found:
        if isinstance(part, EvojaxError):
            raise part
    return distributed.merged(found)


class ToldUpdater(Updater):
    """Process 0's updater: what touches devices is told to the others first."""

    def freeze(self, params: Params) -> None:
        """See ``Updater``."""
        distributed.tell("freeze", distributed.shapes_of(params))
        super().freeze(distributed.broadcast(params))

    def reference(self, params: Params) -> None:
        """See ``Updater``."""
        distributed.tell("reference", distributed.shapes_of(params))
        super().reference(distributed.broadcast(params))

    def init(self, params: Params) -> State:
        """See ``Updater``."""
        distributed.tell("init", distributed.shapes_of(params))
        return super().init(distributed.broadcast(params))

    def score_reference(self, packed: Packed) -> Packed:
        """See ``Updater``."""
        distributed.tell("score_reference", packed)
        return super().score_reference(packed)

    def score_old(self, state: State, packed: Packed) -> Packed:
        """See ``Updater``."""
        distributed.tell("score_old", packed)
        return super().score_old(state, packed)

    def weights(self, state: State) -> Params:
        """See ``Updater``."""
        distributed.tell("weights")
        _LATEST.weights = super().weights(state)
        return _LATEST.weights

    def trained(self, state: State) -> Params:
        """See ``Updater``."""
        if self.lora is None:
            return self.weights(state)
        distributed.tell("trained")
        return super().trained(state)

    def step(self, state: State, packed: Packed | None) -> tuple[State, dict[str, float]]:
        """See ``Updater``."""
        distributed.tell("step", packed)
        return super().step(state, packed)


class _Latest:
    """Weights that every process was just given, until its engine has them."""

    weights: Params | None = None


_LATEST = _Latest()


class _Hand:
    """What a process other than 0 does when it is told to, one method for each name."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._updater: Any = None
        self._state: Any = None

    def engine(self, cfg: ModelConfig, pad_id: int, max_batch: int, mesh: MeshConf) -> None:
        self._engine = EmbeddedEngine(cfg, pad_id, max_batch, home_mesh(make_mesh(mesh)))

    def load_weights(self, shapes: Any, version: str) -> None:
        params = _LATEST.weights if shapes is None else distributed.broadcast(shapes)
        self._engine.load_weights(params, version)
        if shapes is None:
            _LATEST.weights = None

    def generate(self, *request: Any) -> None:
        _generate(self._engine.generate, *request)

    def updater(
        self,
        cfg: ModelConfig,
        algorithm: AlgorithmConf,
        temperature: float,
        mesh: MeshConf,
        lora: LoraConf,
    ) -> None:
        self._state = None
        self._updater = Updater(cfg, algorithm, temperature, mesh=make_mesh(mesh), lora=lora)

    def freeze(self, shapes: Any) -> None:
        self._updater.freeze(distributed.broadcast(shapes))

    def reference(self, shapes: Any) -> None:
        self._updater.reference(distributed.broadcast(shapes))

    def init(self, shapes: Any) -> None:
        self._state = self._updater.init(distributed.broadcast(shapes))

    def score_reference(self, packed: Packed) -> None:
        self._updater.score_reference(packed)

    def score_old(self, packed: Packed) -> None:
        self._updater.score_old(self._state, packed)

    def weights(self) -> None:
        _LATEST.weights = self._updater.weights(self._state)

    def trained(self) -> None:
        self._updater.trained(self._state)

    def step(self, packed: Packed | None) -> None:
        self._state, _ = self._updater.step(self._state, packed)

    def save(self, directory: Path, step: int) -> None:
        checkpoint.save(directory, step, self._state, {}, keep=2)

    def restore(self, directory: Path) -> None:
        found = checkpoint.restore(directory, self._updater.abstract_state())
        self._state = None if found is None else found.state


def follow() -> None:
    """Do what process 0 tells, until it tells to stop."""
    enable_compile_cache()
    hand = _Hand()
    with InterruptGuard():  # process 0 gets the signal too, saves, and tells
        while True:
            name, args = distributed.hear()
            if name == "stop":
                return
            try:
                getattr(hand, name)(*args)
            except EvojaxError:
                continue  # process 0 met the same, and decides what comes next
