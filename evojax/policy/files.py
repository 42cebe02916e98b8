"""The local files that ``policy.path`` names: a Hugging Face directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evojax.config import PolicyConf
from evojax.errors import Problem
from evojax.policy.conf import stated_params

_MAGIC = b"GGUF"


def is_gguf(path: str | Path) -> bool:
    """Whether ``path`` names a GGUF file (by its ending).

    >>> is_gguf("model.Q8_0.gguf"), is_gguf("model")
    (True, False)
    """
    return Path(path).suffix.lower() == ".gguf"


def file_problems(policy: PolicyConf) -> Iterator[Problem]:
    """What is wrong with ``policy.path``, as far as it can be seen without reading weights."""
    if policy.source != "path":
        return
    where, value = "policy.path", policy.path
    path = Path(value).expanduser() if value else None
    if path is not None and is_gguf(path):
        if not path.is_file():
            yield Problem("no such file", where, value, "give the path of a GGUF file")
        elif not _begins_as_gguf(path):
            yield Problem("this is not a GGUF file", where, value, "fetch the file anew")
    elif path is None or not path.is_dir():
        remedy = "give a Hugging Face directory, or a file that ends in .gguf"
        yield Problem("no such directory", where, value, remedy)
    elif not (path / "config.json").is_file() or not list(path.glob("*.safetensors")):
        remedy = "it must hold config.json, *.safetensors and tokenizer.json"
        yield Problem("not a Hugging Face model directory", where, value, remedy)


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def weight_bytes(policy: PolicyConf) -> int:
    """Bytes of the model's weights as a version stores them.

    Raises:
        InputError: a GGUF file is damaged.
    """
    if policy.source != "path" or policy.path is None:
        return 4 * stated_params(policy)
    if is_gguf(policy.path):
        from evojax.policy.gguf_in import count_weights

        return 4 * count_weights(policy.path)
    files = Path(policy.path).expanduser().glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def training_bytes(policy: PolicyConf) -> int:
    """Bytes of a training state at least: weights and AdamW's two moments.

    With adapters it holds nothing but those, which are too small to count.
    """
    return 0 if policy.lora.rank > 0 else 3 * weight_bytes(policy)
