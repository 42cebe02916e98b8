"""YAML files changed in place: comments, key order and layout of everything else stay."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from evojax.errors import InputError, UnavailableError

_LAYOUTS = ((2, 4, 2), (2, 2, 0))  # mapping indent, sequence indent, dash offset


def _loader(layout: tuple[int, int, int]) -> YAML:
    handler = YAML(typ="rt")
    handler.preserve_quotes = True
    handler.width = 4096
    handler.indent(mapping=layout[0], sequence=layout[1], offset=layout[2])
    return handler


def read_yaml(path: Path) -> CommentedMap:
    """The mapping in ``path``; an empty or comments-only file is an empty mapping.

    Raises:
        InputError: not a regular file, not YAML, a key twice, or not a mapping.
    """
    return parse_yaml(_read_text(path), str(path))


def parse_yaml(text: str, where: str) -> CommentedMap:
    """The mapping in ``text``; ``where`` names it in errors."""
    try:
        data = _loader(_LAYOUTS[0]).load(text)
    except (YAMLError, ValueError) as error:
        what = " ".join(str(error).split())[:500]
        raise InputError.one(f"not valid YAML: {what}", where, text[:80], "correct it") from error
    if data is None:
        return CommentedMap()
    if not isinstance(data, CommentedMap):
        kind = type(data).__name__
        raise InputError.one("not a mapping at the top", where, kind, "write key: value lines")
    return data


def write_yaml(path: Path, data: CommentedMap) -> None:
    """Replace ``path`` atomically by ``data``, in the list layout that the file has now."""
    before = _read_text(path) if path.exists() else ""
    replace_text(path, dump_yaml(data, before))


def dump_yaml(data: CommentedMap, before: str = "") -> str:
    """``data`` as text, in the layout that reproduces ``before``; leading comments are kept."""
    layout = next((x for x in _LAYOUTS if _same_after_round_trip(before, x)), _LAYOUTS[0])
    out = io.StringIO()
    _loader(layout).dump(data, out)
    text = out.getvalue()
    has_keys = bool(parse_yaml(before, "the file before")) if before.strip() else False
    if before.strip() and not has_keys:
        # A file of comments only loads as nothing, so its comments are put back by hand.
        text = before.rstrip("\n") + "\n" + text
    return text


def _same_after_round_trip(text: str, layout: tuple[int, int, int]) -> bool:
    out = io.StringIO()
    handler = _loader(layout)
    handler.dump(handler.load(text), out)
    return out.getvalue().strip() == text.strip()


def set_path(data: CommentedMap, parts: list[str], value: Any) -> None:
    """Set ``data[parts[0]][parts[1]]...`` to ``value``, making the mappings between."""
    node = data
    for part in parts[:-1]:
        if not isinstance(node.get(part), dict):
            node[part] = CommentedMap()
        node = node[part]
    node[parts[-1]] = plain_yaml(value)


def has_path(data: Any, parts: list[str]) -> bool:
    """Whether every key on the way is there."""
    for part in parts:
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True


def plain_yaml(value: Any) -> Any:
    """``value`` as a node that Hydra's YAML 1.1 loader gives back unchanged."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return _text_node(value)
    if isinstance(value, dict):
        return CommentedMap({str(k): plain_yaml(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return [plain_yaml(v) for v in value]
    kind = type(value).__name__
    raise InputError.one(f"a {kind} is no YAML value", "edits", value, "use numbers, text or lists")


def _text_node(value: str) -> str:
    try:
        plain = yaml.safe_load(value) == value and value == value.strip()
    except yaml.YAMLError:
        plain = False
    return value if plain and "#" not in value else DoubleQuotedScalarString(value)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the new one, never half of one."""
    if path.is_symlink():
        raise InputError.one("a symbolic link", str(path), os.readlink(path), "use a real file")
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="", dir=path.parent, delete=False
        ) as out:
            out.write(text)
        os.chmod(out.name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(out.name, path)
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error}. Remedy: free the disk") from error


def _read_text(path: Path) -> str:
    if path.is_symlink() or not path.is_file():
        raise InputError.one("no such file", "conf", str(path), "check the configuration tree")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError.one("not UTF-8 text", "conf", str(path), "save it as UTF-8") from error
