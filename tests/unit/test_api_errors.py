"""What the gateway refuses, and what it says when a request is lost: always in the OpenAI shape."""

from __future__ import annotations

import json

import httpx
import pytest
from support.gateway import MODEL, ScriptedService, error_of, events, tiny_tokenizer

from twinpool.coordinator.service import Output
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import (
    ClientTooSlow,
    ContextLengthExceeded,
    DeadlineExceeded,
    DuplicateRequest,
    InvariantViolation,
    NoWorker,
    QueueFull,
    RequestCancelled,
    RequestError,
    RequestFailed,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_an_unknown_model_is_404(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(CHAT, json={**HELLO, "model": "gpt-4"}), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "gpt-4" in error["message"]
    assert MODEL in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_00, b'"text"', b"\xff\xfe", b'{"prompt": NaN}'])
async def test_bad_json_is_400(client: httpx.AsyncClient, body: bytes) -> None:
    assert error_of(await client.post(COMPLETIONS, content=body), 400)["type"] == "invalid_request_error"


async def test_a_body_needs_no_content_type(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = await client.post(COMPLETIONS, content=json.dumps({"prompt": "a"}), headers=headers)
    assert response.status_code == 200


JSON_TEXT = b' {"prompt": "a"}'


@pytest.mark.parametrize(
    ("content_type", "content"),
    [
        ("text/plain", JSON_TEXT),
        ("", JSON_TEXT),
        ("application/json; charset=utf-8", JSON_TEXT),
        ("application/vnd.api+json", JSON_TEXT),
        (None, JSON_TEXT),
    ],
)
async def test_json_is_read_whatever_its_type_says(
    client: httpx.AsyncClient, content_type: str | None, content: bytes
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    assert (await client.post(COMPLETIONS, content=content, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/messages", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    ("headers", "content", "said"),
    [
        (
            {"content-type": "multipart/form-data; boundary=x"},
            JSON_TEXT,
            "'multipart/form-data'; send a JSON object",
        ),
        (
            {"content-type": "application/x-www-form-urlencoded"},
            b"prompt=a",
            "x-www-form-urlencoded'; send a JSON",
        ),
        ({"content-type": "text/plain"}, b"Hi", "'text/plain'; send a JSON"),
        ({"content-encoding": "gzip"}, JSON_TEXT, "content-encoding is 'gzip'; send it as it is"),
    ],
)
async def test_a_body_that_is_no_json_by_its_type_is_415(
    client: httpx.AsyncClient, path: str, headers: dict[str, str], content: bytes, said: str
) -> None:
    answer = await client.post(path, content=content, headers=headers)
    assert answer.status_code == 415
    assert said in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"


async def test_what_says_that_it_is_json_and_is_not_is_400(client: httpx.AsyncClient) -> None:
    for headers in ({"content-type": "application/json"}, {}):
        error = error_of(await client.post(COMPLETIONS, content=b"prompt=a", headers=headers), 400)
        assert "not valid JSON" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"prompt": "a", "bad_words": ["the " * 99]}, "bad_words"),
        ({"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], [10**6]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ],
)
async def test_values_that_need_the_model_to_be_refused_are_400(
    client: httpx.AsyncClient, body: dict[str, object], param: str
) -> None:
    assert error_of(await client.post(COMPLETIONS, json=body), 400)["param"] == param


@pytest.mark.parametrize(
    "body", [{"prompt": [1] * 250, "max_tokens": 7}, {"prompt": [1] * 256}, {"prompt": [1] * 6000}]
)
async def test_more_than_the_context_holds_is_400(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    error = error_of(await client.post(COMPLETIONS, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]


async def test_the_whole_context_can_be_used(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": [1] * 250, "max_tokens": 6})
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (QueueFull("the queue is full", retry_after_s=2.2), 429, "queue_full"),
        (NoWorker("no decode worker"), 503, "no_worker"),
        (ContextLengthExceeded("too long"), 400, "context_length_exceeded"),
    ],
)
async def test_what_the_coordinator_refuses_has_its_status(
    client: httpx.AsyncClient,
    service: ScriptedService,
    refusal: RequestError,
    status: int,
    code: str,
    stream: bool,
) -> None:
    service.refusal = refusal
    response = await client.post(CHAT, json={**HELLO, "stream": stream}, headers={"x-request-id": "r-1"})
    assert error_of(response, status)["code"] == code
    assert response.headers.get("retry-after") == {429: "3", 503: "5", 400: None}[status]
    assert response.headers["x-request-id"] == "r-1"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize(
    ("failure", "is_told_not_to"),
    [
        (DeadlineExceeded("its time is up"), True),
        (DuplicateRequest("one with that id runs"), True),
        (ClientTooSlow("it takes nothing"), True),
        (RequestCancelled("cancelled"), True),
        (NoWorker("no decode worker"), False),
        (RequestFailed("decode-0 is gone"), False),
        (QueueFull("the queue is full", retry_after_s=2.2), False),
    ],
)
async def test_clients_are_told_where_asking_again_cannot_help(
    client: httpx.AsyncClient,
    service: ScriptedService,
    failure: RequestError,
    is_told_not_to: bool,
    path: str,
) -> None:
    service.script = lambda _: [failure]
    answer = await client.post(path, json={**HELLO, "max_tokens": 5})
    assert answer.status_code == failure.status
    assert answer.headers.get("x-should-retry") == ("false" if is_told_not_to else None)


async def test_the_document_says_of_which_errors_clients_are_told_so(client: httpx.AsyncClient) -> None:
    responses = (await client.get("/openapi.json")).json()["components"]["responses"]
    assert {name for name, each in responses.items() if "X-Should-Retry" in each["headers"]} == {
        f"{kind}Error{status}" for kind in ("", "Messages") for status in (408, 409, 499, 504)
    }


async def test_a_request_that_would_be_refused_anyway_is_not_tokenized(
    client: httpx.AsyncClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.refusal_unheard = QueueFull("the queue is full", retry_after_s=2)

    def encode(*_: object) -> list[int]:
        raise AssertionError("the prompt was tokenized")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    response = await client.post(CHAT, json=HELLO | {"priority": 4}, headers={"x-request-id": "r"})
    assert error_of(response, 429)["code"] == "queue_full"
    assert service.knocks == [("r", "anyone", 4)]
    assert service.submissions == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_lost_before_its_first_token_has_a_status(
    client: httpx.AsyncClient, service: ScriptedService, stream: bool
) -> None:
    service.script = lambda _: [NoWorker("all prefill workers are gone")]
    error = error_of(await client.post(CHAT, json={**HELLO, "stream": stream}), 503)
    assert error["message"] == "all prefill workers are gone"
    assert service.delivered_ids == []


async def test_a_stream_that_is_lost_ends_with_an_error_event(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    ids = tuple(tiny_tokenizer().encode("the"))
    service.script = lambda _: [Output(ids, 0), RequestFailed("decode-0 is gone")]
    response = await client.post(CHAT, json={**HELLO, "stream": True})
    *chunks, last = events(response.text)
    assert last["error"]["message"] == "decode-0 is gone"
    assert last["error"]["type"] == "server_error"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert "[DONE]" not in response.text


async def test_an_answer_that_is_lost_half_way_is_an_error(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    ids = tuple(tiny_tokenizer().encode("the"))
    service.script = lambda _: [Output(ids, 0), RequestFailed("decode-0 is gone")]
    assert error_of(await client.post(CHAT, json=HELLO), 500)["code"] == "request_failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_outputs_that_just_end_are_no_answer(
    client: httpx.AsyncClient, service: ScriptedService, stream: bool
) -> None:
    service.script = lambda _: []
    error_of(await client.post(CHAT, json={**HELLO, "stream": stream}), 500)
    assert service.abandoned == [service.submission.request_id]


async def test_a_bug_is_a_500_in_the_same_shape(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.refusal = InvariantViolation("two owners")
    error = error_of(await client.post(CHAT, json=HELLO), 500)
    assert "two owners" not in error["message"]
    assert "InvariantViolation" in error["message"]


async def test_a_token_that_does_not_follow_the_last_is_a_bug(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = lambda _: [Output((5,), 0), Output((5,), 0)]
    error_of(await client.post(CHAT, json=HELLO), 500)
    assert service.abandoned == [service.submission.request_id]


async def test_a_body_over_the_limit_is_413(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(COMPLETIONS, json={"prompt": "a" * 20_000}), 413)
    assert "20000" in error["message"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/"])
async def test_an_unknown_path_is_404(client: httpx.AsyncClient, path: str) -> None:
    message = error_of(await client.get(path), 404)["message"]
    assert path in message
    assert "/openapi.json" in message
    assert "base URL" not in message


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages", "/models/m"])
async def test_a_path_without_v1_is_404_that_says_so(client: httpx.AsyncClient, path: str) -> None:
    assert "begin with /v1" in error_of(await client.post(path), 404)["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1])
async def test_too_few_tokens_are_refused_in_the_same_words(
    client: httpx.AsyncClient, field: str, value: int
) -> None:
    error = error_of(await client.post(CHAT, json={**HELLO, field: value}), 400)
    assert error["message"] == f"{field} is {value}; it must be an integer >= 1"
    assert error["param"] == field


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("HEAD", CHAT, "POST"),
    ],
)
async def test_a_wrong_method_is_405(client: httpx.AsyncClient, method: str, path: str, allowed: str) -> None:
    response = await client.request(method, path)
    assert response.status_code == 405
    assert allowed in response.headers["allow"]
    if method != "HEAD":
        assert allowed in error_of(response, 405)["message"]
