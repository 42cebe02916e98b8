"""What all versions of a run share: tokenizer, model shape, problems, engine, progress."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import jax
from omegaconf import DictConfig, OmegaConf

from evojax.config import EvojaxConf
from evojax.domains.base import Domain, load_domain
from evojax.errors import InputError, UnavailableError
from evojax.evidence.types import Item, Split
from evojax.policy.compile_cache import enable_compile_cache
from evojax.policy.decoder import Params
from evojax.policy.hf import load_hf, save_hf
from evojax.policy.load import Policy, load_policy
from evojax.policy.lora import check as check_adapters
from evojax.policy.lora import init_adapters, merge, scale_of
from evojax.policy.peft import load_peft, save_peft
from evojax.report.live import LiveView
from evojax.training.collect import Sampler, encode_prompt
from evojax.training.crew import make_engine
from evojax.training.interrupt import InterruptGuard

NOT_NUMBERS = ("mode", "resume", "version", "output_root", "live", "hardware", "plan")


def typed(cfg: DictConfig) -> EvojaxConf:
    """The composed configuration as its dataclass, every interpolation resolved."""
    return cast(EvojaxConf, OmegaConf.to_object(cfg))


def config_hash(cfg: DictConfig) -> str:
    """sha256 of everything that can change a version's numbers.

    Left out (``NOT_NUMBERS``): where output goes, how it is shown, and on what it is computed: a
    run may go on on other devices, whose sums differ by rounding.
    """
    plain = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    for key in NOT_NUMBERS:
        plain.pop(key, None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class Workshop:
    """Built once per process from the frozen part of the configuration.

    Args:
        cfg: the run's configuration; candidates may not change the parts used here.
    """

    def __init__(self, cfg: EvojaxConf, run: str, view: LiveView, guard: InterruptGuard):
        enable_compile_cache()
        self.cfg = cfg
        self.run = run
        self.view = view
        self.guard = guard
        policy = self._load()
        self.lora = cfg.policy.lora if cfg.policy.lora.rank > 0 else None
        if self.lora:
            check_adapters(policy.params, self.lora)
        self.model = policy.cfg
        self.tokenizer = policy.tokenizer
        self.label = policy.label
        self.source = policy.source_dir
        self._policy: Policy | None = policy
        self.domain: Domain = load_domain(cfg.domain)
        self.pools: dict[Split, list[Item]] = {
            split: self.domain.items(split) for split in ("train", "eval", "audit")
        }
        self._check_lengths()
        pad_id, rows = self.tokenizer.pad_id, cfg.rollout.max_batch
        engine = make_engine(self.model, pad_id, rows, cfg.hardware.mesh)
        self.sampler = Sampler(engine, self.domain, self.tokenizer)

    @cached_property
    def frozen(self) -> Params | None:
        """The base policy's weights below all adapters, kept for the run; None without those."""
        return self._loaded() if self.lora else None

    def base_params(self) -> Params:
        """The base policy's weights; loaded anew, but for those that stay below adapters."""
        return self.frozen or self._loaded()

    def _loaded(self) -> Params:
        policy = self._policy or self._load()
        self._policy = None
        return policy.params

    def _load(self) -> Policy:
        with self._apart():
            return load_policy(self.cfg.policy, self.cfg.seed)

    def _apart(self) -> AbstractContextManager[Any]:
        """What is loaded inside for a mesh stays in the host's memory: it is whole, and one device
        may not have room for that."""
        mesh = self.cfg.hardware.mesh
        if mesh.data * mesh.fsdp * mesh.tp == 1:
            return nullcontext()
        return jax.default_device(jax.local_devices(backend="cpu")[0])

    def load(self, version_dir: Path) -> Params:
        """Weights of a finished version."""
        with self._apart():
            return load_hf(version_dir / "policy")[1]

    def start(self, parent: Path | None) -> Params:
        """What the training of a version begins with: weights, or adapters where those are trained.

        Args:
            parent: directory of the version that it goes on from; None: the base policy.
        """
        if not self.lora:
            return self.base_params() if parent is None else self.load(parent)
        base = self.base_params()
        if parent is None:
            return init_adapters(base, self.lora, self.cfg.seed)
        return load_peft(parent / "adapter", self.model, base, self.lora)

    def export(self, version_dir: Path, trained: Params) -> Params:
        """Write a version's policy as a Hugging Face directory that ``transformers`` loads.

        Adapters are merged into it, and also written by themselves, for PEFT.

        Args:
            trained: weights, or adapters, see ``start``.

        Returns:
            The whole weights.

        Raises:
            UnavailableError: the disk refused.
        """
        from safetensors import SafetensorError

        directory, lora, params = version_dir / "policy", self.lora, trained
        if lora:
            params = merge(self.base_params(), trained, scale_of(lora))
        try:
            if lora:
                source = None if self.source is None else str(self.source)
                save_peft(version_dir / "adapter", self.model, trained, lora, source)
            save_hf(directory, self.model, params, self.tokenizer)
        except (OSError, SafetensorError) as error:
            raise UnavailableError(
                f"the weights could not be written to {directory}: {error}. Remedy: free disk "
                "space there, then resume the run"
            ) from error
        return params

    def close(self) -> None:
        """Stop grader processes."""
        self.domain.close()

    def _check_lengths(self) -> None:
        room = self.model.max_position - max(
            self.cfg.sampling.max_new_tokens, self.cfg.eval.max_new_tokens
        )
        lengths = {
            item.id: len(encode_prompt(self.tokenizer, item))
            for pool in self.pools.values()
            for item in pool
        }
        self.longest_prompt = max(lengths.values(), default=0)
        long = [(name, length) for name, length in lengths.items() if length > room]
        if long:
            raise InputError.one(
                f"{len(long)} prompts are longer than the {room} tokens that the context of "
                f"{self.model.max_position} leaves, the first is {long[0][0]}",
                "domain",
                long[0][1],
                "shorten the prompts, or lower sampling.max_new_tokens",
            )

    def __enter__(self) -> Workshop:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
