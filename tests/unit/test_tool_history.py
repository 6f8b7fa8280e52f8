"""Calls and their results in a conversation, as chat templates take them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.tool_answers import LLAMA, MISTRAL, QWEN, answers_of, tokenizer_of

from twinpool.coordinator.gateway.tools import ToolCalls, name_results, tool_fields
from twinpool.errors import InvalidRequest

QWEN_ANSWERS = answers_of(QWEN)


def calls(*functions: dict[str, Any], **fields: Any) -> list[Any]:
    raw = [{"id": f"call_{i}", "type": "function", "function": f, **fields} for i, f in enumerate(functions)]
    return msgspec.convert(raw, ToolCalls)


def arguments_of(text: Any) -> Any:
    function = {"name": "f"} if text is ... else {"name": "f", "arguments": text}
    fields = tool_fields("messages[0]", "assistant", QWEN_ANSWERS, tool_calls=calls(function))
    return fields["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"city": "Paris", "days": [1, 2.5, null]}', {"city": "Paris", "days": [1, 2.5, None]}),
        (' {"a": 123456789012345678901234567890} ', {"a": 123456789012345678901234567890}),
        ("{}", {}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (None, {}),
        (..., {}),
        ({"city": "Paris"}, {"city": "Paris"}),
    ],
)
def test_templates_get_arguments_as_the_object_that_their_text_says(text: Any, expected: Any) -> None:
    assert arguments_of(text) == expected


@pytest.mark.parametrize(
    "text",
    ['{"city": "Par', '"Paris"', "[1]", "5", "{'city': 'Paris'}", '{"a": "\\ud800"}', "[" * 100_000],
)
def test_arguments_that_are_no_object_stay_text_so_that_the_conversation_can_go_on(text: str) -> None:
    assert arguments_of(text) == text


def test_a_message_has_only_what_it_was_sent_with() -> None:
    assert tool_fields("messages[0]", "user", QWEN_ANSWERS) == {}
    assert tool_fields("messages[0]", "assistant", QWEN_ANSWERS, tool_calls=[]) == {}
    fields = tool_fields("messages[0]", "tool", QWEN_ANSWERS, tool_call_id="call_1")
    assert fields == {"tool_call_id": "call_1"}
    fields = tool_fields("messages[0]", "assistant", QWEN_ANSWERS, tool_calls=calls({"name": "f"}, id=None))
    assert fields == {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("role", "kind", "param"),
    [
        ("user", "function", "messages[3].tool_calls"),
        ("tool", "function", "messages[3].tool_calls"),
        ("assistant", "custom", "messages[3].tool_calls[0].type"),
    ],
)
def test_calls_of_others_than_the_assistant_or_of_other_things_than_functions_are_refused(
    role: str, kind: str, param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        tool_fields("messages[3]", role, QWEN_ANSWERS, tool_calls=calls({"name": "f"}, type=kind))
    assert refused.value.param == param


def conversation(template: str, *functions: dict[str, Any], call_id: str = "call_0") -> list[dict[str, Any]]:
    answers = answers_of(template)
    called = tool_fields("messages[1]", "assistant", answers, tool_calls=calls(*functions, id=call_id))
    result = tool_fields("messages[2]", "tool", answers, tool_call_id=call_id)
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", **called},
        {"role": "tool", "content": "22", **result},
    ]


def test_a_template_shows_calls_and_results_as_the_model_writes_them() -> None:
    weather = {"name": "weather", "arguments": '{"city": "Paris"}'}
    text = tokenizer_of(QWEN).apply_chat_template(conversation(QWEN, weather, {"name": "stop"}))
    assert (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call><|im_end|>'
    ) in text
    assert "<tool_response>\n22\n</tool_response>" in text
    text = tokenizer_of(LLAMA).apply_chat_template(conversation(LLAMA, weather))
    assert '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>' in text
    assert '{"output": "22"}' in text


def test_a_template_that_takes_ids_of_nine_characters_gets_them_for_a_call_and_its_result() -> None:
    messages = conversation(MISTRAL, {"name": "weather"}, call_id="call_AbcdEfgh1")
    text = tokenizer_of(MISTRAL).apply_chat_template(messages)
    assert '{"name": "weather", "arguments": {}, "id": "AbcdEfgh1"}' in text
    assert '[TOOL_RESULTS] {"content": 22, "call_id": "AbcdEfgh1"}' in text


def test_results_get_the_name_of_what_was_called_unless_they_have_one() -> None:
    messages = conversation(QWEN, {"name": "weather"})
    *others, result = name_results([*messages, {"role": "tool", "content": "?", "tool_call_id": "unknown"}])
    assert [message.get("name") for message in others] == [None, None, "weather"]
    assert "name" not in result
    messages[2]["name"] = "mine"
    assert name_results(messages)[2]["name"] == "mine"


def test_nesting_that_no_template_can_print_is_refused_and_no_bug() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"a": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    with pytest.raises(InvalidRequest, match="does not accept"):
        tokenizer_of(QWEN).apply_chat_template([{"role": "user", "content": ""}], tools=tools)
