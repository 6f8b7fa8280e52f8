"""What sampling keeps of a sequence's tokens is a function of them, however they came: at once, or one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made_matcher import ANY, MadeMatcher

from twinpool.engine.look_back import LookBack
from twinpool.engine.past import Marks, Past, past_of
from twinpool.errors import InvalidRequest, InvariantViolation
from twinpool.kernels.batch_sampling import marks_of
from twinpool.request import Job, SamplingParams

VOCAB_SIZE = 40
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)


def job_of(token_ids: list[int], num_emitted: int, **sampling: object) -> Job:
    params = SamplingParams(max_tokens=99, seed=0, **sampling)  # type: ignore[arg-type]
    return Job("a", 0, tuple(token_ids), params, (), num_emitted)


def matcher_of(_job: Job) -> MadeMatcher:
    return MadeMatcher(VOCAB_SIZE)


def in_order(rows: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> list[list[int]]:
    return sorted(rows.tolist())


@given(prompt=TOKENS, before=TOKENS, after=TOKENS, banned=TOKENS)
def test_marks_that_grow_in_place_are_those_made_anew(
    prompt: list[int], before: list[int], after: list[int], banned: list[int]
) -> None:
    marks = Marks(prompt, before)
    for token_id in after:
        marks.add(token_id)
    assert in_order(marks.rows()) == in_order(marks_of(prompt, before + after, ()))
    assert in_order(marks.rows(banned)) == in_order(marks_of(prompt, before + after, banned))
    assert in_order(marks.rows()) == in_order(marks_of(prompt, before + after, ()))  # bans are of one step


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
    output=TOKENS,
    cut=st.integers(0, 30),
    repetition=st.sampled_from([1.0, 1.3]),
)
def test_a_sequence_that_goes_on_elsewhere_has_the_past_that_it_had(
    prompt: list[int], output: list[int], cut: int, repetition: float
) -> None:
    """One worker saw the prompt in chunks and each token as it ran; the other began with the job as it is by then."""
    bad_words = ((1,), (2, 3), (2, 3, 4, 5), (9, 3), (3, 3, 3))
    wishes = {
        "repetition_penalty": repetition,
        "frequency_penalty": 0.5,
        "grammar": ANY,
        "bad_words": bad_words,
    }
    cut = min(cut, len(output))
    stayed = Past(job_of(prompt, 0, **wishes), matcher_of)
    stayed.take(prompt[: len(prompt) // 2], 0)
    stayed.take(prompt[len(prompt) // 2 :], len(prompt) // 2)
    moved = Past(job_of(prompt + output[:cut], cut, **wishes), matcher_of)
    moved.take(prompt + output[:cut], 0)  # computed again, but seen already
    for index, token_id in enumerate(output):
        stayed.take([token_id], len(prompt) + index)
        if index >= cut:
            moved.take([token_id], len(prompt) + index)
            assert moved.next_banned() == stayed.next_banned()
    assert sorted(stayed.next_banned()) == sorted(
        last for *first, last in bad_words if ends_with(output, first)
    )
    assert in_order(moved.marks.rows()) == in_order(stayed.marks.rows())
    for past in (stayed, moved):
        assert isinstance(past.matcher, MadeMatcher)
        assert past.matcher.accepted == output


def ends_with(output: list[int], tokens: list[int]) -> bool:
    return output[len(output) - len(tokens) :] == tokens and len(tokens) <= len(output)


def test_the_token_at_the_seam_is_taken_once_though_two_steps_have_it() -> None:
    past = Past(job_of([1, 2], 0, frequency_penalty=1.0, grammar=ANY), matcher_of)
    past.take([3], 2)
    past.take([3], 2)
    assert past.marks.rows().tolist() == [[3, 2]]
    past.take([3, 4], 2)
    assert past.marks.rows().tolist() == [[3, 2], [4, 2]]
    assert isinstance(past.matcher, MadeMatcher)
    assert past.matcher.accepted == [3, 4]


def test_a_token_that_was_never_seen_is_a_bug_and_says_so() -> None:
    past = Past(job_of([1, 2], 0, presence_penalty=1.0), matcher_of)
    with pytest.raises(InvariantViolation, match="goes on at position 3; of its tokens 2 were seen"):
        past.take([5], 3)


def test_only_the_repetition_penalty_counts_the_prompt_and_a_grammar_counts_nothing() -> None:
    assert Past(job_of([1, 2], 1, frequency_penalty=1.0), matcher_of).marks.rows().tolist() == [[2, 2]]
    assert in_order(Past(job_of([1, 2], 1, repetition_penalty=2.0), matcher_of).marks.rows()) == [
        [1, 1], [2, 2],
    ]  # fmt: skip
    grammatical = Past(job_of([1, 2], 1, grammar=ANY), matcher_of)
    grammatical.take([9], 2)
    assert grammatical.marks.rows().tolist() == []


def test_a_grammar_that_cannot_be_compiled_is_an_error_of_its_sequence_alone() -> None:
    def refuse(_job: Job) -> MadeMatcher:
        raise InvalidRequest("it has no end")

    past = Past(job_of([1, 2], 1, grammar=ANY, frequency_penalty=1.0), refuse)
    assert past.error == "its grammar cannot be followed: it has no end"
    past.take([7], 2)
    assert past.marks.rows().tolist() == [[2, 2], [7, 2]]


def test_a_sequence_has_one_past_and_none_if_nothing_looks_back() -> None:
    look_back = LookBack.of(job_of([1, 2], 0, presence_penalty=0.1))
    assert look_back is not None
    assert past_of(look_back, matcher_of) is past_of(look_back, matcher_of)
    assert LookBack.of(job_of([1, 2], 0, bad_words=((1,),))) is not None
    assert LookBack.of(job_of([1, 2], 0, allowed_token_ids=(1,))) is not None
    assert LookBack.of(job_of([1, 2], 0, logit_bias=((1, 2.0),), logprobs=3)) is None
    look_back.past = "something else"
    with pytest.raises(InvariantViolation, match="another kind"):
        past_of(look_back, matcher_of)
