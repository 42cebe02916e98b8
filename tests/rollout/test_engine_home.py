"""The engine on several devices of one process: the same completions, each device a part."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import dataclasses, json
import jax, numpy as np
from jax.sharding import Mesh
from evojax.policy.decoder import ModelConfig, init_params
from evojax.policy.home import home_mesh
from evojax.policy.shape import LinearConfig
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine

plain = ModelConfig(64, 32, 64, 2, 4, 2, 8, 1e4, 1e-5, 128, compute_dtype="bfloat16")
hybrid = dataclasses.replace(
    plain, family="qwen3_5", num_layers=4, num_kv_heads=4, qk_norm=True, attn_gate=True,
    linear=LinearConfig(4, 2, 4, 8, 8, 4), tie_embeddings=False, compute_dtype="float32",
)
mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 1), ("data", "fsdp", "tp"))
assert home_mesh(None) is None
for cfg in (plain, hybrid):
    params = jax.tree.map(lambda x: np.asarray(x) * (8 if x.ndim > 1 else 1), init_params(cfg, 0))
    found, parts = [], {}
    for home in (None, home_mesh(mesh)):
        engine = EmbeddedEngine(cfg, 0, 8, home)
        engine.load_weights(params, "v")
        weights = engine._params["layers"][-1] | {"embed": engine._params["embed"]}
        parts = {n: (w.size / np.prod(w.sharding.shard_shape(w.shape))) for n, w in weights.items()}
        kinds = {n: str(w.dtype) for n, w in weights.items()}
        found.append(engine.generate(
            [np.arange(5), np.arange(7) + 3], SamplingParams(1.0, 8, ()), 4, [1, 2]))
    pairs = [(a, b) for x, y in zip(*found) for a, b in zip(x, y)]
    print(json.dumps({
        "parts": parts, "kinds": kinds,
        "same": all((a.token_ids == b.token_ids).all() for a, b in pairs),
        "difference": float(max(abs(a.logprobs - b.logprobs).max() for a, b in pairs)),
    }))
"""


def test_four_devices_sample_what_one_samples_and_hold_a_quarter_each():
    variables = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plain, hybrid = (json.loads(line) for line in done.stdout.splitlines())
    for found in (plain, hybrid):
        assert found["same"] and found["difference"] < 1e-4
        for name in ("q", "o", "gate", "up", "down", "embed"):
            assert found["parts"][name] == 4, name
    assert plain["parts"]["k"] == 1 and hybrid["parts"]["k"] == 4  # 2 heads are not cut over 4
    assert plain["kinds"]["q"] == "bfloat16" and plain["kinds"]["attn_norm"] == "float32"
