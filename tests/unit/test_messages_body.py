"""What a request to `/v1/messages` means as a chat request, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.coordinator.gateway.messages_api.body import as_chat, check_messages
from twinpool.errors import InvalidRequest

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "weather", "description": "of a place", "input_schema": {"type": "object"}}


def chat_of(**fields: object) -> dict[str, Any]:
    return as_chat(check_messages({"messages": HI, "max_tokens": 9, **fields}, for_answer=True))


def test_turns_and_settings_have_the_names_of_the_chat_route() -> None:
    chat = chat_of(
        model="tiny",
        system="Be brief.",
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stream=True,
        metadata={"user_id": "u"},
        seed=4,
    )
    assert chat == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, *HI],
        "max_tokens": 9,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
        "seed": 4,
    }


def test_blocks_become_parts_calls_and_results() -> None:
    """A turn's results of tools come before what else the user says in it."""
    turns = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Rain?", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"at": "Bonn"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And?"},
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "wet"}]},
                {"type": "tool_result", "tool_use_id": "b", "is_error": True},
            ],
        },
    ]
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"at":"Bonn"}'}}
    chat = chat_of(messages=turns, system=[{"type": "text", "text": "Be brief."}])
    assert chat["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "Hm.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "wet"}]},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]


def test_an_answer_goes_on_with_a_turn_that_the_assistant_began() -> None:
    chat = chat_of(messages=[*HI, {"role": "assistant", "content": "Well,"}])
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat_of()


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}, None),
    ],
)
def test_the_choice_of_tools(choice: dict[str, object], expected: object, is_parallel: bool | None) -> None:
    chat = chat_of(tools=[TOOL], tool_choice=choice)
    assert chat["tools"] == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "of a place", "parameters": {"type": "object"}},
        }
    ]
    assert chat["tool_choice"] == expected
    assert chat.get("parallel_tool_calls") is is_parallel


def test_thinking_is_told_to_the_template() -> None:
    budget = {"type": "enabled", "budget_tokens": 1024}
    assert chat_of(thinking=budget)["chat_template_kwargs"] == {"enable_thinking": True}
    assert chat_of(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in chat_of()


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_the_text_may_have_to_match_a_schema(field: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    chat = chat_of(**{field: {"format": wanted} if field == "output_config" else wanted})
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }


def test_only_an_answer_needs_max_tokens() -> None:
    body = {"messages": HI}
    assert "max_tokens" not in as_chat(check_messages(body, for_answer=False))
    with pytest.raises(InvalidRequest, match="max_tokens is missing"):
        check_messages(body, for_answer=True)


def of_user(*blocks: dict[str, object]) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(blocks)}]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": []}, "messages", "it must be a list of length >= 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is missing"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "must be user or assistant"),
        (
            {"messages": of_user({"type": "image"})},
            "messages[0].content[0].type",
            '"image"; what is supported',
        ),
        ({"messages": of_user({"type": "text"})}, "messages[0].content[0].text", "text is missing"),
        ({"messages": of_user({"type": "tool_result"})}, "messages[0].content[0].tool_use_id", "is missing"),
        (
            {
                "messages": of_user(
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}
                )
            },
            "messages[0].content[0].content[0].type",
            "what is supported here: text",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
            "messages[0].content[0].name",
            "name is missing",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
            "messages[0]",
            "send the tool's result",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type", "what is supported here: text"),
        ({"max_tokens": 0}, "max_tokens", "it must be an integer >= 1"),
        ({"temperature": 1.5}, "temperature", "it must be a number <= 1.0"),
        ({"stop_sequences": "END"}, "stop_sequences", "it must be a list"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type", "no tools of its own"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "input_schema is missing"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "tool_choice.name is missing"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "must be one of auto, any, tool, none"),
        ({"thinking": {"type": "hard"}}, "thinking.type", "must be one of enabled, adaptive"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "leave it out"),
        ({"container": "c"}, "container", "leave it out"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "must be json_schema"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema", "schema is missing"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(fields: dict[str, object], param: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_of(**fields)
    assert refused.value.param == param
    assert said in refused.value.message
