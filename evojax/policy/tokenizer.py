"""Text to token ids and back. Sampled ids are never re-encoded: decoding is for reading only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from evojax.errors import InputError, Problem

ALPHABET = "0123456789+-=? \n"
_UNKNOWN = "\ufffd"


class Tokenizer(Protocol):
    """What the rest of the code needs of a tokenizer.

    ``vocab_size`` counts ids 0..vocab_size-1; ``eos_ids`` are all ids that end a text and
    ``eos_id`` is the first of them; ``pad_id`` may equal ``eos_id`` (padding is known from
    lengths, never from ids); ``bos_id`` is None when there is none.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int

    @property
    def eos_id(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a plain prompt, int32 ``[n]``."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids``, special tokens left out."""
        ...

    def ids_containing(self, text: str) -> tuple[int, ...]:
        """Every id whose own text contains ``text``, ascending: the stop ids for a stop text.

        Empty when no single token holds it (e.g. a stop text that always spans several tokens).
        """
        ...

    def chat(self, messages: Sequence[dict[str, str]]) -> np.ndarray:
        """Token ids of a conversation, ready for the model's turn, int32 ``[n]``."""
        ...

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, loadable by transformers."""
        ...


class HFTokenizer:
    """A ``tokenizers`` tokenizer with the settings of a Hugging Face directory.

    Args:
        raw: the tokenizer proper.
        settings: content of tokenizer_config.json (chat template included).
        eos_ids: ids that end a text, at least one.
    """

    def __init__(self, raw: RawTokenizer, settings: dict[str, Any], eos_ids: Sequence[int]):
        self.raw = raw
        self.settings = settings
        self.vocab_size = max(raw.get_vocab().values()) + 1
        self.eos_ids = tuple(eos_ids)
        self.bos_id = self._id("bos_token")
        pad = self._id("pad_token")
        self.pad_id = self.eos_ids[0] if pad is None else pad

    @classmethod
    def load(cls, directory: Path) -> HFTokenizer:
        """Read a directory; ids that end a text come from all of its configuration files.

        Raises:
            InputError: tokenizer.json is missing or broken, or no end-of-text token is named.
        """
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise _unusable("tokenizer.json is missing", directory)
        try:
            raw = RawTokenizer.from_file(str(file))
        except Exception as fault:  # the Rust side raises bare Exception, nothing narrower
            raise _unusable(f"tokenizer.json cannot be read ({fault})", directory) from fault
        raw.no_padding()
        raw.no_truncation()
        settings = read_json(directory / "tokenizer_config.json")
        template = directory / "chat_template.jinja"
        if template.is_file():
            settings["chat_template"] = template.read_text(encoding="utf-8")
        named = raw.token_to_id(token_text(settings.get("eos_token")) or "")
        eos = [] if named is None else [named]
        for source in ("generation_config.json", "config.json"):
            value = read_json(directory / source).get("eos_token_id")
            eos += value if isinstance(value, list) else [] if value is None else [value]
        if not eos:
            raise _unusable("no configuration file names an end-of-text token", directory)
        return cls(raw, settings, tuple(dict.fromkeys(eos)))

    def _id(self, name: str) -> int | None:
        text = token_text(self.settings.get(name))
        return None if text is None else self.raw.token_to_id(text)

    @property
    def eos_id(self) -> int:
        return self.eos_ids[0]

    def encode(self, text: str) -> np.ndarray:
        """See ``Tokenizer``; adds the special tokens (e.g. a leading BOS) that the model expects.

        Raises:
            InputError: the vocabulary cannot spell ``text``.
        """
        return self._encode(text, special=True)

    def _encode(self, text: str, special: bool) -> np.ndarray:
        try:
            return np.array(self.raw.encode(text, add_special_tokens=special).ids, np.int32)
        except Exception as fault:  # see load: the Rust side has no narrower type
            raise InputError.one(
                f"the tokenizer cannot encode this text ({fault})",
                "prompt",
                text[:80],
                "use only characters that the policy's tokenizer knows",
            ) from fault

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See ``Tokenizer``."""
        return self.raw.decode([int(i) for i in ids], skip_special_tokens=True)

    def ids_containing(self, text: str) -> tuple[int, ...]:
        """See ``Tokenizer``."""
        texts = self.raw.decode_batch(
            [[i] for i in range(self.vocab_size)], skip_special_tokens=False
        )
        return tuple(i for i, own in enumerate(texts) if text in own)

    def chat(self, messages: Sequence[dict[str, str]]) -> np.ndarray:
        """See ``Tokenizer``.

        Raises:
            InputError: there is no chat template, or it refuses the messages.
        """
        source = self.settings.get("chat_template")
        if isinstance(source, list):
            source = {t.get("name"): t.get("template") for t in source}.get("default")
        if not source:
            raise InputError.one(
                "this policy's tokenizer has no chat template",
                "domain.chat",
                True,
                "set domain.chat=false and use plain prompts",
            )
        from jinja2 import TemplateError

        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = {n: token_text(self.settings.get(n)) or "" for n in names}
        try:
            text = _template(source).render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except TemplateError as fault:
            raise InputError.one(
                f"the chat template refuses the messages ({fault})",
                "messages",
                list(messages)[:2],
                "give each message a role and a content that the template accepts",
            ) from fault
        return self._encode(text, special=False)

    def save(self, directory: Path) -> None:
        """See ``Tokenizer``."""
        self.raw.save(str(directory / "tokenizer.json"))
        text = json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


class CharTokenizer(HFTokenizer):
    """One id per symbol of ``ALPHABET``, for random-weight models; a newline ends a text.

    Args:
        vocab_size: size of the model's vocabulary; ids past the alphabet read as U+FFFD.

    >>> toy = CharTokenizer(32)
    >>> toy.encode("3+4=").tolist(), toy.decode([7, 15, 20])
    ([3, 10, 4, 12], '7\\n\ufffd')
    """

    def __init__(self, vocab_size: int = len(ALPHABET)):
        raw = RawTokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token=""))
        raw.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
        raw.decoder = decoders.Fuse()
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "\n"}
        super().__init__(raw, settings, (ALPHABET.index("\n"),))
        self.vocab_size = vocab_size

    def _encode(self, text: str, special: bool) -> np.ndarray:
        foreign = sorted(set(text) - set(ALPHABET))
        if foreign:
            raise InputError.one(
                f"the character tokenizer does not know {''.join(foreign)!r}",
                "prompt",
                text[:80],
                f"use only {ALPHABET!r}, or a policy with a real tokenizer",
            )
        return np.array([ALPHABET.index(c) for c in text], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See ``Tokenizer``."""
        return "".join(ALPHABET[i] if i < len(ALPHABET) else _UNKNOWN for i in ids)

    def ids_containing(self, text: str) -> tuple[int, ...]:
        """See ``Tokenizer``."""
        return tuple(i for i, c in enumerate(ALPHABET) if text in c)


@lru_cache(maxsize=8)
def _template(source: str) -> Any:
    """Compiled chat template; sandboxed, for it comes with the weights from elsewhere."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.globals["raise_exception"] = refuse
    return env.from_string(source)


def token_text(value: object) -> str | None:
    """Text of a token entry, which may be a string or ``{"content": ...}``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json(file: Path) -> dict[str, Any]:
    """Content of an optional JSON file; {} when it is absent.

    Raises:
        InputError: the file is there but holds no JSON object.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as fault:
        raise _unusable(f"{file.name} cannot be read ({fault})", file.parent) from fault
    if not isinstance(content, dict):
        raise _unusable(f"{file.name} does not hold a JSON object", file.parent)
    return content


def _unusable(what: str, directory: Path) -> InputError:
    remedy = "give a complete local Hugging Face directory (config, tokenizer.json, safetensors)"
    return InputError([Problem(what, "policy.path", str(directory), remedy)])
