from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from evojax.errors import InputError
from evojax.policy.tokenizer import ALPHABET, CharTokenizer, HFTokenizer

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def byte_level(directory: Path, template: str | None = TEMPLATE) -> HFTokenizer:
    """All bytes, one merge ("\\n" with a digit) and two special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(letters)} | {"Ċa": 256}
    raw = Tokenizer(models.BPE(vocab, [("Ċ", "a")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    raw.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return HFTokenizer.load(directory)


def test_ids_special_tokens_and_text(tmp_path):
    tok = byte_level(tmp_path)
    assert (tok.vocab_size, tok.bos_id, tok.eos_id, tok.pad_id) == (259, 257, 258, 258)
    ids = tok.encode("é\nab")
    assert ids.dtype == np.int32 and 256 in ids
    assert tok.decode(ids) == "é\nab"
    assert tok.decode([*ids, 258]) == "é\nab"


def test_ids_containing_finds_merged_and_special_tokens(tmp_path):
    tok = byte_level(tmp_path)
    newline = tok.ids_containing("\n")
    assert 256 in newline and len(newline) == 2
    assert tok.ids_containing("</s>") == (258,)
    assert tok.ids_containing("\n\n") == ()


def test_chat_uses_the_directorys_template_and_survives_saving(tmp_path):
    tok = byte_level(tmp_path)
    ids = tok.chat([{"role": "user", "content": "hi"}])
    assert tok.raw.decode(list(ids), skip_special_tokens=False) == "<s>user: hi<s>assistant: "
    other = tmp_path / "copy"
    other.mkdir()
    tok.save(other)
    again = HFTokenizer.load(other)
    assert again.chat([{"role": "user", "content": "hi"}]).tolist() == ids.tolist()


def test_chat_template_that_refuses_or_reaches_out_is_an_input_error(tmp_path):
    refusing = byte_level(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="roles must alternate"):
        refusing.chat([{"role": "user", "content": "hi"}])
    hostile = byte_level(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError, match="refuses the messages"):
        hostile.chat([{"role": "user", "content": "hi"}])


def test_case_G09_every_configured_end_id_is_known(tmp_path):
    byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 258, 9]}')
    assert HFTokenizer.load(tmp_path).eos_ids == (258, 7, 9)


def test_unusable_directories_say_why(tmp_path):
    with pytest.raises(InputError, match="tokenizer.json is missing"):
        HFTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="tokenizer.json cannot be read"):
        HFTokenizer.load(tmp_path)
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match="end-of-text"):
        HFTokenizer.load(tmp_path)


@given(st.text(ALPHABET))
def test_character_tokenizer_round_trips(text):
    tok = CharTokenizer()
    assert tok.decode(tok.encode(text)) == text


def test_character_tokenizer_edges(tmp_path):
    tok = CharTokenizer(64)
    assert tok.encode("0=\n").tolist() == [0, 12, 15]
    assert tok.ids_containing("\n") == (15,) and tok.eos_ids == (15,) and tok.vocab_size == 64
    assert tok.decode([1, 63]) == "1\ufffd"
    with pytest.raises(InputError, match="does not know 'ax'"):
        tok.encode("3 a x")
    with pytest.raises(InputError, match="no chat template"):
        tok.chat([{"role": "user", "content": "1"}])
    tok.save(tmp_path)
    assert HFTokenizer.load(tmp_path).encode("3 + 4=\n").tolist() == tok.encode("3 + 4=\n").tolist()
