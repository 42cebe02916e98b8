"""What PEFT and transformers say about a model directory with adapters beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def adapted_logits(base: Path, adapter: Path, ids: np.ndarray) -> np.ndarray:
    """Logits float32 ``[n, V]`` of token ids ``[n]`` by PEFT on the CPU."""
    import torch  # pyright: ignore[reportMissingImports]
    from peft import PeftModel  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
