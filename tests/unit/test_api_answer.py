"""From output tokens to text, stop strings and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.gateway import outputs, tiny_tokenizer

from twinpool.coordinator.gateway.answer import Answer, AnswerRules, Piece
from twinpool.coordinator.service import Output
from twinpool.engine.detokenizer import IncrementalDetokenizer
from twinpool.errors import InvariantViolation, NoWorker, RequestFailed
from twinpool.request import FinishReason, TokenLogprobs

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = tiny_tokenizer().eos_token_ids


def encode(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


def answer(stop: Sequence[str] = (), min_tokens: int = 0, **rules: Any) -> Answer:
    detokenizer = IncrementalDetokenizer(tiny_tokenizer())
    return Answer(detokenizer, AnswerRules(stop=tuple(stop), min_tokens=min_tokens, **rules))


def pieces(steps: Sequence[Output], stop: Sequence[str] = (), **rules: Any) -> list[Piece]:
    """All pieces; outputs after a finished piece are not looked at, as in a reply."""
    found: list[Piece] = []
    reader = answer(stop, **rules)
    for step in steps:
        found.append(reader.add(step))
        if found[-1].finish is not None:
            return found
    raise AssertionError("no finish")


def play(steps: Sequence[Output], stop: Sequence[str] = (), min_tokens: int = 0) -> tuple[str, Piece]:
    """The whole text and the last piece."""
    found = pieces(steps, stop, min_tokens=min_tokens)
    return "".join(piece.text for piece in found), found[-1]


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
    texts = [piece.text for piece in pieces(one_by_one(ids, LENGTH))]
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
    reader = answer()
    reader.add(Output((5, 6), 0))
    for index in (0, 1, 3):
        with pytest.raises(InvariantViolation):
            reader.add(Output((7,), index))


def test_a_lost_request_is_its_error() -> None:
    with pytest.raises(NoWorker):
        answer().add(Output((), 0, FinishReason.ERROR, NoWorker("gone")))
    with pytest.raises(RequestFailed, match="timeout"):
        answer().add(Output((), 0, FinishReason.TIMEOUT))


# ── what stopped it ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("splits", [range(9), ()])
def test_the_stop_string_is_told_and_shown_if_it_is_to_be(splits: Sequence[int]) -> None:
    steps = outputs(encode("ab xyz and more"), splits, LENGTH)
    for includes_stop, text in ((False, "ab "), (True, "ab xyz")):
        found = pieces(steps, ["xyz", "more"], includes_stop=includes_stop)
        assert "".join(piece.text for piece in found) == text
        assert (found[-1].stop_reason, found[-1].finish) == ("xyz", STOP)


def test_the_stop_token_is_told_and_shown_if_it_is_to_be() -> None:
    ids = encode("the fox")
    for includes_stop in (False, True):
        found = pieces(one_by_one(ids, STOP), stop_token_ids=(ids[-1],), includes_stop=includes_stop)
        shown = ids if includes_stop else ids[:-1]
        assert "".join(piece.text for piece in found) == tiny_tokenizer().decode(shown)
        assert found[-1].stop_reason == ids[-1]


def test_what_ends_an_answer_by_itself_is_no_stop_reason() -> None:
    _, eos = play(one_by_one([*encode("the"), *EOS], STOP))
    _, length = play(one_by_one(encode("the"), LENGTH), ["xyz"])
    assert (eos.stop_reason, length.stop_reason) == (None, None)


# ── log probabilities ─────────────────────────────────────────────────────────────────────────────────────


def told(ids: Sequence[int], splits: Sequence[int], finish: FinishReason) -> list[Output]:
    """Outputs with a log probability of each token: minus its place in the answer."""
    return [
        step._replace(
            logprobs=tuple(TokenLogprobs(-float(step.first_index + i)) for i in range(len(step.token_ids)))
        )
        for step in outputs(ids, splits, finish)
    ]


@pytest.mark.parametrize("stop", [(), ("never",), ("fox",)])
def test_every_token_that_counts_has_its_log_probability_and_its_place(stop: Sequence[str]) -> None:
    ids = [*encode("the €🙂 fox"), *EOS]
    for splits in (range(len(ids)), (3, 4), ()):
        found = pieces(told(ids, splits, STOP), stop, has_logprobs=True)
        token_ids = [id_ for piece in found for id_ in piece.token_ids]
        assert token_ids == ids[: found[-1].num_tokens]
        logprobs = [entry.logprob for piece in found for entry in piece.logprobs]
        assert logprobs == [-float(place) for place in range(len(token_ids))]
        offsets = [offset for piece in found for offset in piece.text_offsets]
        assert offsets == sorted(offsets)
        assert offsets[:3] == [0, 3, 4]
        assert len(offsets) == len(token_ids)


def test_tokens_without_text_come_with_the_text_that_they_become() -> None:
    ids = encode("a€b")
    assert len(ids) == 5
    found = pieces(told(ids, range(5), LENGTH), has_logprobs=True)
    assert [(piece.text, len(piece.token_ids)) for piece in found] == [
        ("a", 1), ("", 0), ("", 0), ("€", 3), ("b", 1),
    ]  # fmt: skip
    assert [piece.num_tokens for piece in found] == [1, 2, 3, 4, 5]


def test_tokens_that_never_become_text_come_at_the_end() -> None:
    ids = [*encode("a"), *EOS]
    *_, last = pieces(told(ids, range(2), STOP), has_logprobs=True)
    assert (last.text, last.token_ids, len(last.logprobs)) == ("", EOS, 1)


def test_outputs_that_lack_log_probabilities_are_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="0 log probabilities came with 1 tokens"):
        answer(has_logprobs=True).add(Output((5,), 0))
    with pytest.raises(InvariantViolation, match="without the prompt's"):
        answer(has_prompt_logprobs=True).add(Output((5,), 0))


def test_the_prompts_log_probabilities_come_with_the_first_tokens() -> None:
    first = encode("€")[0]
    prompt = (TokenLogprobs(-1.0), TokenLogprobs(-2.0))
    reader = answer(has_prompt_logprobs=True, has_logprobs=True)
    piece = reader.add(Output((first,), 0, logprobs=(TokenLogprobs(-0.5),), prompt_logprobs=prompt))
    assert (piece.text, piece.prompt_logprobs) == ("", prompt)
    assert reader.add(Output((first,), 1, logprobs=(TokenLogprobs(-0.5),))).prompt_logprobs is None


def test_of_an_answer_that_is_the_prompt_only_nothing_is_shown() -> None:
    prompt = (TokenLogprobs(-1.0),)
    steps = [Output(tuple(encode("a")), 0, STOP, prompt_logprobs=prompt)]
    (piece,) = pieces(steps, is_prompt_only=True, has_prompt_logprobs=True, shows_tokens=True)
    assert piece == Piece("", (), 0, LENGTH, prompt_logprobs=prompt)
