"""A field that another route has and this one has not never just gets lost."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from support.gateway import ScriptedService

from twinpool.coordinator.gateway.bodies import ChatBody, CompletionBody
from twinpool.coordinator.gateway.messages_api.body import MessagesBody
from twinpool.coordinator.gateway.responses.body import ResponsesBody
from twinpool.coordinator.gateway.tokenizing import DetokenizeBody, TokenizeBody

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TURNS = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS},
    COMPLETIONS: {"prompt": "the"},
    RESPONSES: {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    MESSAGES: {"messages": TURNS, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/tokenize": {"prompt": "the"},
    "/detokenize": {"tokens": [5]},
}
GENERATE = (ChatBody, CompletionBody, ResponsesBody, MessagesBody)
NO_EFFECT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "verbosity",
    "spaces_between_special_tokens",
    "stream_options",
    "parallel_tool_calls",
    "max_tool_calls",
    "inference_geo",
    "cache_control",
    "context_management",
}
"""Where a route does not have these its answer is no other one, or there are no tools to call; they are warned of."""


@pytest.mark.parametrize("body", GENERATE)
def test_every_field_of_another_route_is_known(body: type[msgspec.Struct]) -> None:
    known = {*body.__struct_fields__}
    for table in ("not_supported", "foreign"):
        known |= {*getattr(body, table)}
    others = {name for other in GENERATE for name in other.__struct_fields__}
    assert others - known - NO_EFFECT == set()


@pytest.mark.parametrize("body", [*GENERATE, TokenizeBody, DetokenizeBody])
def test_no_field_of_a_route_is_foreign_to_it(body: type[msgspec.Struct]) -> None:
    foreign = {*getattr(body, "foreign", {})}
    assert foreign
    assert foreign & {*body.__struct_fields__, *getattr(body, "not_supported", {})} == set()


@pytest.mark.parametrize(
    ("path", "field", "value", "said"),
    [
        (CHAT, "prompt", "the", "send it to /v1/completions"),
        (CHAT, "stop_sequences", ["x"], "here it is called stop"),
        (CHAT, "max_output_tokens", 5, "here it is called max_tokens"),
        (CHAT, "text", {"format": {"type": "json_object"}}, "here it is called response_format"),
        (CHAT, "input", "Hi", "here it is called messages"),
        (CHAT, "instructions", "Be kind.", 'the role "system"'),
        (CHAT, "system", "Be kind.", 'the role "system"'),
        (CHAT, "enable_thinking", False, "chat_template_kwargs"),
        (CHAT, "previous_response_id", "resp_1", "send the turns so far as messages"),
        (COMPLETIONS, "messages", TURNS, "send it to /v1/chat/completions"),
        (COMPLETIONS, "tools", [{}], "send it to /v1/chat/completions"),
        (COMPLETIONS, "max_new_tokens", 5, "here it is called max_tokens"),
        (RESPONSES, "max_tokens", 5, "here it is called max_output_tokens"),
        (RESPONSES, "response_format", {"type": "json_object"}, "here it is called text.format"),
        (RESPONSES, "structured_outputs", {"regex": "a"}, "send it to /v1/chat/completions"),
        (RESPONSES, "guided_regex", "a", "send it to /v1/chat/completions"),
        (RESPONSES, "n", 2, "send it to /v1/chat/completions"),
        (RESPONSES, "include_stop_str_in_output", True, "send it to /v1/chat/completions"),
        (RESPONSES, "logprobs", True, '"message.output_text.logprobs"'),
        (MESSAGES, "stop", ["x"], "here it is called stop_sequences"),
        (MESSAGES, "response_format", {"type": "json_object"}, "here it is called output_config.format"),
        (MESSAGES, "structured_outputs", {"regex": "a"}, "send it to /v1/chat/completions"),
        (MESSAGES, "n", 2, "send it to /v1/chat/completions"),
        (MESSAGES, "logprobs", True, "send it to /v1/chat/completions"),
        (MESSAGES, "max_completion_tokens", 5, "here it is called max_tokens"),
        (MESSAGES, "parallel_tool_calls", False, "tool_choice.disable_parallel_tool_use"),
        ("/tokenize", "input", "the", "here it is called prompt"),
        ("/tokenize", "tokens", [5], "send it to /detokenize"),
        ("/detokenize", "prompt", "the", "send it to /tokenize"),
        ("/detokenize", "skip_special_tokens", True, "part of the text"),
        ("/v1/responses/input_tokens", "max_tokens", 5, "here it is called max_output_tokens"),
        ("/v1/messages/count_tokens", "input", "Hi", "here it is called messages"),
    ],
)
async def test_what_belongs_elsewhere_is_refused_with_its_place(
    client: httpx.AsyncClient, path: str, field: str, value: object, said: str
) -> None:
    answer = await client.post(path, json=BODIES[path] | {field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(f"{field} is not a field of this route; ")
    assert said in error["message"]
    assert error.get("param", field) == field


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("field", ["thinking_token_budget", "stop_regex", "lora_path", "functions", "suffix"])
async def test_what_only_other_servers_do_is_refused_by_each_route(
    client: httpx.AsyncClient, path: str, field: str
) -> None:
    answer = await client.post(path, json=BODIES[path] | {field: "x"})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{field} is")
    assert "not supported here" in message


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_values_that_ask_for_nothing_are_taken(
    client: httpx.AsyncClient, service: ScriptedService, path: str
) -> None:
    fields = {
        "n": 1,
        "best_of": None,
        "echo": False,
        "structured_outputs": None,
        "include_stop_str_in_output": False,
        "response_format": {"type": "text"},
        "logprobs": False,
        "documents": [],
        "add_generation_prompt": True,
    }
    answer = await client.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    assert "x-twinpool-warning" not in answer.headers
    bare = await client.post(path, json=BODIES[path])
    assert bare.status_code == 200
    first, second = service.submissions
    assert first.prompt_token_ids == second.prompt_token_ids
