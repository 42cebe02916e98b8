"""The configuration schema as a flat list of dotted keys, and a check of one value against it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable
from typing import Any, Union

from hydra.conf import HydraConf
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evojax.config import EvojaxConf
from evojax.errors import Problem

PATH_KEYS = ("policy.path", "domain.path", "resume", "output_root", "evolution.repo")


def _walk(cls: type, prefix: str) -> Iterable[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        key, hint = prefix + item.name, hints[item.name]
        yield key, hint
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _walk(hint, key + ".")


@functools.cache
def schema_keys() -> dict[str, Any]:
    """Every dotted key of the configuration, sections included, with its type.

    >>> schema_keys()["sampling.group_size"]
    <class 'int'>
    """
    hydra = {f"hydra.{key}": hint for key, hint in _walk(HydraConf, "")}
    return {**dict(_walk(EvojaxConf, "")), "hydra": HydraConf, **hydra}


@functools.cache
def leaf_keys() -> tuple[str, ...]:
    """Every dotted key that holds a value; a list or an open dictionary is one value.

    >>> leaf_keys()[:3], "algorithm" in leaf_keys(), "algorithm.lr" in leaf_keys()
    (('experiment', 'mode', 'seed'), False, True)
    """
    own = _walk(EvojaxConf, "")
    return tuple(k for k, hint in own if not dataclasses.is_dataclass(hint))


@functools.cache
def _defaults() -> Any:
    return OmegaConf.structured(EvojaxConf(experiment=""))


def default_of(key: str) -> Any:
    """The schema's default of a leaf, as plain Python.

    >>> default_of("algorithm.eps_low"), default_of("domain.tasks")
    (0.2, [])
    """
    value = OmegaConf.select(_defaults(), key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _is_open(hint: Any) -> bool:
    """Whether a key of this type takes names that no schema lists."""
    return hint is Any or typing.get_origin(hint) is dict


def is_known(key: str) -> bool:
    """Whether ``key`` is in the schema, or inside one of its open dictionaries.

    >>> is_known("algorithm.lr"), is_known("reward.components.partial"), is_known("algorithm.lrr")
    (True, True, False)
    """
    keys = schema_keys()
    parts = key.split(".")
    parents = (".".join(parts[:n]) for n in range(1, len(parts)))
    return key in keys or any(_is_open(keys.get(parent)) for parent in parents)


def nearest(key: str, extra: Iterable[str] = ()) -> str | None:
    """The valid key that was probably meant: alike as a whole, or alike in its last part.

    >>> nearest("algorithm.lrr"), nearest("opt.lr"), nearest("hydra.ouput_subdir")
    ('algorithm.lr', 'algorithm.lr', 'hydra.output_subdir')
    >>> nearest("zzzz") is None
    True
    """
    valid = [*schema_keys(), *extra]
    if close := difflib.get_close_matches(key, valid, n=1, cutoff=0.75):
        return close[0]
    own = [name for name in valid if not name.startswith("hydra.")]
    leaves = {name.rpartition(".")[2]: name for name in reversed(own)}
    leaf = difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1, cutoff=0.5)
    return leaves[leaf[0]] if leaf else None


def unknown_key(key: str, value: object, extra: Iterable[str] = (), source: str = "") -> Problem:
    """The problem of a key that no schema lists."""
    near = nearest(key, extra)
    remedy = f"did you mean {near}? " if near else ""
    where = f"{source}: {key}" if source else key
    return Problem("unknown key", where, value, remedy + "all keys: --cfg job")


def _type_name(hint: Any) -> str:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is Union:
        return " or ".join(_type_name(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "null"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def check_value(key: str, value: object, source: str = "") -> list[Problem]:
    """Problems of setting ``key`` to ``value``: unknown key, or a value of the wrong type.

    Args:
        key: dotted key. value: plain Python value. source: file that sets it, "" for the command
            line.

    >>> check_value("seed", "x")[0].what
    'the value is not of the type int'
    """
    if not is_known(key):
        return [unknown_key(key, value, source=source)]
    if isinstance(value, dict) and (inner := value.items()):
        return [p for name, v in inner for p in check_value(f"{key}.{name}", v, source)]
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    schema = OmegaConf.structured(EvojaxConf)
    if key.startswith("hydra."):
        nested, schema = nested["hydra"], OmegaConf.structured(HydraConf)
    try:
        OmegaConf.merge(schema, OmegaConf.create(nested))
    except OmegaConfBaseException as error:
        name = _type_name(schema_keys()[key]) if key in schema_keys() else "of its section"
        what = f"the value is not of the type {name}"
        where = f"{source}: {key}" if source else key
        return [Problem(what, where, value, f"give {name}; {str(error).splitlines()[0]}")]
    return []
