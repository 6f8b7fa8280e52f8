"""Prompts have exactly the tokens that they were to have, with every kind of tokenizer."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_tokenizers import ALL, bytes_only, joining

from twinpool.bench.serving.datasets.settings import DatasetSettings, PromptAs, TooLong
from twinpool.bench.serving.datasets.shapes import Piece, Shape, fit_to_context, hashed, own
from twinpool.bench.serving.datasets.text import Synthesizer
from twinpool.errors import ConfigError

PIECES = st.lists(
    st.builds(Piece, st.tuples(st.integers(0, 2), st.integers(0, 5)), st.integers(1, 60)),
    min_size=1,
    max_size=5,
)
KINDS = pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())


def _both(tokenizer: tokenizers.Tokenizer, seed: int = 0) -> tuple[Synthesizer, Synthesizer]:
    return Synthesizer(tokenizer, PromptAs.TEXT, seed), Synthesizer(tokenizer, PromptAs.IDS, seed)


@KINDS
@settings(max_examples=30)
@given(pieces=PIECES, seed=st.integers(0, 3))
def test_a_text_tokenizes_to_exactly_the_planned_ids(make, pieces: list[Piece], seed: int) -> None:
    tokenizer = make()
    as_text, as_ids = _both(tokenizer, seed)
    missing = max(0, as_text.least_tokens - sum(piece.num_tokens for piece in pieces))
    pieces = [Piece(pieces[0].key, pieces[0].num_tokens + missing), *pieces[1:]]
    ids = as_ids.prompt(pieces)
    assert len(ids) == sum(piece.num_tokens for piece in pieces)
    assert tuple(tokenizer.encode(as_text.prompt(pieces)).ids) == ids


@KINDS
@settings(max_examples=30)
@given(lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)), own_tokens=st.integers(4, 50))
def test_equal_hash_blocks_are_equal_text_and_equal_blocks_of_tokens(
    make, lengths: tuple[int, int], own_tokens: int
) -> None:
    """Two prompts that begin with the same three blocks of 8, the third cut to two lengths."""
    as_text, as_ids = _both(make())
    first, second = (
        (*hashed((7, 8, 9), 16 + min(8, length), 8), own(index, own_tokens))
        for index, length in enumerate(lengths)
    )
    common = 16 + min(8, *lengths) - 2  # a special token behind the text may shorten the last block
    assert as_ids.prompt(first)[:common] == as_ids.prompt(second)[:common]
    blocks = [as_text.prompt(pieces[:2]) for pieces in (first, second)]
    assert blocks[0] == blocks[1]
    assert as_text.prompt(second).startswith(blocks[0])


@given(
    lengths=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 600)), min_size=1, max_size=20),
    context=st.integers(8, 2000),
    block_size=st.integers(1, 512),
    too_long=st.sampled_from([TooLong.CLIP, TooLong.SCALE, TooLong.DROP]),
)
def test_what_was_fitted_fits_and_keeps_its_blocks_in_order(
    lengths: list[tuple[int, int]], context: int, block_size: int, too_long: TooLong
) -> None:
    shapes = [
        Shape(
            hashed(range(-(-i // block_size)), i, block_size), o, hash_ids=tuple(range(-(-i // block_size)))
        )
        for i, o in lengths
    ]
    wanted = DatasetSettings(max_model_len=context, too_long=too_long)
    try:
        fitted = fit_to_context(shapes, wanted).shapes
    except ConfigError:
        assert too_long is not TooLong.CLIP
        assert too_long is TooLong.SCALE or all(i + o > context for i, o in lengths)
        return
    for shape in fitted:
        assert shape.input_tokens >= 1
        assert shape.output_tokens >= 1
        assert shape.input_tokens + shape.output_tokens <= context
        assert [piece.key[1] for piece in shape.pieces] == list(shape.hash_ids)
        assert len({piece.num_tokens for piece in shape.pieces[:-1]}) <= 1
    if too_long is not TooLong.DROP:
        assert len(fitted) == len(shapes)
    if all(i + o <= context for i, o in lengths):
        assert fitted == shapes


def test_a_tokenizer_without_words_is_given_letters() -> None:
    assert " " not in Synthesizer(bytes_only(), PromptAs.TEXT, 0).prompt([own(0, 50)])


def test_a_tokenizer_that_counts_no_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="one token each wherever they stand"):
        Synthesizer(joining(), PromptAs.TEXT, 0)


def test_a_text_of_another_length_than_planned_is_found() -> None:
    synthesizer = Synthesizer(ALL["byte level"](), PromptAs.TEXT, 0)
    prompts = [synthesizer.prompt([own(index, 10)]) for index in range(3)]
    assert synthesizer.check(prompts, [10, 10, 10]) == 3
    with pytest.raises(ConfigError, match="prompt 1 was to have 11 tokens and has 10"):
        synthesizer.check(prompts, [10, 11, 10])


def test_equal_seeds_make_equal_prompts_in_any_order_and_others_do_not() -> None:
    make = ALL["byte level"]
    one, same, other = (Synthesizer(make(), PromptAs.TEXT, seed) for seed in (1, 1, 2))
    pieces = [[own(index, 30)] for index in range(4)]
    assert [one.prompt(p) for p in pieces] == [same.prompt(p) for p in reversed(pieces)][::-1]
    assert len({synthesizer.prompt(p) for p in pieces for synthesizer in (one, other)}) == 8
