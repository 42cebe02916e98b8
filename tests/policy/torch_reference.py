"""What torch and transformers say about a model directory: the source of the golden file.

Run as a script with SmolLM2's converted directory and its GGUF file to write the golden file anew.
The logits then come from transformers' own GGUF loader, so they check the conversion too. (The ids
do not: that loader ignores the rule that digits are split off before anything else.)
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).with_name("golden_smollm2.npz")
TEXT = """The quick brown fox jumps over 13 lazy dogs; then 3 + 4 = 7, 5 - 2 = 3 and 6 + 0 = 6.
def gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a  # gcd(48, 18) == 6

Ünïcödé naïve café — “quoted”, 東京 and Ω ≈ 3.14159; a list:
\t1. apples\t2. pears\n\n\n   4) trailing spaces   \nQ: Which is larger, 87 or 78? A: 87.
Once upon a time there was a small model that could add two numbers, but only now and then; so it
was given many problems, and whenever an answer was right, it was told so. After a while it could.
"""


def reference_ids(directory: str | Path, text: str = TEXT) -> np.ndarray:
    """Token ids int32 ``[n]`` by transformers' reading of a directory's tokenizer files."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return np.array(tokenizer(text).input_ids, np.int32)


def reference_logits(path: str | Path, ids: np.ndarray) -> np.ndarray:
    """Logits float32 ``[n, V]`` by transformers on the CPU; ``path`` a directory or a GGUF file."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    path = Path(path)
    where, extra = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    model = AutoModelForCausalLM.from_pretrained(
        where, local_files_only=True, dtype=torch.float32, attn_implementation="eager", **extra
    )
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


def picked(vocab_size: int) -> np.ndarray:
    """64 vocabulary ids spread over the whole vocabulary."""
    return np.linspace(0, vocab_size - 1, 64).astype(np.int32)


if __name__ == "__main__":
    ids = reference_ids(sys.argv[1])
    logits = reference_logits(sys.argv[2], ids)
    chosen = picked(logits.shape[1])
    best = logits.argmax(-1).astype(np.int32)
    np.savez_compressed(GOLDEN, ids=ids, chosen=chosen, logits=logits[:, chosen], best=best)
