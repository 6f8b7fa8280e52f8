"""Single tokens as clients see them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from support import made_tokenizers
from support.gateway import tiny_tokenizer
from support.tokenizers_of_all_kinds import sentencepiece

from twinpool.coordinator.gateway.token_texts import TokenTexts
from twinpool.engine.tokenizer import Tokenizer

TEXT = " ".join(made_tokenizers.WORDS[:6])


@pytest.mark.parametrize(
    "make", [made_tokenizers.byte_level, made_tokenizers.metaspace, made_tokenizers.unigram]
)
def test_the_texts_of_its_tokens_are_the_text(make: Callable[[], tokenizers.Tokenizer]) -> None:
    tokenizer = Tokenizer(make(), (), None)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert "".join(map(texts.text, ids)).removeprefix(" ") == TEXT
    assert b"".join(bytes(texts.bytes(id_)) for id_ in ids).decode().removeprefix(" ") == TEXT


def test_parts_of_characters_have_their_bytes() -> None:
    texts = TokenTexts(tiny_tokenizer())
    ids = tiny_tokenizer().encode("a€🙂")
    assert [texts.text(id_) for id_ in ids] == ["a", *["\N{REPLACEMENT CHARACTER}"] * 7]
    assert b"".join(bytes(texts.bytes(id_)) for id_ in ids).decode() == "a€🙂"


def test_a_byte_token_is_its_byte() -> None:
    tokenizer = sentencepiece()
    texts = TokenTexts(tokenizer)
    for byte in (0x00, 0x41, 0xE2, 0xFF):
        token_id = tokenizer.backend.token_to_id(f"<0x{byte:02X}>")
        assert token_id is not None
        assert texts.bytes(token_id) == [byte]


def test_special_tokens_have_a_text_and_unknown_ones_none() -> None:
    texts = TokenTexts(tiny_tokenizer())
    assert texts.text(tiny_tokenizer().eos_token_ids[0]) == "<|im_end|>"
    assert (texts.text(10**6), texts.bytes(10**6)) == ("", [])
