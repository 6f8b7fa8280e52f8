"""The gateway behind a real socket: the `openai` client, clients that leave, keep-alives, limits, stopping."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from support.gateway import MODEL, SILENCE, ScriptedService, says, tiny_tokenizer
from support.http_gateway import HELLO, THE, Gateway, posted, read_until, running, serve, until

from twinpool.coordinator.gateway.prompts import INLINE_CHARS
from twinpool.coordinator.service import Output
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import ConfigError, QueueFull, RequestFailed
from twinpool.request import FinishReason


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running() as gateway:
        yield gateway


# ── the openai client ─────────────────────────────────────────────────────────────────────────────────────


async def test_the_openai_client_gets_a_chat_answer(gateway: Gateway) -> None:
    gateway.service.script = says("Paris.")
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
        )
    assert answer.choices[0].message.content == "Paris."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(tiny_tokenizer().encode("Paris.")) + 1


async def test_the_openai_client_streams_a_chat(gateway: Gateway) -> None:
    gateway.service.script = says("the lazy dog")
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
            stop=["never"],
            extra_body={"top_k": 5, "min_p": 0.1},
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "the lazy dog"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (
        chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    )


async def test_the_openai_client_completes_streamed_and_whole(gateway: Gateway) -> None:
    gateway.service.script = says(" fox 🙂 jumps", FinishReason.LENGTH)
    async with gateway.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt="the", max_tokens=20)
        stream = await client.completions.create(model=MODEL, prompt="the", max_tokens=20, stream=True)
        chunks = [chunk async for chunk in stream]
        models = [model.id async for model in client.models.list()]
        model = await client.models.retrieve(MODEL)
    assert whole.choices[0].text == " fox 🙂 jumps" == "".join(chunk.choices[0].text for chunk in chunks)
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert models == [MODEL] == [model.id]


async def test_the_openai_client_gets_several_answers_with_log_probabilities(gateway: Gateway) -> None:
    gateway.service.script = lambda s: says(f"fox {s.request_id[-1]}")(s)
    hello: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
    async with gateway.openai() as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=hello, n=2, logprobs=True, top_logprobs=1
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=hello, n=2, logprobs=True, top_logprobs=1, stream=True
        )
        chunks = [chunk async for chunk in stream]
        echoed = await client.completions.create(
            model=MODEL, prompt=["the", "a"], n=2, echo=True, logprobs=1, max_tokens=0
        )
    assert [choice.message.content for choice in chat.choices] == ["fox 0", "fox 1"]
    for choice in chat.choices:
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        told = [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()]
        assert choice.logprobs is not None
        assert told == choice.logprobs.content
        assert len(told[0].top_logprobs) == 1
    assert [choice.text for choice in echoed.choices] == ["the", "the", "a", "a"]
    assert all(choice.logprobs is not None for choice in echoed.choices)


async def test_the_openai_client_raises_what_went_wrong(gateway: Gateway) -> None:
    hello: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
    async with gateway.openai() as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="other", messages=hello)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=hello, temperature=-1)
        assert bad.value.param == "temperature"
        gateway.service.refusal = QueueFull("the queue is full", retry_after_s=7)
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model=MODEL, messages=hello)
        assert full.value.response.headers["retry-after"] == "7"


async def test_the_openai_client_raises_when_a_stream_is_lost(gateway: Gateway) -> None:
    gateway.service.script = lambda _: [Output(THE, 0), RequestFailed("decode-0 is gone")]
    async with gateway.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        texts: list[str] = []
        with pytest.raises(openai.APIError, match="decode-0 is gone"):
            texts.extend([chunk.choices[0].text async for chunk in stream])


# ── clients that leave ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_any_token_is_noticed(gateway: Gateway, stream: bool) -> None:
    service = gateway.service
    service.script = lambda _: [SILENCE]
    async with posted(gateway, {**HELLO, "stream": stream}):
        await service.until(lambda: len(service.submissions) == 1)
    await service.until(lambda: service.abandoned == [service.submission.request_id])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_after_some_tokens_is_noticed(gateway: Gateway, stream: bool) -> None:
    service = gateway.service
    service.script = lambda _: [Output(THE, 0), SILENCE]
    async with posted(gateway, {**HELLO, "stream": stream}) as (reader, _):
        await service.until(lambda: len(service.submissions) == 1)
        if stream:
            await read_until(reader, b"the")
    await service.until(lambda: service.abandoned == [service.submission.request_id])
    assert service.delivered_ids == ([service.submission.request_id] if stream else [])


async def test_a_client_that_aborts_the_connection_is_noticed(gateway: Gateway) -> None:
    service = gateway.service
    service.script = lambda _: [Output(THE, 0), SILENCE]
    async with posted(gateway, {**HELLO, "stream": True}) as (reader, writer):
        await read_until(reader, b"the")
        writer.transport.abort()
    await service.until(lambda: service.abandoned == [service.submission.request_id])


async def test_a_client_that_leaves_while_tokens_flow_is_abandoned_once(gateway: Gateway) -> None:
    service = gateway.service
    service.max_model_len = 1_000_000

    async def play() -> AsyncIterator[Output]:
        for index in itertools.count(0, len(THE)):
            yield Output(THE, index)
            await asyncio.sleep(0)

    service.script = lambda _: play()
    async with posted(gateway, {**HELLO, "stream": True}) as (reader, _):
        await read_until(reader, b"the")
    await service.until(lambda: service.abandoned == [service.submission.request_id])


async def test_a_client_that_leaves_after_the_end_is_not_abandoned(gateway: Gateway) -> None:
    service = gateway.service
    async with posted(gateway, {**HELLO, "stream": True}) as (reader, _):
        await read_until(reader, b"[DONE]\n\n")
    await service.until(lambda: service.delivered_ids == [service.submission.request_id])
    assert service.abandoned == []


async def test_a_client_that_leaves_while_sending_its_body_asks_for_nothing(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{gateway.url}/health")).status_code == 200
    assert gateway.service.submissions == []
    assert reader.at_eof() or await reader.read() == b""


async def test_a_client_that_leaves_may_try_again_at_once_under_the_same_id(gateway: Gateway) -> None:
    service = gateway.service
    service.script = lambda _: [SILENCE]
    for attempt in range(1, 20):
        async with posted(gateway, HELLO, "x-request-id: r\r\n"):
            await service.until(lambda: len(service.submissions) == attempt)  # noqa: B023  # awaited here
    await service.until(lambda: len(service.abandoned) == 19)


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_asks_for_nothing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_tokenizing, go_on = threading.Event(), threading.Event()

    def encode(_self: Tokenizer, _text: str, _add_special_tokens: bool = False) -> list[int]:
        is_tokenizing.set()
        assert go_on.wait(10)
        return [1, 2]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    long = {"messages": [{"role": "user", "content": "a" * (INLINE_CHARS + 1)}]}
    gateway.service.max_model_len = 10_000
    async with posted(gateway, long):
        assert await asyncio.to_thread(is_tokenizing.wait, 10)
    await until(lambda: gateway.metric("twinpool_http_connections") == 0)
    go_on.set()
    await gateway.server.stop(deadline_s=5.0)
    assert gateway.service.submissions == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all_the_answers_that_it_asked_for(
    gateway: Gateway, stream: bool
) -> None:
    service = gateway.service
    service.script = lambda s: [Output(THE, 0), SILENCE] if s.request_id.endswith("1") else [SILENCE]
    async with posted(gateway, {**HELLO, "n": 3, "stream": stream}, "x-request-id: r\r\n"):
        await service.until(lambda: len(service.submissions) == 3)
    await service.until(lambda: sorted(service.abandoned) == ["r#0", "r#1", "r#2"])


# ── silence ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_silent_stream_is_kept_alive() -> None:
    async with running(keep_alive_s=0.01) as gateway:
        gateway.service.script = lambda _: [SILENCE]
        async with posted(gateway, {**HELLO, "stream": True}) as (reader, _):
            head = await read_until(reader, b": keep-alive\n\n")
            assert b"200 OK" in head
            assert b"data:" not in head
            await read_until(reader, b": keep-alive\n\n")


async def test_a_kept_alive_stream_is_still_a_stream() -> None:
    async with running(keep_alive_s=0.01) as gateway:
        service = gateway.service
        go_on = asyncio.Event()

        async def play() -> AsyncIterator[Output]:
            await go_on.wait()
            yield Output(THE, 0, FinishReason.LENGTH)

        service.script = lambda _: play()
        async with (
            httpx.AsyncClient() as client,
            client.stream(
                "POST", f"{gateway.url}/v1/completions", json={"prompt": "a", "stream": True}
            ) as answer,
        ):
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            go_on.set()
            data = [line async for line in lines if line.startswith("data:")]
        assert json.loads(data[0].removeprefix("data:"))["choices"][0]["text"] == "the"
        assert data[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_silence_has_a_bound(stream: bool) -> None:
    async with running(keep_alive_s=0.01, max_silence_s=0.05) as gateway:
        gateway.service.script = lambda _: [Output(THE, 0), SILENCE]
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{gateway.url}/v1/chat/completions", json={**HELLO, "stream": stream})
        assert answer.status_code == (200 if stream else 500)
        assert "the request got no output for 0.05 s" in answer.text
        assert "[DONE]" not in answer.text
        assert gateway.service.abandoned == [gateway.service.submission.request_id]


# ── HTTP ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_body_over_the_limit_is_refused_before_it_is_read(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n")
    head = await read_until(reader, b"\r\n\r\n")
    assert b"413" in head.splitlines()[0]
    assert b"body_too_large" in await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()


async def test_a_chunked_body_over_the_limit_is_refused(gateway: Gateway) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 5000

    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{gateway.url}/v1/completions", content=parts())
    assert answer.status_code == 413


async def test_a_connection_serves_one_request_after_the_other(gateway: Gateway) -> None:
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1)) as client:
        for stream in (True, False, True):
            answer = await client.post(f"{gateway.url}/v1/chat/completions", json={**HELLO, "stream": stream})
            assert answer.status_code == 200
        assert (await client.head(f"{gateway.url}/health")).content == b""
        options = await client.options(f"{gateway.url}/v1/chat/completions")
        assert (options.status_code, options.content) == (204, b"")
        deleted = await client.delete(f"{gateway.url}/v1/chat/completions")
        assert (deleted.status_code, deleted.headers["allow"]) == (405, "OPTIONS, POST")
        assert deleted.json()["error"]["message"].startswith("DELETE /v1/chat/completions is not allowed")


async def test_many_streams_at_once_stay_apart(gateway: Gateway) -> None:
    gateway.service.script = lambda s: says(f"fox {s.sampling.seed} dog")(s)

    async def ask(client: httpx.AsyncClient, seed: int) -> str:
        body = {**HELLO, "stream": True, "seed": seed}
        answer = await client.post(f"{gateway.url}/v1/chat/completions", json=body)
        data = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert data.pop() == "[DONE]"
        return "".join(json.loads(item)["choices"][0]["delta"].get("content", "") for item in data)

    async with httpx.AsyncClient() as client:
        answers = await asyncio.gather(*(ask(client, seed) for seed in range(64)))
    assert answers == [f"fox {seed} dog" for seed in range(64)]


async def test_a_port_that_is_taken_is_named(gateway: Gateway) -> None:
    with pytest.raises(ConfigError, match=f"--port is {gateway.server.port}.*choose another"):
        await serve(gateway.service, "127.0.0.1", gateway.server.port)


@pytest.mark.parametrize(
    ("host", "port", "setting"), [("127.0.0.1", 70_000, "--port"), ("no.such.host.invalid", 0, "--host")]
)
async def test_an_address_that_is_none_is_named(host: str, port: int, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} is"):
        await serve(ScriptedService(), host, port)


async def test_stopping_lets_a_running_answer_finish() -> None:
    async with running() as gateway:
        service = gateway.service
        go_on = asyncio.Event()

        async def play() -> AsyncIterator[Output]:
            yield Output(THE, 0)
            await go_on.wait()
            yield Output((), len(THE), FinishReason.LENGTH)

        service.script = lambda _: play()
        async with posted(gateway, {**HELLO, "stream": True}) as (reader, _):
            await read_until(reader, b"the")
            stopping = asyncio.create_task(gateway.server.stop(deadline_s=10.0))
            go_on.set()
            await read_until(reader, b"[DONE]\n\n")
        await stopping
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", gateway.server.port)


async def test_stopping_breaks_off_what_does_not_finish_in_time() -> None:
    async with running() as gateway:
        service = gateway.service
        service.script = lambda _: [Output(THE, 0), SILENCE]
        async with posted(gateway, {**HELLO, "stream": True}) as (reader, _):
            await read_until(reader, b"the")
            await gateway.server.stop(deadline_s=0.0)
            assert service.abandoned == [service.submission.request_id]
            assert b"[DONE]" not in await asyncio.wait_for(reader.read(), 10)
