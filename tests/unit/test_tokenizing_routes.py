"""`/tokenize` and `/detokenize`, and routes that other servers have."""

from __future__ import annotations

import httpx
import pytest
from support.gateway import MODEL, ScriptedService, error_of, tiny_tokenizer

from twinpool.coordinator.gateway.prompts import INLINE_CHARS

TURNS = [{"role": "user", "content": "Hi"}]


async def test_a_text_as_token_ids(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/tokenize", json={"prompt": "the quick fox", "model": MODEL})).json()
    expected = tiny_tokenizer().encode("the quick fox")
    assert answer == {"count": len(expected), "max_model_len": 256, "tokens": expected, "token_strs": None}


async def test_the_tokens_as_the_vocabulary_has_them(client: httpx.AsyncClient) -> None:
    body = {"prompt": "the fox", "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["token_strs"][0] == "the"
    assert len(answer["token_strs"]) == answer["count"]


async def test_an_empty_text_has_no_tokens(client: httpx.AsyncClient) -> None:
    assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []


async def test_a_conversation_is_what_the_chat_route_would_send(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    tokens = (await client.post("/tokenize", json={"messages": TURNS})).json()["tokens"]
    await client.post("/v1/chat/completions", json={"messages": TURNS})
    assert tuple(tokens) == service.submission.prompt_token_ids
    body = {"messages": TURNS, "add_generation_prompt": False}
    shorter = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert shorter == tokens[: len(shorter)]
    assert len(shorter) < len(tokens)


async def test_a_long_text_has_its_tokens_too(client: httpx.AsyncClient, service: ScriptedService) -> None:
    """More than is tokenized on the event loop, and more than the context holds."""
    service.max_model_len = 400
    text = "the quick brown fox " * 220
    assert len(text) > INLINE_CHARS
    answer = (await client.post("/tokenize", json={"prompt": text})).json()
    assert answer["tokens"] == tiny_tokenizer().encode(text)
    assert answer["count"] > answer["max_model_len"]
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


async def test_special_tokens_have_their_text(client: httpx.AsyncClient) -> None:
    (eos,) = tiny_tokenizer().eos_token_ids
    assert (await client.post("/detokenize", json={"tokens": [eos]})).json() == {"prompt": "<|im_end|>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TURNS}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "cat", "content": "a"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_a_wrong_body_is_named(
    client: httpx.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    assert error_of(await client.post(path, json=body), 400)["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * 10_000}),
        ("/v1/completions", {"prompt": "a" * 10_000}),
        ("/v1/completions", {"prompt": [1] * 11}),
        ("/v1/completions", {"prompt": [1] * 10}),
        ("/v1/completions", {"prompt": [1], "max_tokens": 10}),
        ("/tokenize", {"messages": TURNS * 11}),
        ("/v1/chat/completions", {"messages": TURNS * 11}),
        ("/v1/responses/input_tokens", {"input": TURNS * 11}),
    ],
)
async def test_what_no_context_could_hold_is_refused_in_words_that_clients_look_for(
    client: httpx.AsyncClient, service: ScriptedService, path: str, body: dict[str, object]
) -> None:
    service.max_model_len = 10
    error = error_of(await client.post(path, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 10 tokens" in error["message"]


async def test_another_model_is_not_found(client: httpx.AsyncClient) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert error_of(await client.post(path, json={**body, "model": "gpt-4"}), 404)["param"] == "model"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/v1/moderations",
        "/v1/files",
        "/v1/batches",
        "/v1/score",
        "/v1/rerank",
        "/v1/fine_tuning/jobs",
    ],
)
async def test_routes_that_are_not_served_say_what_is(client: httpx.AsyncClient, path: str) -> None:
    error = error_of(await client.post(path, json={"input": "Hi"}), 400)
    assert error["code"] == "not_supported"
    assert error["message"].startswith(f"{path}: ")
    assert "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize("path", ["/v1/files/file-1", "/v1/batches/batch-1/cancel", "/v1/threads/thread-1"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
async def test_nor_is_what_is_below_them(client: httpx.AsyncClient, method: str, path: str) -> None:
    error = error_of(await client.request(method, path), 400)
    assert error["code"] == "not_supported"
    assert error["message"].startswith(f"{path}: ")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/files/file-1", "/v1/responses/resp_1"])
async def test_heads_of_them_are_as_what_get_gives(client: httpx.AsyncClient, path: str) -> None:
    head, got = await client.head(path), await client.get(path)
    assert head.status_code == got.status_code in (400, 404)
    assert head.headers["content-type"] == got.headers["content-type"]


async def test_a_path_that_only_begins_like_one_of_them_is_not_found(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/filesystem")).status_code == 404
