"""What a request to `/v1/responses` means as a chat request, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.coordinator.gateway.responses.body import as_chat, check_responses
from twinpool.errors import InvalidRequest

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CLOCK = {"type": "function", "name": "clock", "description": "the time", "strict": True}


def chat_of(**fields: object) -> dict[str, Any]:
    return as_chat(check_responses({"input": "Hi", **fields}))


def test_a_text_is_what_the_user_says() -> None:
    assert chat_of() == {"messages": [{"role": "user", "content": "Hi"}]}


def test_instructions_come_first_as_the_system() -> None:
    assert chat_of(instructions="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_items_become_messages_and_one_turn_is_one_message() -> None:
    """Reasoning, text and calls of the assistant are one message; each tool's output is one."""
    items = [
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"at":"Bonn"}'},
        {"type": "function_call", "call_id": "b", "name": "clock", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "wet"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    calls = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"at":"Bonn"}'}},
        {"id": "b", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]
    assert chat_of(input=items)["messages"] == [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "Hm.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "a", "content": "wet"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "noon"}]},
    ]


def test_calls_without_a_message_before_them_are_a_turn_of_their_own() -> None:
    items = [
        {"role": "user", "content": "Rain?"},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
    ]
    (_, turn) = chat_of(input=items)["messages"]
    assert turn["role"] == "assistant"
    assert turn["content"] is None
    assert [call["id"] for call in turn["tool_calls"]] == ["a"]


def test_what_the_assistant_refused_is_something_that_it_said() -> None:
    items = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    assert chat_of(input=items)["messages"][1]["content"] == [{"type": "text", "text": "No."}]


def test_settings_have_the_names_of_the_chat_route() -> None:
    chat = chat_of(
        model="tiny",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        stream_options={"include_obfuscation": False},
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        metadata={"a": "b"},
        store=True,
        seed=3,
        cache_salt="s",
        priority=None,
    )
    del chat["messages"]
    assert chat == {
        "model": "tiny",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "seed": 3,
        "cache_salt": "s",
    }


def test_log_probabilities_are_asked_for_by_include() -> None:
    assert "logprobs" not in chat_of(top_logprobs=0)
    chat = chat_of(top_logprobs=3, include=["message.output_text.logprobs", "reasoning.encrypted_content"])
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 3)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True},
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
            },
        ),
    ],
)
def test_the_text_format_is_the_response_format(wanted: dict[str, object], expected: object) -> None:
    assert chat_of(text={"format": wanted, "verbosity": "low"}).get("response_format") == expected


def test_tools_are_nested_as_the_chat_route_has_them() -> None:
    chat = chat_of(tools=[WEATHER, CLOCK], tool_choice={"type": "function", "name": "clock"})
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "clock", "description": "the time", "strict": True}},
    ]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "clock"}}


def test_of_the_tools_only_the_allowed_ones_are_shown_to_the_model() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    chat = chat_of(tools=[WEATHER, CLOCK], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["clock"]
    assert chat["tool_choice"] == "required"


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": None}, "input", "input is null; it must be a string or a list"),
        ({"input": []}, "input", "input is an empty list"),
        ({"input": 5}, "input", "input is 5"),
        ({"input": IMAGE}, "input[0].content[0]", '"input_image"; only parts of the types input_text'),
        ({"input": [{"content": "a"}]}, "input[0].type", "input[0].type is missing"),
        ({"input": [{"type": "message", "content": "a"}]}, "input[0].role", "input[0].role is missing"),
        ({"input": [{"role": "user"}]}, "input[0].content", "input[0].content is missing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "items are not stored"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "must be one of message, function_call"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "call_id is missing"),
        ({"input": [{"type": "function_call", "call_id": "f"}]}, "input[0].name", "name is missing"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id", "call_id is missing"),
        ({"max_output_tokens": 0}, "max_output_tokens", "it must be an integer >= 1"),
        ({"top_logprobs": 21}, "top_logprobs", "it must be an integer <= 20"),
        ({"top_logprobs": 3}, "top_logprobs", 'include lacks "message.output_text.logprobs"'),
        ({"include": ["all"]}, "include", 'include[0] is "all"; it must be one of'),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the turns so far"),
        ({"conversation": "conv_1"}, "conversation", "conversations are not stored"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompts are not stored"),
        ({"background": True}, "background", "stream the answer instead"),
        ({"truncation": "auto"}, "truncation", 'set it to "disabled"'),
        ({"max_tool_calls": 0}, "max_tool_calls", "it must be an integer >= 1"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "this server runs no tools of its own"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is missing"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "it must be function or allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}},
            "tool_choice.tools",
            '"g", which is none of the tools',
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "it must be one of text, json_object"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "schema is missing"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(fields: dict[str, object], param: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_of(**fields)
    assert refused.value.param == param
    assert said in refused.value.message


def test_no_message_quotes_what_a_conversation_says() -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_of(input=[{"role": "user", "content": {"secret": "word"}}])
    assert "secret" not in refused.value.message
