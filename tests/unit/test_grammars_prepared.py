"""Matchers that are made ahead: for one job alone, a bounded number, and the compiler that all threads load once."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.gateway import tiny_tokenizer
from support.jobs import job
from support.made_grammars import (
    NUM_LOGITS,
    SCHEMA,
    allowed,
    compiler,
    json_schema,
    matcher_of,
    regex,
    with_grammar,
)

from twinpool.engine import grammars as grammars_module
from twinpool.engine.grammars import Compiler, Grammars, LLParserLimits, Matcher
from twinpool.errors import InvalidRequest, InvariantViolation, ModelError
from twinpool.request import Grammar, Job, RequestKey


class _Counting(Compiler):
    def __init__(self) -> None:
        tokenizer = tiny_tokenizer()
        super().__init__(tokenizer.backend.to_str(), NUM_LOGITS, tokenizer.eos_token_ids)
        self.num_compiled = 0

    def compile(self, grammar: Grammar) -> Matcher:
        self.num_compiled += 1
        return super().compile(grammar)


def test_who_asks_for_a_prepared_matcher_has_it_alone() -> None:
    counting = _Counting()
    grammars = Grammars(lambda: iter([counting]))
    jobs = [
        with_grammar(regex(source), source + name) for source, name in (("ab", "1"), ("cd", ""), ("ab", "2"))
    ]
    for each in jobs:
        grammars.prepare(each)
    first, second = grammars.matcher(jobs[0]), grammars.matcher(jobs[2])
    assert counting.num_compiled == 3
    third = grammars.matcher(jobs[0])
    assert counting.num_compiled == 4, "nobody prepared it a second time"
    first.accept(*tiny_tokenizer().encode("a"))
    assert allowed(first) != allowed(second) == allowed(third)


def test_what_is_prepared_is_for_that_job_and_that_grammar() -> None:
    grammars = Grammars(lambda: iter([compiler()]))
    grammars.prepare(with_grammar(regex("ab")))
    assert allowed(grammars.matcher(with_grammar(regex("cd")))) == allowed(matcher_of(regex("cd")))
    grammars.prepare(job("a", 3))  # of a job without a grammar there is nothing to prepare
    with pytest.raises(InvariantViolation, match="has no grammar"):
        grammars.matcher(job("a", 3))


def test_what_a_job_leaves_behind_is_forgotten_with_it() -> None:
    counting = _Counting()
    grammars = Grammars(lambda: iter([counting]))
    kept = []
    for _ in range(3):
        grammars.prepare(with_grammar(regex("a")))
        kept.append(weakref.ref(grammars._ready[with_grammar(regex("a")).key].matcher))
    grammars.forget(RequestKey("another", 0))
    assert [ref() is not None for ref in kept] == [False, False, True], (
        "a second one takes the place of the first"
    )
    grammars.forget(with_grammar(regex("a")).key)
    assert kept[-1]() is None
    grammars.matcher(with_grammar(regex("a")))
    assert counting.num_compiled == 4


@pytest.mark.parametrize(("most", "most_chars", "num_kept"), [(3, 1000, 3), (99, 45, 4), (99, 9, 0)])
def test_so_many_are_kept_and_no_longer_ones_the_latest_of_them(
    most: int, most_chars: int, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "MOST_READY", most)
    monkeypatch.setattr(grammars_module, "MOST_READY_CHARS", most_chars)
    counting = _Counting()
    grammars = Grammars(lambda: iter([counting]))
    jobs = [with_grammar(regex("a" * 10), str(number)) for number in range(6)]
    for each in jobs:
        grammars.prepare(each)
    for each in reversed(jobs):
        grammars.matcher(each)
    assert counting.num_compiled == 6 + 6 - num_kept
    for each in jobs:  # what was taken counts no more
        grammars.prepare(each)
    assert len(grammars._ready) == num_kept


def test_many_threads_load_the_tokenizer_once() -> None:
    loaded: list[Compiler] = []

    def load() -> Iterator[Compiler]:
        loaded.append(_Counting())
        yield loaded[-1]

    grammars = Grammars(load)
    jobs = [with_grammar(json_schema(SCHEMA), str(number)) for number in range(32)]
    with ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(grammars.matcher, jobs))
    assert len(loaded) == 1
    assert len(set(map(id, matchers))) == 32


def test_what_the_first_grammar_takes_is_done_ahead_in_pieces_and_the_first_one_does_the_rest() -> None:
    done: list[int] = []

    def load() -> Iterator[Compiler | None]:
        for piece in range(3):
            done.append(piece)
            yield None
        yield compiler()

    grammars = Grammars(load)
    assert [grammars.get_ahead() for _ in range(2)] == [False, False]
    assert done == [0, 1]
    assert not grammars.matcher(with_grammar(regex("a"))).error
    assert done == [0, 1, 2]
    assert grammars.get_ahead()
    assert Grammars(lambda: iter([compiler()])).get_ahead()


def test_a_compiler_that_is_finished_later_gives_the_same_masks() -> None:
    tokenizer = tiny_tokenizer()
    args = (tokenizer.backend.to_str(), NUM_LOGITS, tokenizer.eos_token_ids)
    later = Compiler(*args, is_to_be_finished=True)
    before = later.compile(json_schema(SCHEMA))
    later.finish()
    after = later.compile(json_schema(SCHEMA))
    assert allowed(before) == allowed(after) == allowed(matcher_of(json_schema(SCHEMA)))


def test_after_a_failure_whoever_comes_next_begins_anew() -> None:
    failures = iter([ModelError("unreadable"), None])

    def load() -> Iterator[Compiler]:
        if (failure := next(failures)) is not None:
            raise failure
        yield compiler()

    grammars = Grammars(load)
    with pytest.raises(ModelError, match="unreadable"):
        grammars.get_ahead()
    assert not grammars.matcher(with_grammar(regex("a"))).error


def test_how_far_an_answer_may_go_does_not_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lexer may have so many states for each of them, and this expression has thousands."""
    monkeypatch.setattr(
        grammars_module, "_LIMITS", LLParserLimits(max_lexer_states=200, verbose_errors=False)
    )
    grammars = Grammars(lambda: iter([compiler()]))
    for seed in range(20):
        matcher = grammars.matcher(with_grammar(regex("(a|b)*a(a|b){12}")))
        text = "".join(random.Random(seed).choices("ab", k=40))
        for token_id in tiny_tokenizer().encode(text):
            assert token_id in allowed(matcher)
            matcher.accept(token_id)
        assert not matcher.error


@pytest.mark.parametrize("ask", [Grammars.prepare, Grammars.matcher])
def test_a_grammar_that_cannot_be_compiled_is_refused(ask: Callable[[Grammars, Job], object]) -> None:
    with pytest.raises(InvalidRequest, match="unclosed group"):
        ask(Grammars(lambda: iter([compiler()])), with_grammar(regex("(a")))


def test_a_models_own_tokenizer_is_read_when_the_first_grammar_comes(tmp_path: Path) -> None:
    grammars = Grammars.of_model(tmp_path / "nowhere", NUM_LOGITS)
    with pytest.raises(ModelError):
        grammars.prepare(with_grammar(regex("a")))
