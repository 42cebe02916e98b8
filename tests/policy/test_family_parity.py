"""Every family against transformers, however its sequences are laid out (slow, needs torch)."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_families

from evojax.evidence.types import Completion
from evojax.grpo.advantages import RewardTable, estimate
from evojax.grpo.logprobs import score
from evojax.grpo.pack import Packed, pack
from evojax.policy import decoder
from evojax.policy.decoder import Params
from evojax.policy.hf import load_hf, save_hf
from evojax.policy.shape import ModelConfig
from evojax.policy.tokenizer import CharTokenizer
from evojax.rollout.base import SamplingParams
from evojax.rollout.embedded import EmbeddedEngine

LIMIT = 1e-4  # nats, and units of logits that are a few wide
SAMPLES = 3
PROMPTS = [
    np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], np.int32),
    np.array([1, 2, 3, 4, 5, 20, 21], np.int32),
    np.array([30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42], np.int32),
]


class Family:
    """One small model, its own samples, and what transformers says about them."""

    def __init__(self, name: str, directory: Path):
        torch_families.build(name, directory)
        self.cfg, self.params = load_hf(directory)
        engine = EmbeddedEngine(self.cfg, pad_id=0, max_batch=16)
        engine.load_weights(self.params, "v0")
        sampling = SamplingParams(1.0, 12, (47,))
        self.completions = engine.generate(PROMPTS, sampling, SAMPLES, [1, 2, 3])
        self.places = [(g, s) for g in range(len(PROMPTS)) for s in range(SAMPLES)]
        self.sequences = [
            np.concatenate([PROMPTS[g], self.completions[g][s].token_ids]) for g, s in self.places
        ]
        self.want = torch_families.logits(directory, self.sequences)

    def padded(self, left: bool) -> float:
        """Largest difference of logits in one batch of rows that are padded to one length."""
        size = max(map(len, self.sequences)) + 3
        tokens = np.full((len(self.sequences), size), 5, np.int32)
        valid = np.zeros(tokens.shape, bool)
        for row, ids in enumerate(self.sequences):
            place = slice(size - len(ids), size) if left else slice(0, len(ids))
            tokens[row, place], valid[row, place] = ids, True
        positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0).astype(np.int32)
        mask = np.tril(np.ones((size, size), bool)) & valid[:, None, :] & valid[:, :, None]
        got = all_logits(self.params, self.cfg, tokens, positions, mask)
        pairs = zip(got, valid, self.want, strict=True)
        return max(np.abs(row[here] - want).max() for row, here, want in pairs)

    def expected(self, place: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and entropies of a completion's tokens."""
        start = len(PROMPTS[place[0]])
        index = self.places.index(place)
        wide = self.want[index][start - 1 : -1].astype(np.float64)
        logp = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
        ids = self.sequences[index][start:]
        return logp[np.arange(len(ids)), ids], -(np.exp(logp) * logp).sum(axis=-1)

    def cached(self) -> float:
        """Largest difference of the sampler's own log-probabilities and entropies."""
        worst = 0.0
        for g, s in self.places:
            logp, entropy = self.expected((g, s))
            done = self.completions[g][s]
            apart = np.abs(done.logprobs - logp).max(), np.abs(done.entropies - entropy).max()
            worst = max(worst, *map(float, apart))
        return worst

    def packed(self) -> float:
        """Largest difference of the trainer's log-probabilities."""
        batch = packed_batch(self.cfg, self.completions)
        valid = batch.rows.response_mask
        scored = np.asarray(score(self.params, self.cfg, batch.rows, 1.0))
        flat = scored.reshape(-1, valid.shape[-1]), valid.reshape(-1, valid.shape[-1])
        worst, seen = 0.0, 0
        for place, logp, here in zip(batch.owner.reshape(-1, 2), *flat, strict=True):
            if place[0] >= 0:
                want, _ = self.expected((int(place[0]), int(place[1])))
                worst, seen = max(worst, float(np.abs(logp[here] - want).max())), seen + 1
        assert seen == len(self.places)
        return worst

    def exported(self, directory: Path) -> float:
        """Largest difference of transformers' logits after we have written the model."""
        save_hf(directory, self.cfg, self.params, CharTokenizer(self.cfg.vocab_size))
        again = torch_families.logits(directory, self.sequences)
        pairs = zip(again, self.want, strict=True)
        return max(float(np.abs(got - want).max()) for got, want in pairs)


def packed_batch(cfg: ModelConfig, completions: list[list[Completion]]) -> Packed:
    rewards = np.array([[1.0, 0.0, 0.0]] * len(PROMPTS))
    batch = pack(
        PROMPTS,
        completions,
        estimate("grpo", RewardTable(rewards, 1e-6)),
        2,
        aggregation="token_mean",
        horizon=12,
        share=cfg.linear is None,
    )
    assert batch is not None
    return batch


def all_logits(
    params: Params, cfg: ModelConfig, tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    @jax.jit
    def run(tokens: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        hidden = decoder.hidden_states(params, cfg, tokens, positions, mask)
        return decoder.lm_logits(params, cfg, hidden)

    return np.asarray(run(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(mask)))


@pytest.mark.slow
def test_every_family_equals_transformers_in_every_layout(tmp_path: Path, capsys):
    pytest.importorskip("torch")
    table = {}
    for name in torch_families.NAMES:
        family = Family(name, tmp_path / name)
        assert family.cfg.family == name
        table[name] = {
            "right padded": family.padded(left=False),
            "left padded": family.padded(left=True),
            "packed": family.packed(),
            "cached": family.cached(),
            "exported": family.exported(tmp_path / f"{name}-out"),
        }
    with capsys.disabled():
        print(f"\n{'family':10}" + "".join(f"{column:>14}" for column in table["llama"]))
        for name, row in table.items():
            print(f"{name:10}" + "".join(f"{apart:14.1e}" for apart in row.values()))
    assert max(apart for row in table.values() for apart in row.values()) < LIMIT, table
