"""Special tokens in grammars: no text is one, and their names are understood where a grammar refers to them."""

from __future__ import annotations

import json

import pytest
import tokenizers
from support.made_tokenizers import byte_level, metaspace, unigram

from twinpool.engine.special_tokens import by_number, hide


def with_added_tokens() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(byte_level().to_str())
    made.add_special_tokens(["<|end|>", "[CALLS]"])
    made.add_tokens(["<think>", "kernel"])
    return made


def test_special_tokens_and_those_in_angles_keep_their_numbers_and_lose_their_names() -> None:
    made = with_added_tokens()
    hidden = hide(made.to_str())
    assert hidden.token_ids == {name: made.token_to_id(name) for name in ("<|end|>", "[CALLS]", "<think>")}
    renamed = tokenizers.Tokenizer.from_str(hidden.tokenizer)
    assert renamed.get_vocab_size() == made.get_vocab_size()
    for text in ("a kernel of <truth>", "bana <|end|> [CALLS]<think>"):
        ids = renamed.encode(text).ids
        assert not set(ids) & set(hidden.token_ids.values())
        assert renamed.decode(ids) == text
    assert renamed.encode("kernel").ids == made.encode("kernel").ids


@pytest.mark.parametrize("make", [metaspace, unigram])
def test_what_the_rest_of_a_tokenizer_calls_them_changes_too(make: object) -> None:
    """The unknown token and those put around a text are looked up by name."""
    assert callable(make)
    made: tokenizers.Tokenizer = make()
    hidden = hide(made.to_str())
    renamed = tokenizers.Tokenizer.from_str(hidden.tokenizer)
    for text in ("bana kere", "\u4e00"):
        assert renamed.encode(text).ids == made.encode(text).ids


def test_a_tokenizer_without_any_stays_as_it_is() -> None:
    source = byte_level().to_str()
    assert hide(source) == (source, {})


def test_what_is_no_tokenizer_is_an_error() -> None:
    with pytest.raises(ValueError, match="added_tokens"):
        hide("{}")
    with pytest.raises(ValueError, match="Expecting"):
        hide('{"added_tokens": ')


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("start: <think> TEXT", "start: <[7]> TEXT"),
        ('start: "<think>" <think>', 'start: "<think>" <[7]>'),
        (r'start: "\"<think>" <other>', r'start: "\"<think>" <other>'),
        ("start: /<think>/ <think>", "start: /<think>/ <[7]>"),
        ("// <think>\nstart: <think>", "// <think>\nstart: <[7]>"),
        ('start: %json {"const": "<think>"}', 'start: %json {"const": "<think>"}'),
        ("start: <[3]> /a\\/<think>/", "start: <[3]> /a\\/<think>/"),
    ],
)
def test_names_are_replaced_where_they_refer_to_a_token(source: str, wanted: str) -> None:
    assert by_number(source, {"<think>": 7}) == wanted


def test_the_new_names_are_none_that_json_escapes_differently() -> None:
    """What `tokenizers` writes is searched for as text: a name with a quote, a backslash or an accent is found, too."""
    made = tokenizers.Tokenizer.from_str(byte_level().to_str())
    names = ['<"é">', "<\\>"]
    made.add_special_tokens(names)
    hidden = hide(made.to_str())
    assert set(hidden.token_ids) == set(names)
    assert all(json.dumps(name, ensure_ascii=False) not in hidden.tokenizer for name in names)
