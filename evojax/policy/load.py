"""From the ``policy`` section of the configuration to weights and tokenizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from evojax.config import PolicyConf
from evojax.errors import InputError, Problem
from evojax.policy.conf import SOURCES, arch_problems, arch_shape
from evojax.policy.decoder import Params, init_params
from evojax.policy.files import is_gguf
from evojax.policy.gguf_in import gguf_shape, load_gguf
from evojax.policy.hf import load_hf, read_config
from evojax.policy.shape import SMOLLM2_135M, ModelConfig
from evojax.policy.tokenizer import ALPHABET, CharTokenizer, HFTokenizer, Tokenizer


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
        UnavailableError: SmolLM2, or a model of the hub, cannot be fetched.
    """
    if conf.source == "smollm2_135m":
        from evojax.policy.smollm2 import smollm2_directory

        return _from_directory(conf, smollm2_directory(), "SmolLM2-135M-Instruct")
    if conf.source == "path":
        path = _path(conf)
        return _from_gguf(conf, path) if is_gguf(path) else _from_directory(conf, path, path.name)
    if conf.source == "hub":
        return _from_hub(conf)
    if conf.source == "random":
        cfg = _random_config(conf)
        tokenizer = CharTokenizer(cfg.vocab_size)
        label = f"random-{cfg.num_layers}x{cfg.hidden_size}"
        return Policy(cfg, init_params(cfg, seed), tokenizer, label, None)
    raise _unknown(conf)


def policy_shape(conf: PolicyConf) -> ModelConfig:
    """The shape of the model that ``conf`` names, without its weights; nothing is fetched.

    Raises:
        InputError: the section or the directory that it names is wrong.
    """
    if conf.source == "smollm2_135m":
        return _as_configured(SMOLLM2_135M, conf)
    if conf.source == "path":
        path = _path(conf)
        return _as_configured(gguf_shape(path) if is_gguf(path) else read_config(path), conf)
    if conf.source in ("hub", "random"):
        return _sound(conf, arch_problems(conf))
    raise _unknown(conf)


def _unknown(conf: PolicyConf) -> InputError:
    valid = f"valid: {', '.join(SOURCES)}"
    return InputError.one("unknown policy source", "policy.source", conf.source, valid)


def _as_configured(shape: ModelConfig, conf: PolicyConf) -> ModelConfig:
    """What a directory cannot say: how the model is computed."""
    return dataclasses.replace(shape, compute_dtype=conf.compute_dtype, remat=conf.remat)


def _path(conf: PolicyConf) -> Path:
    if not conf.path:
        raise InputError.one(
            "policy.source=path needs a directory or a GGUF file",
            "policy.path",
            conf.path,
            "set policy.path to a local Hugging Face model directory, or to a .gguf file",
        )
    return Path(conf.path).expanduser().resolve()


def _from_directory(conf: PolicyConf, directory: Path, label: str) -> Policy:
    return _loaded(conf, *load_hf(directory), HFTokenizer.load(directory), label, directory)


def _from_gguf(conf: PolicyConf, file: Path) -> Policy:
    return _loaded(conf, *load_gguf(file), file.stem, file)


def _loaded(
    conf: PolicyConf,
    shape: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    label: str,
    source: Path,
) -> Policy:
    cfg = _as_configured(shape, conf)
    if tokenizer.vocab_size > cfg.vocab_size:
        raise InputError.one(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model only {cfg.vocab_size}",
            "policy.path",
            str(source),
            "use the tokenizer that belongs to these weights",
        )
    return Policy(cfg, params, tokenizer, label, source)


def _from_hub(conf: PolicyConf) -> Policy:
    from evojax.policy.hub import hub_directory

    if not conf.repo:
        raise InputError.one(
            "policy.source=hub needs a repository",
            "policy.repo",
            conf.repo,
            "name it, e.g. policy.repo=Qwen/Qwen3-0.6B",
        )
    stated = policy_shape(conf)

    def check(shape: ModelConfig) -> None:
        """Plans and limits were computed from the stated shape, so it has to be the true one."""
        found = _as_configured(shape, conf)
        different = [f for f in vars(found) if getattr(found, f) != getattr(stated, f)]
        if different:
            raise InputError(
                [
                    Problem(
                        f"{conf.repo} has {getattr(found, name)!r} here",
                        f"policy.arch.{name}",
                        getattr(stated, name),
                        "state the shape that the model has, or name another model",
                    )
                    for name in different
                ]
            )

    try:
        directory, commit = hub_directory(conf.repo, conf.revision, check)
        return _from_directory(conf, directory, f"{conf.repo} ({commit[:8]})")
    except InputError as fault:
        problems = [
            dataclasses.replace(p, where="policy.repo", value=conf.repo)
            if p.where == "policy.path"
            else p
            for p in fault.problems
        ]
        raise InputError(problems) from fault


def _sound(conf: PolicyConf, found: list[Problem]) -> ModelConfig:
    if found:
        raise InputError(found)
    return arch_shape(conf)


def _random_config(conf: PolicyConf) -> ModelConfig:
    found, size = arch_problems(conf), conf.arch.vocab_size
    if size < len(ALPHABET):
        what = f"vocab_size {size} is below the {len(ALPHABET)} symbols in use"
        found.append(Problem(what, "policy.arch.vocab_size", size, "give at least that many"))
    return _sound(conf, found)
