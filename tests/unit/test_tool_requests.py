"""Requests with tools through the whole gateway: what the workers are asked for, and what the client reads."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.gateway import MODEL, ScriptedService, error_of, in_process, outputs
from support.tool_answers import DEEPSEEK_R1, LLAMA, MISTRAL, MISTRAL_NAMED, QWEN, tokenizer_of

from twinpool.answer_formats import ToolCallFormat
from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.routes import create_app
from twinpool.engine.tokenizer import Tokenizer
from twinpool.request import FinishReason, GrammarKind

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[INST]")
OBJECT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


async def asked(
    service: ScriptedService, tokenizer: Tokenizer, config: GatewayConfig | None = None, **fields: Any
) -> httpx.Response:
    """The response of a gateway to the model with that tokenizer; the messages and a tool are there unless given."""
    service.max_model_len = 8192
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER], **fields}
    transport = in_process(create_app(service, tokenizer, MODEL, limits=config or GatewayConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.post(CHAT, json={name: value for name, value in body.items() if value is not ...})


def answers(service: ScriptedService, tokenizer: Tokenizer, text: str) -> None:
    """The workers answer with the tokens of `text`, and stop."""
    ids = [*tokenizer.encode(text), *tokenizer.eos_token_ids]
    service.script = lambda _: outputs(ids, range(len(ids)), FinishReason.STOP)


def grammar_of(service: ScriptedService) -> str:
    """The grammar that the workers were given, in Lark."""
    grammar = service.submission.sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    return grammar.source


@pytest.mark.parametrize(
    ("template", "special", "text"),
    [
        (QWEN, TAGS, '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'),
        (LLAMA, ("<|python_tag|>",), '<|python_tag|>{"name": "weather", "parameters": {"city": "Köln"}}'),
        (MISTRAL, MISTRAL_MARKS, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}}]'),
        (MISTRAL_NAMED, MISTRAL_MARKS, '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}'),
    ],
)
async def test_calls_are_read_though_their_marks_are_special_tokens_and_others_stay_hidden(
    service: ScriptedService, template: str, special: tuple[str, ...], text: str
) -> None:
    tokenizer = tokenizer_of(template, special=(*special, "<|odd|>"))
    answers(service, tokenizer, f"So:<|odd|> {text}")
    (choice,) = (await asked(service, tokenizer)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So: "
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}


async def test_a_forced_call_is_a_grammar_for_the_workers(service: ScriptedService) -> None:
    await asked(service, tokenizer_of(LLAMA), tool_choice="required")
    assert grammar_of(service).startswith(
        'start: "{\\"name\\": \\"weather\\", \\"parameters\\": " args_0 "}"'
    )


async def test_calls_and_structured_output_come_behind_the_reasoning_of_a_model_that_thinks(
    service: ScriptedService,
) -> None:
    await asked(service, tokenizer_of(QWEN, TAGS), tool_choice="required")
    assert grammar_of(service).startswith("start: thought? answer\n")
    service.submissions.clear()
    service.ended.clear()
    await asked(service, tokenizer_of(DEEPSEEK_R1, TAGS), tools=..., response_format=OBJECT)
    assert grammar_of(service).startswith("start: rest answer\n")


async def test_structured_output_is_all_of_an_answer_whose_reasoning_the_template_has_closed(
    service: ScriptedService,
) -> None:
    await asked(
        service,
        tokenizer_of(QWEN, TAGS),
        tools=...,
        response_format=OBJECT,
        chat_template_kwargs={"enable_thinking": False},
    )
    grammar = service.submission.sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA


async def test_a_forced_call_comes_before_structured_output(service: ScriptedService) -> None:
    tokenizer = tokenizer_of(LLAMA)
    await asked(service, tokenizer, tool_choice="required", response_format=OBJECT)
    assert "weather" in grammar_of(service)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER | {"type": "custom"}]}, "tools[0].type"),
        ({"tools": ..., "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "map"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ({"tools": ..., "functions": [WEATHER["function"]]}, "functions"),
        ({"tools": ..., "function_call": {"name": "weather"}}, "function_call"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_what_cannot_be_is_refused_before_any_work(
    service: ScriptedService, fields: dict[str, Any], param: str
) -> None:
    error = error_of(await asked(service, tokenizer_of(QWEN), **fields), 400)
    assert error["param"] == param
    assert not service.submissions


async def test_a_schema_that_cannot_be_enforced_is_refused_before_any_work_if_it_is_strict(
    service: ScriptedService,
) -> None:
    function = {"name": "f", "parameters": {"type": "object", "not": {}}, "strict": True}
    tools = [{"type": "function", "function": function}]
    error = error_of(await asked(service, tokenizer_of(QWEN), tools=tools, tool_choice="required"), 400)
    assert error["param"] == "tools"
    assert not service.submissions
    await asked(service, tokenizer_of(QWEN), tools=tools)
    assert service.submission.sampling.grammar is None


async def test_a_model_without_tools_refuses_them_and_takes_the_choice_none(service: ScriptedService) -> None:
    for tokenizer, config in (
        (tokenizer_of(DEEPSEEK_R1), GatewayConfig()),
        (tokenizer_of(QWEN), GatewayConfig(tool_calls=ToolCallFormat.NONE)),
    ):
        error = error_of(await asked(service, tokenizer, config), 400)
        assert error["param"] == "tools"
        assert 'tool_choice to "none"' in error["message"]
        answered = await asked(service, tokenizer, config, tool_choice="none")
        assert answered.status_code == 200, answered.text
