"""From output tokens to text, stop strings and counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.gateway import outputs, tiny_tokenizer

from twinpool.coordinator.gateway.answer import Answer, Piece
from twinpool.coordinator.service import Output
from twinpool.engine.detokenizer import IncrementalDetokenizer
from twinpool.errors import InvariantViolation, NoWorker, RequestFailed
from twinpool.request import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = tiny_tokenizer().eos_token_ids


def encode(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


def play(steps: Sequence[Output], stop: Sequence[str] = (), min_tokens: int = 0) -> tuple[str, Piece]:
    """The whole text and the last piece; outputs after a finished piece are not looked at, as in a reply."""
    answer = Answer(IncrementalDetokenizer(tiny_tokenizer()), stop, min_tokens)
    text = ""
    for step in steps:
        piece = answer.add(step)
        text += piece.text
        if piece.finish is not None:
            return text, piece
    raise AssertionError("no finish")


def one_by_one(token_ids: Sequence[int], finish: FinishReason) -> list[Output]:
    return outputs(token_ids, range(len(token_ids)), finish)


def test_eos_is_counted_and_no_text() -> None:
    ids = [*encode("the fox"), *EOS]
    text, last = play(one_by_one(ids, STOP))
    assert (text, last.num_tokens, last.finish, last.at_stop_string) == ("the fox", len(ids), STOP, False)


def test_a_stop_token_with_a_text_of_its_own_is_no_text() -> None:
    ids = encode("the fox")
    text, last = play(one_by_one(ids, STOP))
    assert text == tiny_tokenizer().decode(ids[:-1])
    assert last.num_tokens == len(ids)


def test_eos_that_was_to_be_ignored_is_no_text_either() -> None:
    ids = [*encode("the"), *EOS, *encode(" fox")]
    text, last = play(one_by_one(ids, LENGTH))
    assert (text, last.num_tokens, last.finish) == ("the fox", len(ids), LENGTH)


def test_an_answer_may_be_eos_alone() -> None:
    text, last = play([Output(EOS, 0, STOP)])
    assert (text, last.num_tokens, last.finish) == ("", 1, STOP)


def test_the_last_output_may_have_no_tokens() -> None:
    ids = tuple(encode("the"))
    text, last = play([Output(ids, 0), Output((), len(ids), LENGTH)])
    assert (text, last.num_tokens, last.finish) == ("the", len(ids), LENGTH)


def test_half_a_character_never_leaves_before_it_is_whole() -> None:
    ids = encode("€🙂")
    answer = Answer(IncrementalDetokenizer(tiny_tokenizer()), (), 0)
    texts = [answer.add(step).text for step in one_by_one(ids, LENGTH)]
    assert "".join(texts) == "€🙂"
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)


def test_half_a_character_at_the_end_is_what_decoding_gives() -> None:
    ids = encode("a€")[:-1]
    text, _ = play(one_by_one(ids, LENGTH))
    assert text == tiny_tokenizer().decode(ids)


@pytest.mark.parametrize("text", ["xyz", "the xyz fox", "the fox xyz", "xxyxyz"])
def test_a_stop_string_across_tokens_ends_the_answer_where_it_is_complete(text: str) -> None:
    ids = encode(text)
    got, last = play(one_by_one(ids, LENGTH), ["xyz"])
    assert got == text[: text.index("xyz")]
    assert "xyz" in tiny_tokenizer().decode(ids[: last.num_tokens])
    assert "xyz" not in tiny_tokenizer().decode(ids[: last.num_tokens - 1])
    assert last.finish is STOP


def test_a_stop_string_can_be_complete_at_the_first_token() -> None:
    ids = encode("the fox")
    first = tiny_tokenizer().decode(ids[:1])
    text, last = play(one_by_one(ids, LENGTH), [first])
    assert (text, last.num_tokens, last.finish, last.at_stop_string) == ("", 1, STOP, True)
    assert list(last.token_ids) == ids[:1]


def test_a_stop_string_across_the_first_two_tokens() -> None:
    ids = encode("xyq")
    assert [tiny_tokenizer().decode([id_]) for id_ in ids] == ["x", "y", "q"]
    text, last = play(one_by_one(ids, LENGTH), ["xy"])
    assert (text, last.num_tokens) == ("", 2)


def test_tokens_after_the_stop_string_are_not_counted() -> None:
    ids = tuple(encode("ab xyz and more"))
    text, last = play([Output(ids, 0)], ["xyz"])
    assert text == "ab "
    assert last.num_tokens == len(last.token_ids) < len(ids)
    assert last.at_stop_string


def test_a_stop_string_in_the_last_output_is_told_too() -> None:
    ids = tuple(encode("ab xyz and more"))
    _, last = play([Output(ids, 0, LENGTH)], ["xyz"])
    assert (last.finish, last.at_stop_string) == (STOP, True)
    assert last.num_tokens < len(ids)


def test_what_only_looked_like_a_stop_string_is_given_in_the_end() -> None:
    text, last = play(one_by_one(encode("the fox xy"), LENGTH), ["xyz"])
    assert (text, last.finish) == ("the fox xy", LENGTH)


def test_stop_strings_do_not_match_the_token_that_stops() -> None:
    text, last = play(one_by_one([*encode("the"), *EOS], STOP), ["<|im_end|>"])
    assert (text, last.finish) == ("the", STOP)


def test_a_stop_string_within_min_tokens_is_text() -> None:
    ids = encode("xyqxyq")
    text, last = play(one_by_one(ids, LENGTH), ["xy"], min_tokens=3)
    assert (text, last.num_tokens, last.finish) == ("xyq", 5, STOP)


def test_an_output_that_does_not_follow_is_a_bug() -> None:
    answer = Answer(IncrementalDetokenizer(tiny_tokenizer()), (), 0)
    answer.add(Output((5, 6), 0))
    for index in (0, 1, 3):
        with pytest.raises(InvariantViolation):
            answer.add(Output((7,), index))


def test_a_lost_request_is_its_error() -> None:
    answer = Answer(IncrementalDetokenizer(tiny_tokenizer()), (), 0)
    with pytest.raises(NoWorker):
        answer.add(Output((), 0, FinishReason.ERROR, NoWorker("gone")))
    with pytest.raises(RequestFailed, match="timeout"):
        answer.add(Output((), 0, FinishReason.TIMEOUT))
