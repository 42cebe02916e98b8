"""Probes that train and evaluate a tiny model by the code that a real run uses."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jax
import numpy as np

from evojax.config import EvojaxConf
from evojax.domains.base import Domain
from evojax.evidence.reader import load as load_evidence
from evojax.evidence.types import FinishReason, Grade, Item
from evojax.evolution.workshop import Workshop
from evojax.grpo import update as update_module
from evojax.lint.trail import Trail, digest
from evojax.policy.decoder import ModelConfig
from evojax.report.live import LiveView
from evojax.rollout.embedded import EmbeddedEngine
from evojax.training.evaluate import evaluate
from evojax.training.interrupt import InterruptGuard
from evojax.training.seeds import stream
from evojax.training.selection import ItemStats
from evojax.training.version import Arm, VersionTrainer

STEPS = 3
_MEASURED = ("_s", "_mb")  # seconds and memory differ from run to run
PROGRAMS = frozenset({"lowered sampler", "lowered update"})


class Quiet:
    """A live view that shows nothing; ``after`` is called with the number of steps done."""

    def __init__(self, after: Callable[[int], None] | None = None):
        self._after = after

    def note(self, text: str) -> None:
        """Nothing."""

    def phase(self, name: str, version: str) -> None:
        """Nothing."""

    def step(self, version: str, done: int, *rest: object) -> None:
        """A step is over."""
        if self._after is not None:
            self._after(done)


def quiet(after: Callable[[int], None] | None = None) -> LiveView:
    """A view for the code that wants one."""
    return cast(LiveView, Quiet(after))


class Lenient:
    """The real domain, but for its judge: an answer is right when it begins with 0 or 1.

    A random model is hardly ever right, and groups whose rewards are all equal teach nothing: no
    setting of the update would show. So about half of the groups are live.
    """

    def __init__(self, domain: Domain):
        self._domain = domain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._domain, name)

    def grade(
        self, items: Sequence[Item], texts: Sequence[str], finish_reasons: Sequence[FinishReason]
    ) -> list[Grade]:
        """One grade per completion."""
        right = [text[:1] in ("0", "1") for text in texts]
        return [Grade("correct" if r else "wrong", t) for r, t in zip(right, texts, strict=True)]


class Programs:
    """Fingerprints of lowered programs, each lowered once."""

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}

    def of(self, function: Any, args: tuple[Any, ...], static: dict[str, Any]) -> str:
        """Digest of the text that ``function`` lowers to.

        Args:
            args: arrays or pytrees of them, only shapes count. static: named arguments.
        """

        def kind(leaf: Any) -> Any:
            dynamic = hasattr(leaf, "dtype")
            return (np.shape(leaf), str(leaf.dtype)) if dynamic else leaf

        leaves, tree = jax.tree.flatten((args, static))
        key = (id(function), tree, tuple(kind(leaf) for leaf in leaves))
        if key not in self._known:
            self._known[key] = digest(function.lower(*args, **static).as_text())
        return self._known[key]


class WatchedEngine(EmbeddedEngine):
    """The embedded engine, marking each program before it is compiled.

    One engine serves every run with the same model and batch size: what it compiled is shared.
    """

    def __init__(self, cfg: ModelConfig, pad_id: int, max_batch: int, programs: Programs):
        super().__init__(cfg, pad_id, max_batch)
        self.trail: Trail | None = None
        for name in ("_prefix", "_sample"):
            setattr(self, name, self._marking(getattr(self, name), programs))

    def _marking(self, function: Any, programs: Programs) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            assert self.trail is not None
            self.trail.mark("lowered sampler", programs.of(function, args, named))
            return function(*args, **named)

        return run


class Ground:
    """Where the probes run: engines and lowered programs, kept from one run to the next."""

    def __init__(self) -> None:
        self.programs = Programs()
        self._engines: dict[tuple[ModelConfig, int], WatchedEngine] = {}

    @contextlib.contextmanager
    def shop(self, conf: EvojaxConf, trail: Trail) -> Iterator[Workshop]:
        """A workshop for ``conf`` with a shared engine that marks ``trail``."""
        with InterruptGuard() as guard, Workshop(conf, "lint", quiet(), guard) as shop:
            trail.mark("model", shop.label)
            trail.mark("items", {split: repr(items) for split, items in shop.pools.items()})
            key = (shop.model, conf.rollout.max_batch)
            if key not in self._engines:
                pad = shop.tokenizer.pad_id
                self._engines[key] = WatchedEngine(shop.model, pad, key[1], self.programs)
            engine = self._engines[key]
            engine.trail = trail
            shop.sampler.engine = engine
            shop.sampler.domain = Lenient(shop.domain)  # type: ignore[assignment]
            yield shop

    @contextlib.contextmanager
    def updates(self, trail: Trail) -> Iterator[None]:
        """Inside, every update marks its lowered program before it runs."""
        real: Any = update_module.update

        def run(*args: Any) -> Any:
            trail.mark("packed batch", list(args[4]))
            trail.mark("lowered update", self.programs.of(real, args, {}))
            return real(*args)

        with mock.patch.object(update_module, "update", run):
            yield

    def run(self, conf: EvojaxConf, trail: Trail, keep: Path | None = None) -> None:
        """Train a few steps and mark rollouts, rewards, advantages, updates, checkpoints, weights.

        Args:
            keep: directory that the version is written to and left in; None: a temporary one.
        """
        with self.shop(conf, trail) as shop, tempfile.TemporaryDirectory() as name:
            directory = keep or Path(name) / "versions" / "v001"
            before = shop.sampler.engine.health()["prefill_tokens"]

            def after(done: int) -> None:
                marks = sorted(p.name for p in (directory / "checkpoint").glob("step_*"))
                trail.mark("checkpoints", marks)
                evidence = load_evidence(directory)
                trail.mark("rollouts", evidence.rollouts().to_pydict())
                updates = evidence.updates().to_pydict()
                same = {k: v for k, v in updates.items() if not k.endswith(_MEASURED)}
                trail.mark("updates", same)
                used = shop.sampler.engine.health()["prefill_tokens"] - before
                trail.mark("decoding batches", used)

            trainer = VersionTrainer(
                shop.model, shop.sampler, conf, directory, "lint", quiet(after), shop.guard
            )
            pool = shop.pools["train"]
            with self.updates(trail):
                arm, start = Arm("v001", 0, STEPS, "lint"), partial(shop.start, None)
                trained, totals = trainer.train(arm, start, pool, _rates(pool), shop.frozen)
            trail.mark("totals", vars(totals))
            trail.mark("weights", jax.tree.leaves(trained))

    def evaluation(self, conf: EvojaxConf, trail: Trail) -> None:
        """Score the base policy on the evaluation items."""
        with self.shop(conf, trail) as shop:
            shop.sampler.engine.load_weights(shop.base_params(), "v000@0")
            found = evaluate(shop.sampler, conf, shop.pools["eval"], 0)
            trail.mark("samples", [t.completion.token_ids for t in found.trajectories])
            trail.mark("scores", found.scores)


def _rates(pool: list[Item]) -> ItemStats:
    """Success rates of a run that is under way: each item another one."""
    rng = stream(0, "lint", "rates")
    return ItemStats({item.id: (float(rng.integers(0, 17)), 16.0) for item in pool})
