"""From the ``policy`` section of the configuration to weights and tokenizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from evojax.config import ArchConf, PolicyConf
from evojax.errors import InputError, Problem
from evojax.policy.decoder import ModelConfig, Params, init_params
from evojax.policy.hf import load_hf
from evojax.policy.tokenizer import ALPHABET, CharTokenizer, HFTokenizer, Tokenizer

SOURCES = ("smollm2_135m", "path", "random")


@dataclass(frozen=True)
class Policy:
    """The model as loaded.

    Args:
        cfg: its shape. params: its weights. tokenizer: its tokenizer.
        label: name for reports. source_dir: where it was read from; None for random weights.
    """

    cfg: ModelConfig
    params: Params
    tokenizer: Tokenizer
    label: str
    source_dir: Path | None


def load_policy(conf: PolicyConf, seed: int) -> Policy:
    """Load the model that ``conf`` names.

    Args:
        conf: the ``policy`` section. seed: of the initial weights (``source=random`` only).

    Raises:
        InputError: the section or the directory that it names is wrong.
        UnavailableError: SmolLM2 cannot be fetched.
    """
    if conf.source == "smollm2_135m":
        from evojax.policy.smollm2 import smollm2_directory

        return _from_directory(smollm2_directory(), "SmolLM2-135M-Instruct", conf.compute_dtype)
    if conf.source == "path":
        if not conf.path:
            raise InputError.one(
                "policy.source=path needs a directory",
                "policy.path",
                conf.path,
                "set policy.path to a local Hugging Face model directory",
            )
        directory = Path(conf.path).expanduser().resolve()
        return _from_directory(directory, directory.name, conf.compute_dtype)
    if conf.source == "random":
        cfg = _random_config(conf.arch, conf.compute_dtype)
        tokenizer = CharTokenizer(cfg.vocab_size)
        label = f"random-{cfg.num_layers}x{cfg.hidden_size}"
        return Policy(cfg, init_params(cfg, seed), tokenizer, label, None)
    raise InputError.one(
        "unknown policy source", "policy.source", conf.source, f"valid: {', '.join(SOURCES)}"
    )


def _from_directory(directory: Path, label: str, compute_dtype: str) -> Policy:
    shape, params = load_hf(directory)
    cfg = dataclasses.replace(shape, compute_dtype=compute_dtype)
    tokenizer = HFTokenizer.load(directory)
    if tokenizer.vocab_size > cfg.vocab_size:
        raise InputError.one(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model only {cfg.vocab_size}",
            "policy.path",
            str(directory),
            "use the tokenizer that belongs to these weights",
        )
    return Policy(cfg, params, tokenizer, label, directory)


def _random_config(arch: ArchConf, compute_dtype: str) -> ModelConfig:
    cfg = ModelConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_layers=arch.num_layers,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.hidden_size // max(arch.num_heads, 1),
        rope_theta=arch.rope_theta,
        rms_eps=arch.rms_eps,
        max_position=arch.max_position,
        compute_dtype=compute_dtype,
    )
    found = cfg.faults()
    if arch.vocab_size < len(ALPHABET):
        found.append(f"vocab_size {arch.vocab_size} is below the {len(ALPHABET)} symbols in use")
    if not cfg.faults() and arch.hidden_size % arch.num_heads:
        found.append(f"hidden_size {arch.hidden_size} is not a multiple of num_heads")
    if found:
        remedy = "correct the sizes under policy.arch"
        raise InputError([Problem(what, "policy.arch", vars(arch), remedy) for what in found])
    return cfg
