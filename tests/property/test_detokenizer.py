"""Streamed text, however the ids are split, is the decoded whole, and is never taken back."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import tokenizers_of_all_kinds as kinds
from support.default_model import default_model_dir

from twinpool.engine.detokenizer import IncrementalDetokenizer
from twinpool.engine.tokenizer import Tokenizer

_LOADED: dict[str, Tokenizer] = {}
_MAKE = {
    "default model": lambda: Tokenizer.from_dir(default_model_dir()),
    "sentencepiece": kinds.sentencepiece,
    "metaspace": kinds.metaspace,
    "wordpiece": kinds.wordpiece,
}


@pytest.fixture(params=_MAKE)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    name: str = request.param
    if name not in _LOADED:
        _LOADED[name] = _MAKE[name]()
    return _LOADED[name]


def streamed(tokenizer: Tokenizer, chunks: list[list[int]], skip_special_tokens: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*map(detokenizer.add, chunks), detokenizer.finish()]


@st.composite
def ids_in_chunks(draw: st.DrawFn, vocab_size: int) -> list[list[int]]:
    """Ids of the vocabulary and a little beyond, more often from its start: specials and single bytes."""
    low = st.integers(0, min(300, vocab_size + 3))
    ids = draw(st.lists(st.one_of(low, low, st.integers(0, vocab_size + 3)), max_size=80))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=20)))
    return [ids[start:end] for start, end in pairwise([0, *cuts, len(ids)])]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_random_ids_in_random_chunks(
    tokenizer: Tokenizer, data: st.DataObject, skip_special_tokens: bool
) -> None:
    chunks = data.draw(ids_in_chunks(tokenizer.vocab_size))
    whole = tokenizer.decode(list(chain.from_iterable(chunks)), skip_special_tokens)
    assert "".join(streamed(tokenizer, chunks, skip_special_tokens)) == whole


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_no_half_characters_of_a_real_text(tokenizer: Tokenizer, text: str) -> None:
    """Every piece is text of the whole; U+FFFD shows up only where the whole has it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    shown = ""
    for piece in streamed(tokenizer, [[id_] for id_ in ids], True):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole


def test_an_endless_run_of_broken_bytes_costs_no_more_per_token() -> None:
    """The window that is decoded for each token stays short even if no token ever ends a character."""
    tokenizer = Tokenizer.from_dir(default_model_dir())
    broken = [id_ for id_ in range(tokenizer.vocab_size) if tokenizer.decode([id_]) == "\ufffd"]
    ids = (broken * 20)[:2000]
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = ""
    for id_ in ids:
        text += detokenizer.add([id_])
        assert len(detokenizer._window) <= 24
    assert text + detokenizer.finish() == tokenizer.decode(ids)
