"""What a model thinks before it answers, told apart from the answer, and allowed for by grammars."""

from __future__ import annotations

import pytest
from support.tool_answers import DEEPSEEK_R1, QWEN, answers_of, call, ids, read

from twinpool.coordinator.gateway.deltas import Content, Delta, PlainText, Reasoning
from twinpool.coordinator.gateway.tools.hermes import HermesParser
from twinpool.coordinator.gateway.tools.reasoning import ThinkParser
from twinpool.engine import lark
from twinpool.errors import InvariantViolation
from twinpool.request import Grammar, GrammarKind

OPENED = "…<|im_start|>assistant\n<think>\n"
CLOSED = "…<|im_start|>assistant\n<think>\n\n</think>\n\n"
NEITHER = "…<think>is a tag<|im_start|>assistant\n"


def think(*pieces: str, is_open: bool = False) -> list[Delta]:
    return read(ThinkParser(PlainText(), is_open=is_open), *pieces)


def test_reasoning_is_what_stands_between_the_tags_without_the_space_at_them() -> None:
    text = "\n<think>\nParis, I think.\n\nYes.\n</think>\n\nParis. "
    assert think(text) == [Reasoning("Paris, I think.\n\nYes."), Content("Paris. ")]


def test_the_opening_tag_may_be_in_the_prompt_already() -> None:
    assert think("Paris?\n</think>\n\nParis.", is_open=True) == [Reasoning("Paris?"), Content("Paris.")]
    assert think("<think>\nParis?</think>Paris.", is_open=True) == [Reasoning("Paris?"), Content("Paris.")]


def test_an_answer_without_reasoning_is_content_to_the_last_character() -> None:
    for text in ("\n Paris. ", "The tags are <think> and </think>.", "<thin", "Paris</think>"):
        assert think(text) == [Content(text)]


def test_tags_behind_the_reasoning_are_content() -> None:
    text = "<think>a</think>Then <think>b</think>"
    assert think(text) == [Reasoning("a"), Content("Then <think>b</think>")]


def test_reasoning_that_never_ends_is_all_of_the_answer() -> None:
    assert think("<think>\nParis or </thin") == [Reasoning("Paris or </thin")]
    assert think("Paris or ", is_open=True) == [Reasoning("Paris or")]
    assert think("", is_open=True) == []


def test_no_reasoning_at_all_between_the_tags_leaves_the_answer() -> None:
    assert think("<think>\n\n</think>\n\nParis.") == [Content("Paris.")]


def test_reasoning_streams_and_holds_back_only_space_and_what_may_be_a_tag() -> None:
    parser = ThinkParser(PlainText(), is_open=False)
    assert parser.add("<think>\nI ") == [Reasoning("I")]
    assert parser.add("think </") == [Reasoning(" think")]
    assert parser.add("b>") == [Reasoning(" </b>")]
    assert parser.add("\n</think>\n\n") == []
    assert parser.add("So") == [Content("So")]
    assert parser.finish() == []


def test_calls_come_behind_reasoning_and_are_none_within_it() -> None:
    tagged = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parser = ThinkParser(HermesParser(ids(), ("f",)), is_open=False)
    assert read(parser, f"<think>\n{tagged}\n</think>\n\n{tagged}") == [
        Reasoning(tagged),
        *call(0, "f", "{}"),
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(OPENED, [Reasoning("Hi")]), (CLOSED, [Content("Hi")]), (NEITHER, [Content("Hi")])],
)
def test_whether_an_answer_begins_with_reasoning_shows_at_the_end_of_the_prompt(
    prompt: str, expected: list[Delta]
) -> None:
    reasoning = answers_of(DEEPSEEK_R1).reasoning
    assert reasoning is not None
    assert read(reasoning.parser(prompt, PlainText()), "Hi") == expected


JSON = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


def test_a_grammar_holds_for_the_answer_and_leaves_the_reasoning_before_it_free() -> None:
    answers = answers_of(QWEN, added=("<think>", "</think>"))
    begun, chosen = (answers.after_reasoning(JSON, prompt) for prompt in (OPENED, NEITHER))
    assert begun.kind is chosen.kind is GrammarKind.LARK
    assert begun.source.startswith("start: rest answer\n")
    assert chosen.source.startswith("start: thought? answer\n")
    for grammar in (begun, chosen):
        assert f"\nanswer: {lark.json_value({'type': 'object'})}\n" in grammar.source


def test_a_grammar_stays_as_it_is_where_no_reasoning_comes_before_the_answer() -> None:
    assert answers_of(QWEN).after_reasoning(JSON, CLOSED) is JSON
    assert answers_of(None).after_reasoning(JSON, OPENED) is JSON


def test_notation_that_only_the_check_reads_is_not_taken_for_a_grammar() -> None:
    with pytest.raises(InvariantViolation, match="GBNF"):
        answers_of(QWEN).after_reasoning(Grammar(GrammarKind.GBNF, 'root ::= "a"'), OPENED)
