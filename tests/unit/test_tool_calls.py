"""Calls in an answer's text, in each format: what is a call, what is content, what is neither."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from support.tool_answers import call, ids, read

from twinpool.coordinator.gateway.deltas import Content, Delta, ToolCallArguments, ToolCallBegin
from twinpool.coordinator.gateway.tools.call_parser import CallParser
from twinpool.coordinator.gateway.tools.hermes import HermesParser
from twinpool.coordinator.gateway.tools.llama3 import Llama3Parser
from twinpool.coordinator.gateway.tools.mistral import MistralParser

MakeCallParser = Callable[..., CallParser]
TOOLS = ("weather", "stop")
WEATHER = '{"city": "Paris", "days": [1, 2, {"x": "}]\\""}]}'
WEATHER_CALL = call(0, "weather", WEATHER)


def hermes(most_calls: int | None = None) -> HermesParser:
    return HermesParser(ids(), TOOLS, most_calls)


def llama(most_calls: int | None = None) -> Llama3Parser:
    return Llama3Parser(ids(), TOOLS, most_calls)


def mistral(most_calls: int | None = None) -> MistralParser:
    return MistralParser(ids(), TOOLS, most_calls)


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


H_WEATHER = tagged(f'{{"name": "weather", "arguments": {WEATHER}}}')
L_WEATHER = f'{{"name": "weather", "parameters": {WEATHER}}}'
STOP = '{"name": "stop", "arguments": {}}'
M_WEATHER = f'{{"name": "weather", "arguments": {WEATHER}}}'


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (hermes, H_WEATHER),
        (hermes, f"<tool_call>{M_WEATHER}</tool_call>"),
        (hermes, f"\n\n{H_WEATHER}\n"),
        (hermes, f"<tool_call>{M_WEATHER}"),
        (hermes, tagged(f'{{"name":"weather","arguments":{WEATHER},"id":7}}')),
        (llama, L_WEATHER),
        (llama, f"<|python_tag|>{L_WEATHER}"),
        (llama, f" {L_WEATHER};\n"),
        (llama, f'{{"type": "function", "name": "weather", "parameters": {WEATHER}}}'),
        (llama, M_WEATHER),
        (mistral, f"[TOOL_CALLS][{M_WEATHER}]"),
        (mistral, f"[TOOL_CALLS] [ {M_WEATHER} ] "),
        (mistral, f"[TOOL_CALLS]{M_WEATHER}"),
        (mistral, f"[TOOL_CALLS]weather[ARGS]{WEATHER}"),
        (mistral, f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS] {WEATHER}"),
        (mistral, f"[TOOL_CALLS] weather {WEATHER}"),
    ],
)
def test_a_call_is_its_name_and_the_exact_text_of_its_arguments(parser: MakeCallParser, text: str) -> None:
    assert read(parser(), text) == WEATHER_CALL


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (hermes, f"{H_WEATHER}\n{tagged(STOP)}"),
        (hermes, f"{H_WEATHER}<tool_call>{STOP}</tool_call>\n"),
        (hermes, f"<tool_call>{M_WEATHER}\n<tool_call>{STOP}"),
        (llama, f'{L_WEATHER}; {{"name": "stop", "parameters": {{}}}}'),
        (llama, f'<|python_tag|>{L_WEATHER}\n;{{"name": "stop", "parameters": {{}}}};'),
        (mistral, f"[TOOL_CALLS][{M_WEATHER}, {STOP}]"),
        (mistral, f"[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]stop[ARGS]{{}}"),
    ],
)
def test_parallel_calls_are_counted_and_nothing_between_them_is_content(
    parser: MakeCallParser, text: str
) -> None:
    assert read(parser(), text) == [*WEATHER_CALL, *call(1, "stop", "{}")]


@pytest.mark.parametrize(
    ("parser", "text"), [(hermes, H_WEATHER), (llama, L_WEATHER), (mistral, f"[TOOL_CALLS][{M_WEATHER}]")]
)
def test_text_before_and_after_a_call_is_content_with_its_space(parser: MakeCallParser, text: str) -> None:
    deltas = read(parser(), f" Let me see.\n{text} \nDone. ")
    assert deltas == [Content(" Let me see.\n"), *WEATHER_CALL, Content(" \nDone. ")]


@pytest.mark.parametrize("parser", [hermes, llama, mistral])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "  Hello, {world} [1] <b>; ",
        'The answer is {"city": "Paris"}.',
        '{"name": "Bob", "age": 3}',
        "<tool",
        "[TOOL_CAL",
    ],
)
def test_an_answer_without_calls_is_content_to_the_last_character(parser: MakeCallParser, text: str) -> None:
    assert read(parser(), text) == ([Content(text)] if text else [])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (hermes, tagged("weather(Paris)")),
        (hermes, tagged("[]")),
        (hermes, tagged('{"arguments": {}}')),
        (hermes, tagged('{"name": 5, "arguments": {}}')),
        (hermes, tagged('{"name": "", "arguments": {}}')),
        (hermes, tagged('{"name": "\\ud800", "arguments": {}}')),
        (hermes, tagged('{"name": "weather", "arguments": [1]}')),
        (hermes, tagged('{"name": "weather", "arguments": "Paris"}')),
        (hermes, tagged('{"name": "weather", "arguments": "{\\"a\\": \\"\\ud800\\"}"}')),
        (hermes, tagged("{name: weather}")),
        (hermes, '<tool_call>{"name": "weath'),
        (hermes, "<tool_call>\n"),
        (hermes, "a </tool_call> b"),
        (llama, '{"name": "weather"}'),
        (llama, '{"name": "elsewhere", "parameters": {}}'),
        (llama, '{"name": "weather", "city": "Paris", "parameters": {}}'),
        (llama, '{"name": "weather", "parameters": "none"}'),
        (llama, '{"parameters": {"a": 1}, "name": "weath'),
        (llama, "<|python_tag|>print(1)"),
        (mistral, "[TOOL_CALLS][]"),
        (mistral, "[TOOL_CALLS] weather in Paris"),
        (mistral, "[TOOL_CALLS][ARGS]{}"),
        (mistral, '[TOOL_CALLS][{"name": "weather", "argu'),
        (mistral, "[TOOL_CALLS]"),
    ],
)
def test_what_turns_out_to_be_no_call_is_content_to_the_last_character(
    parser: MakeCallParser, text: str
) -> None:
    assert read(parser(), text) == [Content(text)]
    assert read(parser(), f"So: {text}") == [Content(f"So: {text}")]


@pytest.mark.parametrize("arguments", ['"arguments": null', '"id": 1', ""])
def test_a_marked_call_without_arguments_has_an_empty_object_of_them(arguments: str) -> None:
    members = ", ".join(filter(None, ('"name": "stop"', arguments)))
    assert read(hermes(), tagged(f"{{{members}}}")) == call(0, "stop", "{}")


def test_arguments_before_the_name_wait_for_it() -> None:
    parser = hermes()
    assert parser.add('<tool_call>{"arguments": {"a": 1}, ') == []
    assert parser.add('"name": "stop"') == call(0, "stop", '{"a": 1}')


def test_arguments_written_as_a_string_are_the_object_in_it() -> None:
    text = json.dumps({"name": "weather", "arguments": WEATHER})
    assert read(hermes(), tagged(text)) == WEATHER_CALL


def test_arguments_are_passed_on_with_each_piece_and_the_name_before_them() -> None:
    parser = hermes()
    pieces = [*tagged(f'{{"name": "weather", "arguments": {WEATHER}}}')]
    deltas = [parser.add(piece) for piece in pieces]
    texts = [delta.text for delta in itertools.chain(*deltas) if isinstance(delta, ToolCallArguments)]
    assert texts == [*WEATHER]
    begin = next(i for i, new in enumerate(deltas) if new)
    assert deltas[begin] == call(0, "weather", "{")
    assert "".join(pieces[: begin + 1]) == '<tool_call>\n{"name": "weather", "arguments": {'


def test_a_call_that_is_cut_off_has_the_arguments_so_far() -> None:
    assert read(hermes(), '<tool_call>{"name": "stop", "arguments": {"a": "x') == call(0, "stop", '{"a": "x')
    assert read(hermes(), '<tool_call>{"name": "stop", "arguments": {}}\n</tool_') == call(0, "stop", "{}")
    assert read(mistral(), '[TOOL_CALLS][{"name": "stop", "arguments": {}}, ') == call(0, "stop", "{}")


def test_arguments_end_where_their_brackets_stop_to_match_and_the_rest_is_content() -> None:
    text = '<tool_call>{"name": "stop", "arguments": {"a": [1}, 2}</tool_call> Well.'
    assert read(hermes(), text) == [*call(0, "stop", '{"a": [1'), Content("}, 2} Well.")]


def test_a_bracket_too_many_before_the_closing_tag_is_no_content() -> None:
    text = tagged('{"name": "stop", "arguments": {}}}')
    assert read(hermes(), f"{text}\nDone.") == [*call(0, "stop", "{}"), Content("\nDone.")]


def test_text_in_a_string_of_arguments_is_never_a_mark() -> None:
    arguments = json.dumps({"text": "</tool_call> <tool_call>{ [TOOL_CALLS] <|python_tag|>"})
    for parser, text in (
        (hermes(), tagged(f'{{"name": "stop", "arguments": {arguments}}}')),
        (llama(), f'{{"name": "stop", "parameters": {arguments}}}'),
        (mistral(), f"[TOOL_CALLS]stop[ARGS]{arguments}"),
    ):
        assert read(parser, text) == call(0, "stop", arguments)


def test_a_call_behind_what_was_none_is_found() -> None:
    text = f"<tool_call>\n{H_WEATHER}"
    assert read(hermes(), text) == [Content("<tool_call>\n"), *WEATHER_CALL]
    assert read(llama(), f"if (x) {{ {L_WEATHER}") == [Content("if (x) { "), *WEATHER_CALL]


def test_an_unmarked_call_must_be_of_a_tool_that_the_request_offers_a_marked_one_need_not() -> None:
    unknown: list[Delta] = [ToolCallBegin(0, "id0", "elsewhere"), ToolCallArguments(0, "{}")]
    assert read(hermes(), tagged('{"name": "elsewhere", "arguments": {}}')) == unknown
    assert read(llama(), '<|python_tag|>{"name": "elsewhere", "parameters": {}}') == unknown


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (hermes, f"Hm. {H_WEATHER}{H_WEATHER} Done."),
        (mistral, f"Hm. [TOOL_CALLS][{M_WEATHER}, {M_WEATHER}] Done."),
    ],
)
def test_calls_beyond_the_most_are_left_out(parser: MakeCallParser, text: str) -> None:
    assert read(parser(1), text) == [Content("Hm. "), *WEATHER_CALL, Content(" Done.")]


def test_a_mark_that_is_only_begun_is_not_shown_until_it_is_known_to_be_none() -> None:
    parser = hermes()
    assert parser.add("a <tool_") == [Content("a ")]
    assert parser.add("cal") == []
    assert parser.add("m>") == [Content("<tool_calm>")]


@pytest.mark.parametrize("parser", [hermes, llama, mistral])
def test_content_waits_for_nothing_if_no_mark_can_begin_in_it(parser: MakeCallParser) -> None:
    reading = parser()
    for piece in ("Hello", ", ", "world", "."):
        assert reading.add(piece) == [Content(piece)]
    assert reading.finish() == []
