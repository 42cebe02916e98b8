"""Checks of what the user wrote, before anything is composed: command line and YAML files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evojax.errors import InputError, Problem
from evojax.paths import anchored
from evojax.schema import PATH_KEYS, check_value, is_known, unknown_key

_PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)
_FAULTY_FILE = re.compile(r"In '([^']+)'")


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parsed command line overrides.

    Raises:
        InputError: one problem for each override that cannot be parsed.
    """
    parser = OverridesParser.create()
    parsed, problems = [], []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            what = str(error).splitlines()[0]
            remedy = "write key=value; quote special characters: 'key=\"a=b\"'"
            problems.append(Problem(what, "command line", text, remedy))
    if problems:
        raise InputError(problems)
    return parsed


def quoted(text: str) -> str:
    """``text`` as an override value that Hydra reads back unchanged.

    >>> quoted("a=b, c")
    "'a=b, c'"
    """
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def group_options(group: str, trees: Sequence[Path]) -> list[str]:
    """Names of the options of a config group in the given trees."""
    return sorted({f.stem for tree in trees for f in (tree / group).glob("*.yaml")})


def nested_options(group: str, trees: Sequence[Path]) -> list[str]:
    """Names of the options of a config group, those in folders below it as ``folder/name``."""
    files = ((f, tree / group) for tree in trees for f in (tree / group).rglob("*.yaml"))
    return sorted({f.relative_to(top).with_suffix("").as_posix() for f, top in files})


def _groups(trees: Sequence[Path]) -> list[str]:
    return sorted({d.name for tree in trees for d in tree.glob("*") if d.is_dir()})


def _values(item: Override) -> list[Any]:
    if not item.is_sweep_override():
        return [item.value()]
    if item.is_discrete_sweep() and not hasattr(item.value(), "include"):
        return [Override._convert_value(v) for v in item.sweep_iterator()]
    return []


def _check_group(item: Override, trees: Sequence[Path]) -> list[Problem]:
    options = nested_options(item.key_or_group, trees)
    problems = []
    for value in _values(item):
        if isinstance(value, dict):
            remedy = f"{item.key_or_group}=<option>, or single keys: {item.key_or_group}.<key>=..."
            problems.append(
                Problem("needs the name of an option", item.key_or_group, value, remedy)
            )
            continue
        for name in value if isinstance(value, list) else [value]:
            if name is None or item.is_delete() or str(name) in options:
                continue
            near = difflib.get_close_matches(str(name), options, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            remedy = f"{hint}valid: {', '.join(options)}"
            problems.append(Problem("no such option", item.key_or_group, name, remedy))
    return problems


def check_overrides(parsed: Sequence[Override], trees: Sequence[Path]) -> list[Problem]:
    """Every unknown key, unknown group option and wrongly typed value of the command line.

    ``+`` and ``++`` do not get a key past this check: a key that nothing reads has no effect, so
    it can only be a mistake.

    Args:
        parsed: overrides. trees: configuration trees that are searched.
    """
    groups = _groups(trees)
    problems: list[Problem] = []
    for item in parsed:
        key = item.key_or_group
        if key.startswith("hydra/"):
            continue  # options of plug-ins; Hydra itself lists them when one is unknown
        if key in groups:
            problems += _check_group(item, trees)
        elif not is_known(key):
            value = None if item.is_delete() else item.get_value_string()
            problems.append(unknown_key(key, value, groups))
        elif not item.is_delete():
            problems += [p for value in _values(item) for p in check_value(key, value)]
    return problems


def unwanted_sweeps(parsed: Sequence[Override]) -> list[Problem]:
    """Lists of values that were given without ``-m``."""
    remedy = "add -m to run every value, or quote one that holds a comma"
    what = "several values for one run"
    return [
        Problem(what, item.key_or_group, item.get_value_string(), remedy)
        for item in parsed
        if item.is_sweep_override()
    ]


def search_path(overrides: Sequence[str]) -> list[Path]:
    """Directories that ``hydra.searchpath=[file://...]`` adds to the configuration trees."""
    for item in parse(overrides):
        if item.key_or_group == "hydra.searchpath" and isinstance(value := item.value(), list):
            files = [str(name) for name in value if not str(name).startswith("pkg://")]
            return [Path(name.removeprefix("file://")) for name in files]
    return []


def anchor_overrides(overrides: Sequence[str], parsed: Sequence[Override], start: Path) -> list:
    """The same overrides with relative paths made absolute, so that they hold anywhere.

    >>> anchor_overrides(["domain.path=x.jsonl"], parse(["domain.path=x.jsonl"]), Path("/home/me"))
    ["domain.path='/home/me/x.jsonl'"]
    """
    result = []
    for text, item in zip(overrides, parsed, strict=True):
        value = None if item.is_delete() else item.value()
        special = item.key_or_group == "evolution.repo" and value == "private"
        if item.key_or_group in PATH_KEYS and isinstance(value, str) and not special:
            if value != "???" and "${" not in value:
                text = f"{item.get_key_element()}={quoted(anchored(value, start))}"
        result.append(text)
    return result


def check_file(path: Path, tree: Path) -> list[Problem]:
    """Every unknown key and wrongly typed value of one YAML file of a configuration tree."""
    name = path.relative_to(tree).as_posix()
    text = path.read_text(encoding="utf-8")
    content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    if not isinstance(content, dict):
        return [Problem("not a mapping of keys", str(path), type(content).__name__, "write key: v")]
    match = _PACKAGE.search(text)
    package = match[1] if match else name.rpartition("/")[0].replace("/", ".")
    prefix = "" if package in ("_global_", "") else package + "."
    return [
        problem
        for key, value in content.items()
        if key not in ("defaults", "hydra")
        for problem in check_value(f"{prefix}{key}", value, source=str(path))
    ]


def explain(error: Exception, trees: Sequence[Path]) -> InputError:
    """A composition error as an `InputError`, with every problem of the file that it names."""
    found = _FAULTY_FILE.search(str(error))
    name = found[1].removesuffix(".yaml") if found else ""
    if found:
        for tree in trees:
            path = tree / f"{name}.yaml"
            if path.is_file() and (problems := _safe_check(path, tree)):
                return InputError(problems)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if cause is not None:
        lines += [line.strip() for line in str(cause).splitlines()]
    what = "; ".join(dict.fromkeys(lines)) or type(error).__name__
    key = getattr(cause, "full_key", None) or getattr(error, "full_key", None)
    where = str(key or name or "configuration")
    return InputError.one(what, where, None, "see --help for groups, options and keys")


def _safe_check(path: Path, tree: Path) -> list[Problem]:
    try:
        return check_file(path, tree)
    except yaml.YAMLError as error:
        return [Problem(str(error), str(path), None, "repair the YAML file")]
