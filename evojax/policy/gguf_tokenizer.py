"""The tokenizer inside a GGUF file: byte-level BPE with the splitting rule that the file names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post
from tokenizers.pre_tokenizers import PreTokenizer

from evojax.errors import InputError, Problem
from evojax.policy.tokenizer import HFTokenizer

_CONTROL, _USER_DEFINED = 3, 4  # token types of a GGUF vocabulary
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _words(digits: str) -> str:
    """Contractions, letters, at most so many digits, other signs, line ends, spaces."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _split(digits: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_words(digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


# By the name in ``tokenizer.ggml.pre``: how a text is cut before any merge.
_RULES: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
    "smollm": _single_digits,
}
_NORMALIZED = ("qwen2",)  # texts are put into composed form first
_WHOLE_WORDS = ("llama-bpe",)  # a word of the vocabulary is one token, whatever the merges say


def gguf_tokenizer(fields: dict[str, Any], file: Path, max_length: int) -> HFTokenizer:
    """The tokenizer that a GGUF file describes, or that of tokenizer.json beside it.

    Args:
        fields: of the file, by name. file: named in messages; its directory is looked into when
            the fields do not suffice. max_length: longest sequence, tokens.

    Raises:
        InputError: fields are missing or name a kind that is not known, and there is no
            tokenizer.json either.
    """
    found = _faults(fields)
    if not found:
        return _built(fields, max_length)
    if (file.parent / "tokenizer.json").is_file():
        return HFTokenizer.load(file.parent)
    remedy = f"put the model's tokenizer.json and tokenizer_config.json into {file.parent}"
    raise InputError([Problem(what, "policy.path", str(file), remedy) for what in found])


def _faults(fields: dict[str, Any]) -> list[str]:
    def field(name: str) -> Any:
        return fields.get(f"tokenizer.ggml.{name}")

    found = [
        f"the field tokenizer.ggml.{name} is missing"
        for name in ("tokens", "merges", "token_type", "eos_token_id")
        if field(name) is None
    ]
    if field("model") != "gpt2":
        found.append(f"the tokenizer is of the kind {field('model')!r}, only 'gpt2' can be built")
    elif field("pre") not in _RULES:
        known = ", ".join(_RULES)
        found.append(f"the tokenizer splits texts by {field('pre')!r}, known are: {known}")
    return found


def _built(fields: dict[str, Any], max_length: int) -> HFTokenizer:
    def field(name: str) -> Any:
        return fields.get(f"tokenizer.ggml.{name}")

    rule, tokens = field("pre"), field("tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ", 1)) for pair in field("merges")]
    raw = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule in _WHOLE_WORDS))
    if rule in _NORMALIZED:
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = _RULES[rule]()
    raw.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        named = [t for t, k in zip(tokens, field("token_type"), strict=True) if k == kind]
        raw.add_tokens([AddedToken(t, special=special, normalized=False) for t in named])
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    settings |= {
        ours: tokens[field(theirs)]
        for ours, theirs in _SPECIAL.items()
        if field(theirs) is not None
    }
    if (template := fields.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    if field("add_bos_token") and "bos_token" in settings:
        first = settings["bos_token"]
        raw.post_processor = post.TemplateProcessing(
            single=f"{first} $A",
            pair=f"{first} $A {first} $B",
            special_tokens=[(first, field("bos_token_id"))],
        )
    ends = [field(name) for name in ("eos_token_id", "eot_token_id")]
    return HFTokenizer(raw, settings, tuple(dict.fromkeys(i for i in ends if i is not None)))
