"""The engine that lives in the training process: JAX, shared prefill, bucketed shapes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from evojax.errors import InputError, Problem
from evojax.evidence.types import Completion, FinishReason
from evojax.policy.cache import PromptCache, gather, unstack
from evojax.policy.decoder import ModelConfig, Params
from evojax.policy.home import at_home
from evojax.rollout.base import SamplingParams
from evojax.rollout.generate import Request, Sampled, prefix_cache, sample_completions
from evojax.rollout.prefix import PrefixPlan, plan_prefixes
from evojax.rollout.sampling import seed_words

_LENGTH_STEP = 16
_PREFIX_STEP = 64  # coarse: every new shape costs a compilation, padding costs little
_LEAST_BUDGET = 8
_WORTH = 0.8  # prefixes are shared when that leaves at most this part of the prefill


@dataclass(frozen=True)
class _Chunk:
    """Prompts that run together: indices into the call, and the bucket they are padded to."""

    members: list[int]
    rows: int
    length: int


class EmbeddedEngine:
    """Samples from weights of its own (``load_weights`` copies, so the trainer may donate its).

    Completions are a function of (weights, prompt, sampling, seed, sample index); other prompts of
    the call change a logit by float32 rounding at most.

    Args:
        cfg: shape of the model.
        pad_id: fills unused places; may equal a stop id.
        max_batch: rows (prompts times samples) decoded together at most.
        home: devices that the weights are cut over, see ``evojax.policy.home``; None: one.
    """

    def __init__(self, cfg: ModelConfig, pad_id: int, max_batch: int, home: Mesh | None = None):
        self.cfg = cfg
        self.home = home
        self.pad_id = pad_id
        self.max_batch = max_batch
        self._params: Params | None = None
        self._version = ""
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._unstack = jax.jit(partial(unstack, cfg=cfg))
        self._gather = jax.jit(gather)
        self._prefix = jax.jit(self._counted(prefix_cache), static_argnames="cfg")
        self._sample = jax.jit(
            self._counted(sample_completions), static_argnames=("cfg", "budget", "pad_id")
        )

    def _counted(self, function: Any) -> Any:
        """``function``, counting how often JAX traces it (once per bucket)."""

        def traced(*args: Any, **kwargs: Any) -> Any:
            self._counts["traces"] += 1
            return function(*args, **kwargs)

        return traced

    def load_weights(self, params: Params, version: str) -> None:
        """See ``Engine``."""
        began = time.perf_counter()
        self._params = None  # let go of the old copy before making the new one
        params = at_home(params, self.cfg, self.home)
        self._params = jax.block_until_ready(self._unstack(params))
        self._version = version
        self._seconds["load"] += time.perf_counter() - began

    def health(self) -> dict[str, Any]:
        """Version, counters and seconds since the start.

        ``prompt_tokens`` were asked for, ``prefill_tokens`` were computed (padding included,
        shared prefixes once); ``traces`` counts compiled shapes; ``seconds_tracing`` is the part
        of ``seconds_generate`` spent in calls that compiled something.
        """
        counts = ("traces", "calls", "prompts", "completions", "aborted", "prompt_tokens")
        counts += ("prefill_tokens", "sampled_tokens")
        report: dict[str, Any] = {"version": self._version}
        report |= {name: self._counts[name] for name in counts}
        return report | {f"seconds_{n}": self._seconds[n] for n in ("load", "generate", "tracing")}

    def generate(
        self,
        token_prompts: Sequence[np.ndarray],
        sampling: SamplingParams,
        n: int,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """See ``Engine``.

        Raises:
            InputError: a prompt is empty, too long or holds an unknown id; a setting is out of
                range. All problems at once.
        """
        if self._params is None:
            raise RuntimeError("load_weights comes before generate")
        prompts = [np.asarray(p, np.int32) for p in token_prompts]
        self._check(prompts, sampling, n, seeds)
        if not prompts:
            return []
        began, traces = time.perf_counter(), self._counts["traces"]
        plan, chunks = self._plan(prompts, n)
        prefixes = self._prefill_prefixes(plan) if plan else None
        parts: list[list[Completion]] = [[] for _ in prompts]
        for chunk in chunks:
            past = self._gather(prefixes, self._which(chunk, plan)) if plan else None
            for first in range(0, n, self.max_batch):
                samples = np.arange(first, min(n, first + self.max_batch), dtype=np.int32)
                request = self._request(chunk, prompts, plan, sampling, samples, seeds)
                sampled = self._sample(
                    self._params,
                    cfg=self.cfg,
                    budget=_power_of_two(sampling.max_new_tokens, _LEAST_BUDGET),
                    pad_id=self.pad_id,
                    past=past,
                    request=request,
                )
                self._counts["prefill_tokens"] += chunk.rows * chunk.length
                self._collect(chunk, jax.device_get(sampled), sampling, parts)
        self._count(prompts, parts, time.perf_counter() - began, traces)
        return parts

    def _count(
        self,
        prompts: list[np.ndarray],
        parts: list[list[Completion]],
        seconds: float,
        traces_before: int,
    ) -> None:
        self._counts["calls"] += 1
        self._counts["prompts"] += len(prompts)
        self._counts["prompt_tokens"] += sum(map(len, prompts))
        self._counts["completions"] += sum(map(len, parts))
        self._counts["sampled_tokens"] += sum(len(c.token_ids) for row in parts for c in row)
        self._seconds["generate"] += seconds
        if self._counts["traces"] > traces_before:
            self._seconds["tracing"] += seconds

    def _check(
        self, prompts: list[np.ndarray], sampling: SamplingParams, n: int, seeds: Sequence[int]
    ) -> None:
        found: list[Problem] = []

        def fault(what: str, where: str, value: object, remedy: str) -> None:
            found.append(Problem(what, where, value, remedy))

        if not (np.isfinite(sampling.temperature) and sampling.temperature > 0):
            fault("must be above 0", "temperature", sampling.temperature, "set e.g. 1.0")
        if sampling.max_new_tokens < 1:
            fault("must be at least 1", "max_new_tokens", sampling.max_new_tokens, "set e.g. 6")
        if n < 1:
            fault("must be at least 1", "samples per prompt", n, "set e.g. 8")
        if len(seeds) != len(prompts):
            fault(f"there are {len(prompts)} prompts", "seeds", len(seeds), "give one seed each")
        vocabulary, room = self.cfg.vocab_size, self.cfg.max_position - sampling.max_new_tokens
        bad = [i for i in sampling.stop_token_ids if not 0 <= i < vocabulary]
        if bad:
            fault(f"ids outside 0..{vocabulary - 1}", "stop_token_ids", bad, "use known ids")
        for index, prompt in enumerate(prompts):
            where = f"prompt {index}"
            if len(prompt) == 0:
                fault("is empty", where, 0, "give at least one token")
            elif len(prompt) > room:
                what = f"more than {room} tokens (max_position less max_new_tokens)"
                fault(what, where, len(prompt), "shorten the prompt or lower max_new_tokens")
            elif prompt.min() < 0 or prompt.max() >= vocabulary:
                fault(f"ids outside 0..{vocabulary - 1}", where, prompt[:8].tolist(), "re-encode")
        if found:
            raise InputError(found)

    def _plan(self, prompts: list[np.ndarray], n: int) -> tuple[PrefixPlan | None, list[_Chunk]]:
        """Share prefixes when that saves enough prefill; cut the call into chunks."""
        plan = plan_prefixes(prompts)
        plain, shared = self._chunks(prompts, n), self._chunks(plan.rests, n)
        rows, length = _prefix_shape(plan)
        cost = rows * length + sum(c.rows * c.length for c in shared)
        if cost <= _WORTH * sum(c.rows * c.length for c in plain):
            return plan, shared
        return None, plain

    def _chunks(self, rests: list[np.ndarray], n: int) -> list[_Chunk]:
        together = max(1, self.max_batch // n)
        order = sorted(range(len(rests)), key=lambda i: len(rests[i]))
        chunks = []
        for start in range(0, len(order), together):
            members = order[start : start + together]
            length = _round_up(max(len(rests[i]) for i in members), _LENGTH_STEP)
            chunks.append(_Chunk(members, min(together, _power_of_two(len(members))), length))
        return chunks

    def _prefill_prefixes(self, plan: PrefixPlan) -> PromptCache:
        rows, length = _prefix_shape(plan)
        tokens, lengths = _padded(plan.prefixes, rows, length, self.pad_id)
        self._counts["prefill_tokens"] += rows * length
        return self._prefix(self._params, cfg=self.cfg, tokens=tokens, lengths=lengths)

    def _which(self, chunk: _Chunk, plan: PrefixPlan) -> np.ndarray:
        """Row of the prefix cache for each row of a chunk; spare rows take the first."""
        which = np.zeros(chunk.rows, np.int32)
        which[: len(chunk.members)] = plan.which[chunk.members]
        return which

    def _request(
        self,
        chunk: _Chunk,
        prompts: list[np.ndarray],
        plan: PrefixPlan | None,
        sampling: SamplingParams,
        samples: np.ndarray,
        seeds: Sequence[int],
    ) -> Request:
        texts = plan.rests if plan else prompts
        rests = [texts[i] for i in chunk.members]
        tokens, lengths = _padded(rests, chunk.rows, chunk.length, self.pad_id)
        words = np.zeros((chunk.rows, 2), np.uint32)
        for row, member in enumerate(chunk.members):
            words[row] = seed_words(seeds[member])
        stop = np.zeros(self.cfg.vocab_size, bool)
        stop[list(sampling.stop_token_ids)] = True
        return Request(
            tokens=tokens,
            lengths=np.maximum(lengths, 1),
            live=np.arange(chunk.rows) < len(chunk.members),
            words=words,
            samples=samples,
            temperature=np.float32(sampling.temperature),
            stop=stop,
            limit=np.int32(sampling.max_new_tokens),
        )

    def _collect(
        self,
        chunk: _Chunk,
        sampled: Sampled,
        sampling: SamplingParams,
        parts: list[list[Completion]],
    ) -> None:
        """Cut the buffers into completions; the end of a row is its count, never a token id."""
        stop = set(sampling.stop_token_ids)
        for row, member in enumerate(chunk.members):
            for sample, count in enumerate(sampled.counts[row]):
                ids, logprobs, entropies = (np.array(a[row, sample, :count]) for a in sampled[:3])
                finish: FinishReason = "stop" if int(ids[-1]) in stop else "length"
                finite = np.isfinite(logprobs) & np.isfinite(entropies)
                if not finite.all():  # broken weights: never scored, and shown in health()
                    keep = int(np.argmin(finite))
                    ids, logprobs, entropies = ids[:keep], logprobs[:keep], entropies[:keep]
                    finish = "abort"
                    self._counts["aborted"] += 1
                parts[member].append(Completion(ids, logprobs, entropies, finish, self._version))


def _prefix_shape(plan: PrefixPlan) -> tuple[int, int]:
    """Bucket of the prefix batch: rows and tokens."""
    longest = max(map(len, plan.prefixes))
    return _power_of_two(len(plan.prefixes)), _round_up(longest, _PREFIX_STEP)


def _padded(
    sequences: list[np.ndarray], rows: int, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences as int32 ``[rows, length]`` padded on the right, and their lengths ``[rows]``."""
    tokens = np.full((rows, length), pad_id, np.int32)
    lengths = np.zeros(rows, np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        lengths[row] = len(sequence)
    return tokens, lengths


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``value`` and ``least``."""
    return max(least, 1 << (value - 1).bit_length())
