"""The command line: a Hydra application that checks first, and ends with a meaningful exit code.

Hydra's own driver prints a traceback or exits with 1 for every fault, discards what the jobs of a
multirun return, and overwrites an existing run directory. So evojax drives Hydra's parts itself:
parse, check the overrides, compose, check the values, claim the run directory, then run.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evojax import overrides as checks
from evojax import paths, rundir
from evojax.config import EvojaxConf
from evojax.errors import (
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    EvojaxError,
    InputError,
    Interrupted,
)
from evojax.preflight import check, missing_experiment

EXIT_BUG = 1
# A multirun returns the worst of its jobs.
_SEVERITY = (EXIT_OK, EXIT_INPUT, EXIT_UNAVAILABLE, EXIT_BUG, EXIT_INTERRUPTED)

ConfigStore.instance().store(name="evojax_schema", node=EvojaxConf)
OmegaConf.register_new_resolver("evojax.unique", rundir.unique, use_cache=True, replace=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report_error(error: BaseException, run_dir: Path | None = None) -> int:
    """Tell the user what went wrong, and return the exit code that says the same."""
    again = f"; go on with: python -m evojax.main resume={run_dir}" if run_dir else ""
    if isinstance(error, InputError):
        count = len(error.problems)
        _say(f"evojax: {count} problem{'s' if count > 1 else ''} in the configuration or input")
        for number, problem in enumerate(error.problems, start=1):
            _say(f"  {number}. {problem}")
        return error.exit_code
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        _say(f"evojax: interrupted{again}")
        return EXIT_INTERRUPTED
    if isinstance(error, EvojaxError):
        _say(f"evojax: {error}{again}")
        return error.exit_code
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _say(f"evojax: the disk is full ({error.filename or run_dir}); free some space{again}")
        return EXIT_UNAVAILABLE
    _say(f"evojax: unexpected error, {type(error).__name__}: {error}{again}")
    text = "".join(traceback.format_exception(error))
    if run_dir is not None and run_dir.is_dir():
        (run_dir / "error.log").write_text(text, encoding="utf-8")
        _say(f"evojax: the traceback is in {run_dir / 'error.log'}")
    if os.environ.get("EVOJAX_DEBUG") == "1":
        _say(text)
    elif run_dir is None:
        _say("evojax: EVOJAX_DEBUG=1 shows the traceback")
    return EXIT_BUG


def _terminate(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _mirrored(cfg: DictConfig, work: Callable[[], int]) -> int:
    """Do ``work`` in one process; in the others, of several, its part on devices.

    Nothing imports JAX before: a command that needs one process stays fast.
    """
    if not cfg.hardware.distributed:
        return work()
    from evojax import distributed
    from evojax.training.crew import follow

    if not distributed.join():
        follow()
        return EXIT_OK
    try:
        return work()
    finally:
        distributed.dismiss()


def _dispatch(cfg: DictConfig, run_dir: Path) -> int:
    """Hand one composed and checked configuration to the mode that it asks for."""
    hydra = HydraConfig.get()
    check(cfg)
    sources = hydra.runtime.config_sources
    trees = [Path(source.path) for source in sources if source.schema == "file"]
    tree = trees[0] if len(trees) == 1 else paths.merge_trees(trees, run_dir / "conf")
    from evojax.run import dispatch

    return dispatch(cfg, run_dir, list(hydra.overrides.task), tree)


def task(cfg: DictConfig) -> int:
    """One job, in this process or in a launcher's worker; returns its exit code."""
    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir)
    for key in checks.PATH_KEYS:
        value = OmegaConf.select(cfg, key, throw_on_missing=False)
        if value and not (key == "evolution.repo" and value == "private"):
            OmegaConf.update(cfg, key, paths.anchored(value, Path(hydra.runtime.cwd)))
    try:
        if hydra.mode == RunMode.MULTIRUN:
            return _mirrored(cfg, lambda: _dispatch(cfg, run_dir))
        return _dispatch(cfg, run_dir)
    except (KeyboardInterrupt, Interrupted) as error:
        if hydra.mode == RunMode.MULTIRUN:
            raise KeyboardInterrupt from error  # ends the whole sweep, not only this job
        return report_error(error, run_dir)
    except InputError as error:
        if cfg.resume is None:
            rundir.discard_if_unused(run_dir)
        return report_error(error, run_dir)
    except Exception as error:
        return report_error(error, run_dir)


class Application:
    """One invocation: which configuration trees are searched, and what is done with them."""

    def __init__(self, args: Namespace, parser: ArgumentParser, start: Path):
        self.args, self.parser, self.start = args, parser, start
        self.config_name = args.config_name or "config"
        self.overrides = self._anchored(args.overrides)
        self.resume = self._resume_dir()
        self.main_tree, self.overlay = self._trees()
        self.trees = [tree for tree in (self.overlay, self.main_tree) if tree is not None]
        self.trees += checks.search_path(self.overrides)
        if self.resume is not None:
            self._continue_in(self.resume)

    def _anchored(self, texts: Sequence[str]) -> list[str]:
        return checks.anchor_overrides(texts, checks.parse(texts), self.start)

    def _resume_dir(self) -> Path | None:
        for item in checks.parse(self.overrides):
            if item.key_or_group == "resume" and isinstance(value := item.value(), str):
                return Path(value)
        return None

    def _trees(self) -> tuple[Path, Path | None]:
        """The main tree and an overlay.

        A whole tree given by ``--config-dir`` stands alone: a version checked out from a harness
        repository must not mix with whatever evojax is installed. A partial one is laid over.
        """
        main_tree = paths.conf_dir()
        if self.args.config_path is not None:
            main_tree = _existing_dir(self.args.config_path, "--config-path", self.start)
        elif self.resume is not None:
            main_tree = rundir.saved_tree(self.resume) or main_tree
        if self.args.config_dir is None:
            return main_tree, None
        given = _existing_dir(self.args.config_dir, "--config-dir", self.start)
        whole = (given / f"{self.config_name}.yaml").is_file()
        return (given, None) if whole else (main_tree, given)

    def _continue_in(self, run_dir: Path) -> None:
        self.overrides = rundir.resumed(self.overrides, run_dir)
        snapshot = f"{rundir.SNAPSHOT}/resume-{rundir.unique()}"
        self.overrides.append(f"hydra.output_subdir={checks.quoted(snapshot)}")

    def _hydra(self) -> Hydra:
        search = create_config_search_path(f"file://{self.main_tree}")
        if self.overlay is not None:
            anchor = SearchPathQuery(provider="main")
            search.prepend("command-line", f"file://{self.overlay}", anchor)
        return Hydra.create_main_hydra2("evojax", search)

    def run(self) -> int:
        """Do what the flags ask for.

        Raises:
            InputError: every problem of the command line, or of the composed configuration.
        """
        problems = checks.check_overrides(checks.parse(self.overrides), self.trees)
        if problems:
            raise InputError(problems)
        try:
            hydra = self._hydra()
            shown = self._show(hydra)
            return EXIT_OK if shown else self._work(hydra)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise checks.explain(error, self.trees) from error
        finally:
            GlobalHydra.instance().clear()

    def _show(self, hydra: Hydra) -> bool:
        """Serve the flags that only print; True when one was given."""
        args, name = self.args, self.config_name
        if args.experimental_rerun:
            raise HydraException("--experimental-rerun is not offered; use resume=<run directory>")
        if args.resolve and not (args.cfg or args.help):
            raise HydraException("--resolve needs --cfg or --help")
        if args.help:
            hydra.app_help(config_name=name, args_parser=self.parser, args=args)
        elif args.hydra_help:
            hydra.hydra_help(config_name=name, args_parser=self.parser, args=args)
        elif args.cfg:
            hydra.show_cfg(name, self.overrides, args.cfg, args.package, args.resolve)
        elif args.shell_completion:
            hydra.shell_completion(config_name=name, overrides=self.overrides)
        elif args.info:
            hydra.show_info(args.info, config_name=name, overrides=self.overrides)
        else:
            return False
        return True

    def _work(self, hydra: Hydra) -> int:
        texts = list(self.overrides)
        if self.args.multirun:
            texts.append("hydra.mode=MULTIRUN")
        cfg = self._composed(hydra, texts)
        if cfg.mode == "plan" and OmegaConf.is_missing(cfg, "experiment"):
            texts.append("+experiment=plan")  # chips and a model are enough to plan
            cfg = self._composed(hydra, texts)
        multirun = cfg.hydra.mode == RunMode.MULTIRUN
        parsed = checks.parse(texts)
        problems = [] if multirun else checks.unwanted_sweeps(parsed)
        if multirun and self.resume is not None:
            raise InputError.one("is for one run", "resume", str(self.resume), "leave out -m")
        swept = multirun and any(item.key_or_group == "experiment" for item in parsed)
        if not swept and not problems:
            problems = missing_experiment(cfg, self.trees)
        if problems:
            raise InputError(problems)
        if not multirun:
            check(OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != "hydra"]))
        run = partial(self._run_in, self._place(cfg, multirun), hydra, texts, multirun)
        return run() if multirun else _mirrored(cfg, run)

    def _composed(self, hydra: Hydra, texts: list[str]) -> DictConfig:
        return hydra.compose_config(
            self.config_name, texts, RunMode.MULTIRUN, validate_sweep_overrides=False
        )

    def _place(self, cfg: DictConfig, multirun: bool) -> Path:
        key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
        return Path(self.start, self.resume or str(OmegaConf.select(cfg, key)))

    def _run_in(self, place: Path, hydra: Hydra, texts: list[str], multirun: bool) -> int:
        where = checks.quoted(str(place))
        with rundir.claim(place, resume=self.resume is not None):
            if not multirun:
                texts += ["hydra.mode=RUN", f"hydra.run.dir={where}"]
                return int(hydra.run(self.config_name, task, texts).return_value)
            batches = hydra.multirun(self.config_name, task, [*texts, f"hydra.sweep.dir={where}"])
            codes = [int(job.return_value) for batch in batches or [] for job in batch]
        return max(codes, key=_SEVERITY.index, default=EXIT_OK)


def _existing_dir(text: str, flag: str, start: Path) -> Path:
    path = Path(paths.anchored(text, start))
    if not path.is_dir():
        raise InputError.one("no such directory", flag, text, "give an existing directory")
    return path


def _guarded(work: Callable[[], int]) -> int:
    try:
        return work()
    except SystemExit as stop:  # argparse: its own message has been printed
        return stop.code if isinstance(stop.code, int) else EXIT_INPUT
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error)


def main(argv: Sequence[str]) -> int:
    """Run evojax with the given arguments and return the exit code.

    Args:
        argv: arguments without the program's name.
    """

    def work() -> int:
        version.setbase("1.3")
        parser = get_args_parser()
        args: Any = parser.parse_intermixed_args(list(argv))  # -m may stand anywhere
        return Application(args, parser, Path.cwd()).run()

    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _guarded(work)
    finally:
        signal.signal(signal.SIGTERM, previous)
