"""The tools of a request: what is refused, what the template gets, what the answer must be, and what reads it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.tool_answers import DEEPSEEK_R1, LLAMA, MISTRAL, MISTRAL_NAMED, QWEN, answers_of, read

from twinpool.answer_formats import ReasoningFormat
from twinpool.bounds import MOST_GRAMMAR_CHARS
from twinpool.coordinator.gateway.deltas import Content, PlainText, Reasoning, ToolCallBegin
from twinpool.coordinator.gateway.tools import AnswerFormat, ToolChoice, ToolPlan, Tools, plan
from twinpool.errors import InvalidRequest
from twinpool.request import GrammarKind

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMED = {"type": "function", "function": {"name": "stop"}}


def function(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


BOTH = [function(parameters=CITY), function("stop")]


def planned(
    tools: Any = BOTH, choice: Any = None, parallel: bool | None = None, answers: AnswerFormat | None = None
) -> ToolPlan:
    return plan(
        None if tools is None else msgspec.convert(tools, Tools),
        None if choice is None else msgspec.convert(choice, ToolChoice),
        parallel,
        answers or answers_of(QWEN, added=MARKS),
    )


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "web_search"}], None, "tools[0].type"),
        ([function(), {"type": "function"}], None, "tools[1].function"),
        ([function("")], None, "tools[0].function.name"),
        ([function("get weather")], None, "tools[0].function.name"),
        ([function("x" * 65)], None, "tools[0].function.name"),
        ([function("f\n")], None, "tools[0].function.name"),
        ([function(), function()], None, "tools[1].function.name"),
        ([function(parameters={"type": "string"})], None, "tools[0].function.parameters"),
        ([function(parameters={"properties": []})], None, "tools[0].function.parameters"),
        ([function(parameters={"required": "city"})], None, "tools[0].function.parameters"),
        ([{"type": "retrieval"}], "none", "tools[0].type"),
        (BOTH, "always", "tool_choice"),
        (BOTH, {"type": "tool"}, "tool_choice.type"),
        (BOTH, {"type": "function"}, "tool_choice.function"),
        (BOTH, {"type": "function", "function": {"name": "elsewhere"}}, "tool_choice.function.name"),
        (None, "required", "tool_choice"),
        ([], NAMED, "tool_choice"),
    ],
)
def test_wrong_tools_and_choices_are_refused_by_name(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        planned(tools, choice)
    assert refused.value.param == param
    assert refused.value.message.startswith((param.split(".")[0], "tool_choice"))


def test_a_refusal_names_the_type_of_tool_that_is_not_supported_and_no_text_of_a_tool() -> None:
    with pytest.raises(InvalidRequest, match=r'tools\[0\].type is "web_search"; only .* "function"'):
        planned([{"type": "web_search"}])
    with pytest.raises(InvalidRequest) as refused:
        planned([function("very private")])
    assert "very private" not in refused.value.message


def test_a_model_that_takes_no_tools_gets_none_unless_the_choice_is_none() -> None:
    plain = answers_of("{{ messages }}")
    with pytest.raises(InvalidRequest, match="chat template takes no tools"):
        planned(answers=plain)
    assert planned(choice="none", answers=plain) == ToolPlan(plain)


@pytest.mark.parametrize(
    ("tools", "choice"),
    [(None, None), ([], None), (None, "auto"), ([], "none"), (BOTH, "none")],
)
def test_without_tools_or_with_the_choice_none_it_is_as_if_there_were_no_tools(
    tools: Any, choice: Any
) -> None:
    answers = answers_of(LLAMA)
    without = planned(tools, choice, answers=answers)
    assert without == ToolPlan(answers)
    assert without.template_tools is None
    assert without.parser_after("…") is PlainText


def test_the_template_gets_tools_as_openai_has_them_without_what_is_not_given() -> None:
    tools = [function(description="Now", parameters=CITY, strict=True), function("stop")]
    expected = [function(description="Now", parameters=CITY), function("stop")]
    for choice in (None, "auto", "required", NAMED):
        assert planned(tools, choice).template_tools == expected


def test_a_model_that_may_choose_is_not_held_to_anything() -> None:
    for choice in (None, "auto"):
        assert planned(choice=choice).grammar is None


def test_forced_calls_are_a_grammar_in_the_models_own_notation() -> None:
    grammar = planned(choice="required").grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert grammar.source.startswith('start: call ("\\n" call)*\ncall: <[256]> "\\n" body "\\n" <[257]>\n')
    assert '"{\\"name\\": \\"weather\\", \\"arguments\\": " args_0 "}"' in grammar.source
    assert grammar.source.count("%json") == 2


def test_a_named_function_is_the_only_one_and_called_once() -> None:
    grammar = planned(choice=NAMED).grammar
    assert grammar is not None
    assert grammar.source.startswith("start: call\n")
    assert "weather" not in grammar.source
    assert grammar == planned(choice=NAMED, parallel=True).grammar


def test_without_parallel_calls_one_is_forced_and_one_is_read() -> None:
    required = planned(choice="required", parallel=False)
    assert required.grammar is not None
    assert required.grammar.source.startswith("start: call\n")
    text = '<tool_call>{"name": "stop"}</tool_call>' * 2
    for given, expected in ((False, 1), (True, 2), (None, 2)):
        deltas = read(planned(parallel=given).parser_after("…")(), text)
        assert sum(isinstance(delta, ToolCallBegin) for delta in deltas) == expected


@pytest.mark.parametrize("template", [QWEN, MISTRAL, MISTRAL_NAMED])
def test_formats_with_parallel_calls_are_forced_to_at_least_one(template: str) -> None:
    answers = answers_of(template)
    one = planned(choice="required", parallel=False, answers=answers).grammar
    many = planned(choice="required", answers=answers).grammar
    assert one is not None
    assert many is not None
    assert one != many


def test_strict_functions_are_held_to_the_whole_schema() -> None:
    for strict, lenient in ((True, "false"), (False, "true"), (None, "true")):
        grammar = planned([function(parameters=CITY, strict=strict)], "required").grammar
        assert grammar is not None
        assert f'"lenient": {lenient}' in grammar.source


@pytest.mark.parametrize(
    ("parameters", "is_closed"),
    [
        (None, True),
        (CITY, True),
        ({}, False),
        ({"type": "object"}, False),
        (CITY | {"additionalProperties": True}, False),
        (CITY | {"anyOf": [{"required": ["city"]}, {"required": ["place"]}]}, False),
    ],
)
def test_arguments_have_no_properties_that_the_function_does_not_name(
    parameters: dict[str, Any] | None, is_closed: bool
) -> None:
    grammar = planned([function(parameters=parameters)], "required").grammar
    assert grammar is not None
    assert ('"additionalProperties": false' in grammar.source) == is_closed


def test_schemas_that_are_too_long_together_are_refused_only_where_an_answer_is_held_to_them() -> None:
    tools = [function(description="…", parameters={"description": "x" * MOST_GRAMMAR_CHARS})]
    assert planned(tools).grammar is None
    with pytest.raises(InvalidRequest, match="the functions' schemas have") as refused:
        planned(tools, "required")
    assert refused.value.param == "tools"


def test_reasoning_is_read_whether_or_not_there_are_tools() -> None:
    answers = answers_of(DEEPSEEK_R1)
    parser = planned(None, answers=answers).parser_after("…assistant: <think>\n")()
    assert read(parser, "Hm.</think>Hi") == [Reasoning("Hm."), Content("Hi")]


def test_each_answer_of_a_request_has_a_parser_of_its_own() -> None:
    make = planned(answers=answers_of(QWEN, reasoning=ReasoningFormat.NONE)).parser_after("…")
    first, second = make(), make()
    assert first.add('<tool_call>{"name": "st') == []
    assert read(second, "Hi") == [Content("Hi")]


def test_special_tokens_are_shown_to_the_parser_that_reads_them_and_to_nobody_else() -> None:
    answers = answers_of(MISTRAL_NAMED, special=("[TOOL_CALLS]", "[ARGS]", "[INST]"))
    shown = {answers.special_token_ids[text] for text in ("[TOOL_CALLS]", "[ARGS]")}
    assert planned(answers=answers).shown_token_ids == shown
    assert planned(choice="none", answers=answers).shown_token_ids == frozenset()
    answers = answers_of(QWEN, special=("<think>", "</think>"))
    assert len(planned(None, answers=answers).shown_token_ids) == 2
