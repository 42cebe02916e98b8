"""Which settings act: each is changed in a tiny run, and something has to change with it."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from evojax.config import EvojaxConf
from evojax.errors import Problem
from evojax.evolution.boundary import changed_keys, leaves
from evojax.evolution.config_edit import bake_overrides
from evojax.evolution.workshop import typed
from evojax.evolution.yaml_files import read_yaml, set_path, write_yaml
from evojax.guards import hiding, plain
from evojax.lint import planning, sections
from evojax.lint.record import recorded
from evojax.lint.signal import signal
from evojax.lint.tiny import changed, tiny
from evojax.lint.trail import Trail
from evojax.lint.training import PROGRAMS, Ground
from evojax.lint.values import others
from evojax.schema import leaf_keys

Probe = Callable[[DictConfig, EvojaxConf, Trail], None]

# Benches that can show what a key does, the likeliest first; longer keys come before shorter ones.
_BENCHES: dict[str, tuple[str, ...]] = {
    "seed": ("run",),
    "policy.compute_dtype": ("run",),
    "policy.path": ("model from files",),
    **{key: ("start",) for key in ("policy.repo", "policy.revision")},
    "policy.source": ("model from files",),
    "policy.lora": ("run",),
    "policy": ("random model", "run"),
    "rollout.max_batch": ("run",),
    "domain.name": ("start",),
    "domain": ("problems",),
    "data": ("run",),
    "sampling": ("run",),
    "reward": ("signal", "run"),
    "filter": ("signal", "run"),
    "algorithm.advantage": ("signal", "run"),
    "algorithm.advantage_clip": ("signal", "run"),
    "algorithm.dead_tolerance": ("signal", "run"),
    "algorithm": ("run",),
    "train.steps": ("loop",),
    "train.candidate_steps": ("loop",),
    "train.max_nonfinite": ("diverging run",),
    "train": ("run",),
    "eval": ("evaluation",),
    "diagnostics": ("health",),
    "evolution.gate": ("verdicts",),
    "evolution.repo": ("start",),
    "evolution": ("loop",),
    "version": ("run",),
    **{f"hardware.{key}": ("start",) for key in ("name", "mesh", "distributed")},
    **{key: ("start",) for key in ("experiment", "mode", "resume", "output_root", "live")},
    "rollout": ("start",),
}
# Where hidden keys of the policy must stay without effect: in the other kind of source.
_HIDDEN = {
    **{f"policy.{key}": "random model" for key in ("path", "repo", "revision")},
    "policy.arch": "model from files",
}
# Rewards so large that every gradient with a signal overflows.
_DIVERGING = {
    "reward.components": {"correct": 1e300, "partial": 1e300},
    "reward.clip": None,
    "filter.trajectory": [],
    "filter.group": "none",
    "algorithm.advantage": "dr_grpo",
    "algorithm.advantage_clip": None,
    "algorithm.dead_tolerance": 0.0,
}


@dataclass
class Bench:
    """A probe, the configuration it starts from, and what it left behind there.

    Args:
        refuses: the probe may end in a refusal; any other that does is reported at once.
    """

    name: str
    base: DictConfig
    probe: Probe
    refuses: bool = False
    seen: set[str] = field(default_factory=set)
    trail: Trail | None = None

    def prepare(self) -> Trail:
        """The trail of the unchanged configuration; made once.

        Raises:
            EvojaxError: the tiny run was refused, so that nothing can be said.
        """
        if self.trail is None:
            trail = Trail()
            conf = recorded(typed(self.base), self.seen)
            trail.walk(lambda t: self.probe(self.base, conf, t))
            if trail.refusal is not None and not self.refuses:
                raise trail.refusal
            self.trail = trail
        return self.trail

    def effect(self, values: dict[str, Any], ignore: frozenset[str] = frozenset()) -> str | None:
        """First mark that differs once ``values`` are set; None when nothing does."""
        before = self.prepare()
        cfg = changed(self.base, values)
        return Trail(before, ignore).walk(lambda trail: self.probe(cfg, typed(cfg), trail))


@dataclass(frozen=True)
class Row:
    """What the linter found of one setting.

    Args:
        state: live, hidden, or inert (a fault).
        why: the evidence of an effect, or what hides the setting, or what is wrong.
    """

    leaf: str
    value: Any
    state: str
    why: str


@dataclass(frozen=True)
class Lint:
    """The linter's result: one row per setting, what was replaced, and how long it took [s]."""

    rows: tuple[Row, ...]
    replaced: tuple[str, ...]
    seconds: float

    def problems(self) -> list[Problem]:
        """One problem for each inert setting."""
        return [
            Problem(row.why, row.leaf, row.value, "make it act, or remove it from the schema")
            for row in self.rows
            if row.state == "inert"
        ]


class Linter:
    """Lints one composed configuration.

    Args:
        cfg: composed and checked. conf_dir: the tree that it was composed from.
        overrides: the command line with which it was composed.
        work: directory for what is written, removed by the caller.
    """

    def __init__(self, cfg: DictConfig, conf_dir: Path, overrides: Sequence[str], work: Path):
        self.cfg = changed(cfg, {"mode": "evolve"})
        self.work = work
        self.overrides = [text for text in overrides if not text.startswith("mode=")]
        self.conf_dir = conf_dir
        self.tiny, self.replaced = tiny(self.cfg)
        self.ground = Ground()
        self.benches = self._benches()

    def run(self, wanted: Iterable[str] = ()) -> Lint:
        """Lint every setting, or those whose key starts with one of ``wanted``."""
        began = time.perf_counter()
        prefixes = tuple(wanted) or ("",)
        chosen = [leaf for leaf in self._leaves() if leaf.startswith(prefixes)]
        hidden = {leaf: guard for leaf in chosen if (guard := hiding(self.cfg, leaf))}
        stray = self._acting(list(hidden))
        rows = []
        for leaf in chosen:
            value = plain(self.cfg, leaf)
            if leaf in stray:
                words = hidden[leaf].words(self.cfg)
                why = f"should have no effect while {words}, but changes {stray[leaf]}"
                rows.append(Row(leaf, value, "inert", why))
            elif leaf in hidden:
                rows.append(Row(leaf, value, "hidden", hidden[leaf].words(self.cfg)))
            else:
                rows.append(self._live(leaf, value))
        return Lint(tuple(rows), tuple(self.replaced), time.perf_counter() - began)

    def _leaves(self) -> list[str]:
        """The schema's settings, and whatever else the configuration holds."""
        known = leaf_keys()
        inside = tuple(f"{key}." for key in known)
        more = [k for k in leaves(self.cfg) if k not in known and not k.startswith(inside)]
        return [*known, *more]

    def _live(self, leaf: str, value: Any) -> Row:
        tried = []
        for bench in self._of(leaf):
            bench.prepare()
            for other in self._others(bench, leaf):
                tried.append(other)
                if (mark := bench.effect({leaf: other})) is not None:
                    return Row(leaf, value, "live", f"{mark} ({bench.name}, with {other!r})")
        if not any(leaf in bench.seen for bench in self.benches.values()):
            return Row(leaf, value, "inert", "nothing reads it")
        shown = ", ".join(dict.fromkeys(repr(other) for other in tried))
        why = f"it is read, but nothing that a run records changes with {shown}"
        return Row(leaf, value, "inert", why)

    def _of(self, leaf: str) -> list[Bench]:
        """Benches that can show an effect of ``leaf``, the likeliest first."""
        for prefix, names in _BENCHES.items():
            if leaf == prefix or leaf.startswith(prefix + "."):
                return [self.benches[name] for name in names]
        return [self.benches["run"]]

    def _others(self, bench: Bench, leaf: str) -> list[Any]:
        """Other values to try; for a key that names a file or directory, one is written."""
        if leaf == "policy.path":
            sections.save_tiny(typed(self.tiny), self.work / "another_policy", seed=2)
            return [str(self.work / "another_policy")]
        if leaf != "domain.path":
            return others(bench.base, leaf)
        path = self.work / "problems.jsonl"
        count = self.cfg.domain.eval_items + self.cfg.domain.audit_items + 3
        lines = [
            {"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1),
             "domain": "math_rule"}
            for n in range(count)
        ]  # fmt: skip
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return [str(path)]

    def _benches(self) -> dict[str, Bench]:
        files = self.work / "tiny_policy"
        sections.save_tiny(typed(self.tiny), files, seed=1)
        from_files = changed(self.tiny, {"policy.source": "path", "policy.path": str(files)})
        metrics = [*self.cfg.diagnostics.metrics]
        judged = changed(
            self.tiny, {"diagnostics.metrics": metrics and metrics + sections.LINT_METRICS}
        )
        ground = self.ground
        benches = [
            Bench("start", self.cfg, lambda c, f, t: sections.start(c, f, t, self.conf_dir)),
            Bench("random model", self.tiny, lambda c, f, t: sections.model(f, t)),
            Bench("model from files", from_files, lambda c, f, t: sections.model(f, t)),
            Bench("problems", self.cfg, lambda c, f, t: sections.problems(f, t)),
            Bench("signal", self.tiny, lambda c, f, t: signal(f, t)),
            Bench("run", self.tiny, self._run),
            Bench("evaluation", self.tiny, lambda c, f, t: ground.evaluation(f, t)),
            Bench(
                "diverging run",
                changed(self.tiny, _DIVERGING),
                self._diverge,
                refuses=True,
            ),
            Bench("health", judged, self._health),
            Bench("verdicts", self.tiny, lambda c, f, t: sections.verdicts(f, t)),
            Bench("loop", changed(self.cfg, {"evolution.candidates": 1}), self._loop),
        ]
        return {bench.name: bench for bench in benches}

    def _run(self, cfg: DictConfig, conf: EvojaxConf, trail: Trail) -> None:
        first = not self._version.exists()  # the first run's evidence is kept for other probes
        self.ground.run(conf, trail, keep=self._version if first else None)

    def _diverge(self, cfg: DictConfig, conf: EvojaxConf, trail: Trail) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.ground.run(conf, trail)

    @property
    def _version(self) -> Path:
        return self.work / "versions" / "v001"

    def _health(self, cfg: DictConfig, conf: EvojaxConf, trail: Trail) -> None:
        self.benches["run"].prepare()
        sections.health(conf, trail, self._version, self.conf_dir)

    def _loop(self, cfg: DictConfig, conf: EvojaxConf, trail: Trail) -> None:
        """The loop composes its versions from a tree, so a changed key has to be in that too."""
        self.benches["run"].prepare()
        tree = self._tree()
        with tempfile.TemporaryDirectory(dir=self.work) as name:
            edits = changed_keys(self.benches["loop"].base, cfg)
            if edits:
                shutil.copytree(tree, tree := Path(name) / "conf")
                file = tree / "experiment" / f"{self.cfg.experiment}.yaml"
                content = read_yaml(file)
                for key, (_, new) in edits.items():
                    set_path(content, key.split("."), new)
                write_yaml(file, content)
            planning.loop(cfg, conf, trail, tree, self._version / "evidence")

    def _tree(self) -> Path:
        """The configuration tree with the command line in it."""
        tree = self.work / "conf"
        if not tree.exists():
            shutil.copytree(self.conf_dir, tree)
            bake_overrides(tree, self.cfg.experiment, self.overrides)
        return tree

    def _acting(self, hidden: list[str]) -> dict[str, str]:
        """Hidden settings that act all the same, with what they change; all are tried at once."""
        found: dict[str, str] = {}
        groups: dict[str, list[str]] = {}
        for leaf in hidden:
            section = ".".join(leaf.split(".")[:2])
            name = _HIDDEN.get(section, self._of(leaf)[0].name)
            groups.setdefault(name, []).append(leaf)
        for name, members in groups.items():
            bench = self.benches[name]
            bench.prepare()
            values = {leaf: self._others(bench, leaf)[0] for leaf in members}
            if bench.effect(values, PROGRAMS) is not None:
                for leaf in members:
                    mark = bench.effect({leaf: values[leaf]}, PROGRAMS)
                    found |= {} if mark is None else {leaf: mark}
        return found
