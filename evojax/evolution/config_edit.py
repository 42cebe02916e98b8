"""Composing a configuration tree, and changing one in place so that the change takes effect."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from evojax.config import EvojaxConf
from evojax.errors import InputError
from evojax.evolution.yaml_files import has_path, read_yaml, replace_text, set_path, write_yaml

# Where and how a run is done, not what is trained: never part of a version.
RUN_ONLY = ("experiment", "mode", "resume", "live", "output_root", "version", "hardware")
RUN_ONLY += ("plan", "evolution.repo", "hydra")
_KEY = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
_COMPOSING = threading.RLock()


def compose_conf(
    conf_dir: Path, overrides: Sequence[str] = (), with_hydra: bool = False
) -> DictConfig:
    """The configuration that ``conf_dir`` gives under ``overrides``.

    Works inside a running Hydra application, whose own state is put back.

    Args:
        conf_dir: tree with config.yaml. with_hydra: keep the ``hydra`` node.
    Raises:
        InputError: the tree or an override is wrong.
    """
    top = conf_dir.resolve()
    if not (top / "config.yaml").is_file():
        raise InputError.one("no config.yaml there", "--config-dir", str(top), "give a conf tree")
    with _COMPOSING:
        ConfigStore.instance().store(name="evojax_schema", node=EvojaxConf)
        outer = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(top), version_base="1.3"):
                return compose("config", list(overrides), return_hydra_config=with_hydra)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            causes = " ".join(str(e) for e in (error, error.__cause__) if e)
            what = " ".join(causes.split())[:800]
            raise InputError.one(
                f"cannot compose: {what}", str(top), list(overrides), "correct the key or the value"
            ) from error
        finally:
            GlobalHydra.instance().hydra = outer


def experiment_override(experiment: str) -> str:
    """The override that picks an experiment, ``+experiment=<name>``."""
    return "+" + quote_override("experiment", experiment)


def quote_override(key: str, value: Any) -> str:
    """``key=value`` such that composing gives back exactly ``value``, type included.

    Args:
        key: dotted path. value: None, bool, int, float, text, or lists and mappings of them.
    Raises:
        InputError: the key is no dotted path, or the value has no such form (e.g. ``???``, which
            means "missing" to OmegaConf).

    >>> quote_override("a.b", "epoch=9")
    "a.b='epoch=9'"
    >>> quote_override("a", [1, None, "null"])
    "a=[1,null,'null']"
    """
    if not _KEY.fullmatch(key):
        raise InputError.one("not a dotted key", "override", key, "use names joined by dots")
    return f"{key}={_quote(key, value)}"


def _quote(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _quote_float(value)
    if isinstance(value, str):
        return _quote_text(key, value)
    if isinstance(value, (list, tuple, ListConfig)):
        return "[" + ",".join(_quote(key, v) for v in value) + "]"
    if isinstance(value, (dict, DictConfig)) and all(_KEY.fullmatch(str(k)) for k in value):
        return "{" + ",".join(f"{k}:{_quote(key, v)}" for k, v in value.items()) + "}"
    remedy = "use numbers, text, lists, or mappings with plain names"
    raise InputError.one("value has no override form", key, value, remedy)


def _quote_float(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)


def _quote_text(key: str, value: str) -> str:
    if value == "???":
        raise InputError.one("??? means a missing value", key, value, "choose another text")
    # In a text that holds an interpolation OmegaConf halves the backslashes before each "${".
    literal = re.sub(r"(\\*)\$\{", lambda m: m.group(1) * 2 + r"\${", value)
    return QuotedString(literal, Quote.single).with_quotes()


def set_key(conf_dir: Path, experiment: str, key: str, value: Any) -> Path:
    """Change ``key`` in the file that decides it, and make sure that the change decides.

    The candidates, strongest first: the experiment file and config.yaml if they set the key, then
    the chosen option file of the key's group. The first one that makes ``value`` the effective one
    keeps the edit; a file whose edit had no effect is put back.

    Returns:
        The file that was changed.
    Raises:
        InputError: the key is unknown, the value has the wrong type, or no file can decide it.
    """
    refuse_tricks(key, value)
    picks = [experiment_override(experiment)]
    full = compose_conf(conf_dir, picks, with_hydra=True)
    error: InputError | None = None
    for path, parts in _places(conf_dir, experiment, key, full):
        before = path.read_text(encoding="utf-8")
        data = read_yaml(path)
        set_path(data, parts, value)
        write_yaml(path, data)
        try:
            if same_value(select(compose_conf(conf_dir, picks), key), value):
                return path
        except InputError as found:
            error = found
        replace_text(path, before)
    what = f"cannot be set: {error.problems[0].what}" if error else "another file overrides it"
    raise InputError.one(what, key, value, "check the key, its type and the order of defaults")


def refuse_tricks(key: str, value: Any) -> None:
    """Refuse what a changed value must never hold: interpolations, missing marks, ``_target_``."""
    if not _KEY.fullmatch(key) or any(part.startswith("_") for part in key.split(".")):
        raise InputError.one("not a key that may be set", key, value, "use names joined by dots")
    if isinstance(value, dict):
        for name, inner in value.items():
            refuse_tricks(f"{key}.{name}", inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            refuse_tricks(key, inner)
    elif isinstance(value, str) and ("${" in value or value == "???"):
        raise InputError.one("interpolations are refused", key, value, "give the value itself")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError.one("not a finite number", key, value, "give a finite one")


def select(cfg: DictConfig, key: str) -> Any:
    """Plain value of a dotted key.

    Raises:
        InputError: there is no such key.
    """
    node: Any = cfg
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            raise InputError.one("no such key", key, None, "see python -m evojax.main --cfg job")
        node = node[part]
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def same_value(one: Any, two: Any) -> bool:
    """Equal, and of one kind: True is not 1; an int stands for the same float.

    >>> same_value(1.0, 1), same_value(True, 1), same_value([1], [1.0])
    (True, False, True)
    """
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(same_value, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same_value(one[k], two[k]) for k in one)
    if isinstance(one, bool) != isinstance(two, bool):
        return False
    if isinstance(one, (int, float)) and isinstance(two, (int, float)):
        return one == two
    return type(one) is type(two) and one == two


def _places(
    conf_dir: Path, experiment: str, key: str, full: DictConfig
) -> list[tuple[Path, list[str]]]:
    parts = key.split(".")
    places = []
    main, own = conf_dir / "config.yaml", _experiment_file(conf_dir, experiment)
    places += [(path, parts) for path in (own, main) if has_path(read_yaml(path), parts)]
    choices = cast(DictConfig, full.hydra.runtime.choices)
    option = choices.get(parts[0]) if parts[0] in choices else None
    if option and len(parts) > 1:
        places.append((conf_dir / parts[0] / f"{option}.yaml", parts[1:]))
    return places or [(own, parts)]


def _experiment_file(conf_dir: Path, experiment: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", experiment):
        raise InputError.one("not an experiment name", "experiment", experiment, "use a plain name")
    return conf_dir / "experiment" / f"{experiment}.yaml"


def bake_overrides(conf_dir: Path, experiment: str, overrides: Sequence[str]) -> Path:
    """Write command-line overrides into the experiment file, so that the tree alone reproduces.

    Group choices go into its defaults list (``override /group: option``), values under their keys.
    Overrides that only say where or how a run is done are left out.

    Returns:
        The experiment file.
    Raises:
        InputError: an override cannot be written down (a sweep, a deletion), or would not have the
            same effect from the file; the file is then as it was.
    """
    path = _experiment_file(conf_dir, experiment)
    parsed = [o for o in _parse(overrides) if not is_run_only(o.key_or_group)]
    picks = [experiment_override(experiment)]
    intended = compose_conf(conf_dir, picks + [cast(str, o.input_line) for o in parsed])
    before = path.read_text(encoding="utf-8")
    data = read_yaml(path)
    for override in parsed:
        if (conf_dir / override.key_or_group).is_dir():
            _choose(data, override)
        else:
            set_path(data, override.key_or_group.split("."), _stated(override))
    write_yaml(path, data)
    try:
        if compose_conf(conf_dir, picks) != intended:
            raise InputError.one(
                "the overrides act differently from a file", "command line", list(overrides),
                f"write them into {path} by hand",
            )  # fmt: skip
    except InputError:
        replace_text(path, before)
        raise
    return path


def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        remedy = "quote the value, see Hydra's override grammar"
        raise InputError.one(str(error), "command line", list(overrides), remedy) from error


def is_run_only(key: str) -> bool:
    """Whether a key, or the group of a choice, never is part of a version.

    >>> is_run_only("hardware.mesh.tp"), is_run_only("hydra/launcher"), is_run_only("train.steps")
    (True, True, False)
    """
    return key in RUN_ONLY or re.split(r"[./]", key)[0] in RUN_ONLY


def _stated(override: Override) -> Any:
    if override.is_sweep_override() or override.is_delete():
        raise InputError.one(
            "a sweep or a deletion cannot be written into a version", override.key_or_group,
            override.input_line, "give one value",
        )  # fmt: skip
    return override.value()


def _choose(data: CommentedMap, override: Override) -> None:
    group, option = override.key_or_group, _stated(override)
    listed = data.setdefault("defaults", CommentedSeq())
    for entry in listed:
        if isinstance(entry, dict):
            for name in entry:
                if str(name).removeprefix("override").strip().lstrip("/") == group:
                    entry[name] = option
                    return
    at = listed.index("_self_") if "_self_" in listed else len(listed)
    if override.is_add():  # Hydra wants overrides after everything that is added
        at = next((i for i, entry in enumerate(listed) if "override " in str(entry)), at)
    name = f"/{group}" if override.is_add() else f"override /{group}"
    listed.insert(at, CommentedMap({name: option}))
    if "_self_" not in listed:
        listed.append("_self_")
