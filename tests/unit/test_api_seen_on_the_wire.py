"""What existing programs send, as it was seen on the wire, and what they need of the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from support.gateway import MODEL, ScriptedService, error_of, events, says, tiny_tokenizer

from twinpool.coordinator.gateway.bodies import ChatBody, CompletionBody
from twinpool.errors import NoWorker, QueueFull
from twinpool.request import FinishReason

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_guidellm_counts_tokens_as_they_come(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    """It asks for `/health` and `/v1/models` first, and reads the usage so far from each chunk."""
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL
    service.script = says("the quick brown", FinishReason.LENGTH)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "the lazy dog"}]}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 16,
        "stop": None,
        "ignore_eos": True,
    }
    answer = await client.post(CHAT, json=body)
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(tiny_tokenizer().encode("the quick brown")))
    assert service.submission.sampling.ignore_eos
    assert service.submission.sampling.max_tokens == 16


async def test_aiperf_asks_whether_there_are_metrics_before_it_reads_them(client: httpx.AsyncClient) -> None:
    head = await client.head("/metrics")
    got = await client.get("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert "twinpool_" in got.text


async def test_probes_of_balancers_ask_for_heads(client: httpx.AsyncClient, service: ScriptedService) -> None:
    for path in ("/health", "/ready"):
        assert (await client.head(path)).status_code == 200
    service.health_answer = (False, "decode stands still")
    service.ready_answer = (False, "no decode worker")
    for path in ("/health", "/ready"):
        assert (await client.head(path)).status_code == 503


async def test_litellm_knows_a_context_overflow_by_its_code_and_words(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(COMPLETIONS, json={"prompt": [5] * 400, "max_tokens": 1}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "context" in error["message"]


@pytest.mark.parametrize(
    ("refusal", "status"), [(QueueFull("full", retry_after_s=0.25), 429), (NoWorker("no decode worker"), 503)]
)
async def test_the_openai_client_is_told_when_to_try_again(
    client: httpx.AsyncClient, service: ScriptedService, refusal: Exception, status: int
) -> None:
    service.refusal = refusal
    answer = await client.post(CHAT, json=HELLO)
    error_of(answer, status)
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("path", "body", "required"),
    [(CHAT, ChatBody, HELLO), (COMPLETIONS, CompletionBody, {"prompt": "the"})],
)
async def test_null_for_any_field_is_as_if_it_were_not_there(
    client: httpx.AsyncClient,
    service: ScriptedService,
    path: str,
    body: type[msgspec.Struct],
    required: dict[str, Any],
) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(body) if field.encode_name not in required]
    assert len(names) > 20
    bare = await client.post(path, json=required)
    nulls = await client.post(path, json=required | dict.fromkeys(names))
    assert nulls.status_code == 200, nulls.text
    assert "x-twinpool-warning" not in nulls.headers
    assert nulls.json()["choices"] == bare.json()["choices"]
    first, second = service.submissions
    assert first.prompt_token_ids == second.prompt_token_ids
    assert replace(first.sampling, seed=0) == replace(second.sampling, seed=0), "seeds are drawn"
