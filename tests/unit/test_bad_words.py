"""Words become the sequences of tokens that spell them, as vLLM has them; no answer has one of these."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway import tiny_tokenizer

from twinpool.coordinator.gateway.bad_words import token_sequences
from twinpool.engine.bad_words import BadWords
from twinpool.errors import InvalidRequest

TOKENS = st.integers(0, 3)


def encoded(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer().encode(text, add_special_tokens=False))


def test_a_word_is_banned_alone_and_behind_a_space_if_that_is_one_token_for_another() -> None:
    bare, spaced = encoded("the"), encoded(" the")
    assert len(bare) == len(spaced) == 1
    assert token_sequences(tiny_tokenizer(), ["the"]) == (bare, spaced)
    assert token_sequences(tiny_tokenizer(), ["  the", "the"]) == (bare, spaced), (
        "each once, without its space"
    )


def test_where_the_space_is_a_token_of_its_own_the_word_alone_is_enough() -> None:
    bare = encoded("Zq")
    assert len(encoded(" Zq")) == len(bare) + 1
    assert token_sequences(tiny_tokenizer(), ["Zq"]) == (bare,)


def test_a_word_of_too_many_tokens_is_refused_by_what_it_is() -> None:
    with pytest.raises(InvalidRequest, match=r"bad_words has .*, which is 99 tokens; each may have 1 to 64"):
        token_sequences(tiny_tokenizer(), ["the", "Z" * 99])


@given(
    words=st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=6),
    output=st.lists(TOKENS, max_size=12),
    cut=st.integers(0, 12),
)
def test_what_is_banned_next_is_what_would_complete_a_word(
    words: list[list[int]], output: list[int], cut: int
) -> None:
    bad_words = BadWords(words, output[:cut])
    for token_id in output[cut:]:
        bad_words.add(token_id)
    completing = {
        token_id
        for token_id in range(4)
        if any([*output, token_id][-len(word) :] == word for word in words if len(word) <= len(output) + 1)
    }
    assert set(bad_words.next_banned()) == completing
