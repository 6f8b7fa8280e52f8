"""Structured output through the routes: what workers are told, and what is refused before any work."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from support.gateway import MODEL, ScriptedService

from twinpool.request import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "Hi"}
CHAT_ROUTE, COMPLETION_ROUTE = "/v1/chat/completions", "/v1/completions"


async def test_workers_are_told_what_an_answer_must_match(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for route, body in ((CHAT_ROUTE, CHAT), (COMPLETION_ROUTE, COMPLETION)):
        answer = await client.post(route, json={"model": MODEL, **body, "n": 2, "response_format": asked})
        assert answer.status_code == 200, answer.text
    told = [submission.sampling.grammar for submission in service.submissions]
    assert told == [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))] * 4
    gbnf = {"guided_grammar": 'root ::= "a" | "b"'}
    assert (await client.post(COMPLETION_ROUTE, json={**COMPLETION, **gbnf})).status_code == 200
    in_lark = service.submissions[-1].sampling.grammar
    assert in_lark is not None
    assert in_lark.kind is GrammarKind.LARK


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_choice": []}, "guided_choice", "guided_choice is an empty list"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "send one of them"),
        ({"guided_json": SCHEMA, "ignore_eos": True}, "ignore_eos", "leave out one of them"),
        ({"guided_json": SCHEMA, "min_tokens": 1}, "min_tokens", "leave out one of them"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "not supported"),
    ],
)  # fmt: skip
async def test_what_cannot_be_obeyed_is_a_400_before_any_work(
    client: httpx.AsyncClient, service: ScriptedService, fields: dict[str, Any], param: str, words: str
) -> None:
    await _refused(client, fields, param, words)
    assert service.submissions == []


async def test_what_cannot_be_compiled_is_a_400_before_any_work(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}
    field = "response_format.json_schema.schema"
    await _refused(client, {"response_format": wrong}, field, "Invalid type: thing")
    await _refused(client, {"guided_json": {"not": {}}}, "guided_json", "Unimplemented keys")
    regex = {"structured_outputs": {"regex": "(a"}}
    await _refused(client, regex, "structured_outputs.regex", "unclosed group")
    await _refused(client, {"guided_grammar": "root ::= nowhere"}, "guided_grammar", "'nowhere' not found")
    assert service.submissions == []


async def _refused(client: httpx.AsyncClient, fields: dict[str, Any], param: str, words: str) -> None:
    answer = await client.post(COMPLETION_ROUTE, json={**COMPLETION, "stream": True, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


async def test_a_schema_is_private(client: httpx.AsyncClient) -> None:
    """No error quotes a value of it that is not what is wrong."""
    answer = await client.post(COMPLETION_ROUTE, json={**COMPLETION, "guided_json": ["my secret"]})
    assert answer.status_code == 400
    assert "secret" not in answer.text
    choices = ["my secret", 7]
    answer = await client.post(COMPLETION_ROUTE, json={**COMPLETION, "guided_choice": choices})
    assert answer.status_code == 400
    assert "secret" not in answer.text


async def test_no_log_has_a_schema_whatever_is_wrong_with_it(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its client is told what a compiler said of it; nobody else is."""
    caplog.set_level(logging.DEBUG)
    for fields in (
        {"guided_json": {"type": "my secret"}},
        {"guided_regex": "my secret("},
        {"guided_grammar": "start: my secret"},
        {"ebnf": 'root ::= "my secret'},
    ):
        answer = await client.post(COMPLETION_ROUTE, json={**COMPLETION, **fields})
        assert answer.status_code == 400, answer.text
    written = capfd.readouterr()
    assert "secret" not in caplog.text + written.out + written.err
