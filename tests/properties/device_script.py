"""Run by a test on 8 fake devices: one update on several meshes beside the same on one device."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from evojax.config import AlgorithmConf, LoraConf, MeshConf
from evojax.evidence.types import Completion
from evojax.grpo.advantages import RewardTable, estimate
from evojax.grpo.pack import pack
from evojax.grpo.update import Updater
from evojax.policy import sharding
from evojax.policy.decoder import ModelConfig, init_params
from evojax.policy.lora import init_adapters
from evojax.policy.shape import LinearConfig
from evojax.training import checkpoint

CFG = ModelConfig(
    vocab_size=48, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=8, num_kv_heads=8,
    head_dim=4, rope_theta=10000.0, rms_eps=1e-5, max_position=64,
)  # fmt: skip
HALF_HEADS = dataclasses.replace(CFG, num_kv_heads=2, tie_embeddings=False)
CONF = AlgorithmConf(
    objective="gspo", aggregation="seq_mean_token_mean", old_logprobs="trainer", epochs=2,
    correction="sequence_tis", correction_high=1.2, kl_coef=0.1, entropy_coef=0.1, lr=1e-2,
    weight_decay=0.1,
)  # fmt: skip
MESHES = {
    "8,1,1": CFG, "1,8,1": CFG, "1,1,8": CFG, "2,2,2": HALF_HEADS, "4,1,2": HALF_HEADS,
}  # fmt: skip


def weights(cfg, seed=1):
    params = init_params(cfg, seed)
    return jax.tree.map(lambda p: p * 12 if p.ndim == 3 or p.shape[0] == 48 else p, params)


def batch(cfg, shards, groups=6, samples=3):
    """The same rollouts, packed for one shard or for many; group 1 is dead."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 48, rng.integers(2, 6)).astype(np.int32) for _ in range(groups)]
    completions = [
        [
            Completion(rng.integers(0, 48, n).astype(np.int32), -rng.uniform(2, 5, n).astype("f"),
                       np.zeros(n), "stop", "v")
            for n in rng.integers(1, 6, samples)
        ]
        for _ in range(groups)
    ]  # fmt: skip
    rewards = rng.integers(0, 2, (groups, samples)).astype(float)
    rewards[:, :2] = [1.0, 0.0]
    rewards[1] = 1.0
    advantages = estimate("grpo", RewardTable(rewards, 1e-6))
    packed = pack(
        prompts, completions, advantages, 1, aggregation=CONF.aggregation, horizon=5,
        include_dead=True, shards=shards, share=cfg.linear is None,
    )  # fmt: skip
    assert packed is not None
    return packed


def mesh_of(text):
    return sharding.make_mesh(MeshConf(*map(int, text.split(","))))


def one_step(cfg, mesh, lora=None):
    """Clipped gradient (from the first moment), what was trained, and metrics of one step."""
    trainer = Updater(cfg, CONF, 0.8, mesh=mesh, lora=lora)
    packed = batch(cfg, trainer.shards)
    first, reference = weights(cfg), weights(cfg, 2)
    if lora:
        trainer.freeze(first)
        first, reference = (moved_adapters(first, lora, seed) for seed in (0, 1))
    trainer.reference(reference)
    state = trainer.init(first)
    packed = trainer.score_old(state, trainer.score_reference(packed))
    state, metrics = trainer.step(state, packed)
    leaf = jax.tree.leaves(state["params"]["layers"])[0]
    assert mesh is None or leaf.sharding.mesh == mesh
    moments = jax.device_get(optax.tree.get(state, "mu"))
    gradient = jax.tree.map(lambda m: m / (1 - CONF.beta1), moments)
    return gradient, jax.device_get(trainer.trained(state)), metrics


def moved_adapters(base, lora, seed):
    """Adapters that change the weights."""
    return jax.tree.map(lambda x: x + 0.01, init_adapters(base, lora, seed))


def apart(left, right):
    """Largest difference, as a share of the largest element."""
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(right))
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs) / largest


def differences(found, expected):
    """Of two results of ``one_step``."""
    return {
        "gradient": apart(found[0], expected[0]),
        "weights": apart(found[1], expected[1]),
        "metrics": {name: abs(found[2][name] - value) for name, value in expected[2].items()},
    }


def equality():
    alone = {id(cfg): one_step(cfg, None) for cfg in (CFG, HALF_HEADS)}
    return {
        name: differences(one_step(cfg, mesh_of(name)), alone[id(cfg)])
        for name, cfg in MESHES.items()
    }


def traits():
    """Everything else that an update may have, on a mesh with all three axes."""
    bfloat16 = dataclasses.replace(HALF_HEADS, compute_dtype="bfloat16")
    remat = dataclasses.replace(HALF_HEADS, remat="names")
    hybrid = dataclasses.replace(
        CFG, num_layers=4, family="qwen3_5", qk_norm=True, attn_gate=True,
        linear=LinearConfig(2, 2, 4, 8, 8, 4),
    )  # fmt: skip
    cases = {
        "lora": (HALF_HEADS, LoraConf(rank=2)), "bfloat16": (bfloat16, None),
        "remat": (remat, None), "hybrid": (hybrid, None),
    }  # fmt: skip
    return {
        name: differences(one_step(cfg, mesh_of("2,2,2"), lora), one_step(cfg, None, lora))
        for name, (cfg, lora) in cases.items()
    }


def program():
    """Text and sizes of the update compiled for a mesh, and what of the state is aliased."""
    trainer = Updater(HALF_HEADS, CONF, 0.8, mesh=mesh_of("2,2,2"))
    state = trainer.abstract_state()
    compiled = trainer.lower(state, batch(HALF_HEADS, trainer.shards)).compile()
    memory = compiled.memory_analysis()
    mine = sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )
    return {"text": compiled.as_text(), "aliased": memory.alias_size_in_bytes, "state": mine}


def checkpoints(directory):
    """A state saved from 4 devices, read back for 1, 2 and 8."""
    four = Updater(CFG, CONF, 0.8, mesh=mesh_of("2,2,1"))
    state, _ = four.step(four.init(weights(CFG)), batch(CFG, four.shards))
    checkpoint.save(directory, 1, state, {})
    whole, out = jax.device_get(state), {}
    for name in ("1,1,1", "1,1,2", "1,2,4"):
        other = Updater(CFG, CONF, 0.8, mesh=mesh_of(name))
        found = checkpoint.restore(directory, other.abstract_state())
        assert found is not None
        same = jax.tree.map(np.array_equal, jax.device_get(found.state), whole)
        devices = len(found.state["params"]["embed"].devices())
        packed = batch(CFG, other.shards)
        _, metrics = other.step(found.state, packed)
        out[name] = {
            "same": all(jax.tree.leaves(same)),
            "devices": devices,
            "loss": metrics["loss"],
        }
    _, metrics = four.step(state, batch(CFG, four.shards))
    return out | {"loss": metrics["loss"]}


if __name__ == "__main__":
    assert jnp.zeros(()).dtype == jnp.float32 and len(jax.devices()) == 8
    if sys.argv[1] == "traits":
        print(json.dumps(traits()))
    else:
        work = Path(sys.argv[1])
        found = {"equality": equality(), "program": program(), "checkpoints": checkpoints(work)}
        print(json.dumps(found))
