"""Requests that ask for several answers: of several prompts, several of each, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support.gateway import SILENCE, ScriptedService, error_of, events, says, tiny_tokenizer

from twinpool.coordinator.service import Output, Submission
from twinpool.errors import QueueFull, RequestFailed
from twinpool.request import FinishReason

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
WORDS = ("the", " fox", " lazy dog", "€")


def number_of(submission: Submission) -> int:
    """Which choice of its request this is."""
    _, mark, number = submission.request_id.rpartition("#")
    return int(number) if mark else 0


def says_words(submission: Submission) -> Any:
    """Choice i says the i-th word, token by token."""
    return says(WORDS[number_of(submission) % len(WORDS)])(submission)


def choices_of(body: str) -> dict[int, list[dict[str, Any]]]:
    """A stream's choices: of each all that was said, in order."""
    *chunks, done = events(body)
    assert done == "[DONE]"
    found: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


# ── which choice is which ─────────────────────────────────────────────────────────────────────────────────


async def test_every_prompt_has_n_choices_in_order(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says_words
    body = {"prompt": [[5, 6], [7]], "n": 2, "seed": 9}
    answer = (await client.post(COMPLETIONS, json=body, headers={"x-request-id": "r"})).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(WORDS))
    assert [s.request_id for s in service.submissions] == ["r#0", "r#1", "r#2", "r#3"]
    assert [s.prompt_token_ids for s in service.submissions] == [(5, 6), (5, 6), (7,), (7,)]
    assert [s.sampling.seed for s in service.submissions] == [9, 10, 9, 10]
    assert {s.num_choices for s in service.submissions} == {4}
    sizes = [len(s.prompt_token_ids) + s.sampling.max_tokens for s in service.submissions]
    assert [s.num_after for s in service.submissions] == [3, 2, 1, 0]
    assert [s.tokens_after for s in service.submissions] == [sum(sizes[i + 1 :]) for i in range(4)]
    assert service.delivered_ids == ["r#0", "r#1", "r#2", "r#3"]


async def test_a_drawn_seed_is_counted_on_from_and_drawn_for_each_prompt(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    await client.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2})
    first, second, third, fourth = (s.sampling.seed for s in service.submissions)
    assert (second - first) % 2**63 == (fourth - third) % 2**63 == 1
    assert third not in (first, second)


async def test_the_last_seed_is_followed_by_the_first(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    await client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "seed": 2**63 - 1})
    assert [s.sampling.seed for s in service.submissions] == [2**63 - 1, 0]


async def test_one_choice_is_the_request_itself(client: httpx.AsyncClient, service: ScriptedService) -> None:
    await client.post(COMPLETIONS, json={"prompt": ["a"], "n": 1}, headers={"x-request-id": "r"})
    assert service.submission.request_id == "r"


async def test_a_prompt_counts_once_in_the_usage(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.script, service.num_cached = says_words, 1
    body = {"prompt": [[5, 6, 7], [7, 8]], "n": 2}
    usage = (await client.post(COMPLETIONS, json=body)).json()["usage"]
    num_output = sum(len(tiny_tokenizer().encode(word)) + 1 for word in WORDS)
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": num_output,
        "total_tokens": 5 + num_output,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_has_every_choice_and_one_end(
    client: httpx.AsyncClient, service: ScriptedService, path: str
) -> None:
    service.script = says_words
    body = {"stream": True, "n": 4, "stream_options": {"include_usage": True}}
    response = await client.post(path, json=body | (HELLO if path == CHAT else {"prompt": "a"}))
    *_, usage, _ = events(response.text)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == sum(len(tiny_tokenizer().encode(w)) + 1 for w in WORDS)
    found = choices_of(response.text)
    assert sorted(found) == [0, 1, 2, 3]
    for index, said in found.items():
        if path == CHAT:
            assert said[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(choice["delta"].get("content", "") for choice in said) == WORDS[index]
        else:
            assert "".join(choice["text"] for choice in said) == WORDS[index]
        assert [choice["finish_reason"] for choice in said] == [None] * (len(said) - 1) + ["stop"]
    assert sorted(service.delivered_ids) == sorted(s.request_id for s in service.submissions)


async def test_choices_that_go_on_at_the_same_time_come_between_each_other(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    turn = asyncio.Condition()
    said: list[int] = []

    async def play(submission: Submission) -> AsyncIterator[Output]:
        own = number_of(submission)
        for index in range(3):
            async with turn:
                await turn.wait_for(lambda: len(said) % 2 == own)
                said.append(own)
                turn.notify_all()
            yield Output((70 + own,), index, FinishReason.LENGTH if index == 2 else None)

    service.script = play
    response = await client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "stream": True})
    *chunks, _ = events(response.text)
    texts = [(chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in chunks]
    letters = [(index, text) for index, text in texts if text]
    assert [index for index, _ in letters] != sorted(index for index, _ in letters)
    assert {text for index, text in letters if index == 0} == {tiny_tokenizer().decode([70])}
    assert {text for index, text in letters if index == 1} == {tiny_tokenizer().decode([71])}


async def test_usage_so_far_is_of_all_choices_and_only_grows(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says_words
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "n": 2, "stream": True, "stream_options": options}
    *chunks, done = events((await client.post(COMPLETIONS, json=body)).text)
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] == sum(len(tiny_tokenizer().encode(word)) + 1 for word in WORDS[:2])


async def test_each_choice_stops_at_its_own_stop_string(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = lambda s: says("the fox xy" if number_of(s) else "fox xy the")(s)
    answer = (await client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "stop": "xy"})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["fox ", "the fox "]
    assert sorted(id_ for id_, _ in service.completed) == sorted(s.request_id for s in service.submissions)
    assert answer["usage"]["completion_tokens"] == sum(num_tokens for _, num_tokens in service.completed)


# ── what goes wrong ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_refusal_is_the_requests_and_ends_the_others(
    client: httpx.AsyncClient, service: ScriptedService, stream: bool
) -> None:
    service.script = lambda _: [SILENCE]
    service.refused_from = 2
    service.refusal = QueueFull("the queue is full", retry_after_s=2)
    body = {"prompt": "a", "n": 4, "stream": stream}
    response = await client.post(COMPLETIONS, json=body, headers={"x-request-id": "r"})
    assert error_of(response, 429)["code"] == "queue_full"
    assert [s.request_id for s in service.submissions] == service.abandoned == ["r#0", "r#1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_that_is_lost_ends_all(
    client: httpx.AsyncClient, service: ScriptedService, stream: bool
) -> None:
    ids = tuple(tiny_tokenizer().encode("the"))

    def play(submission: Submission) -> list[object]:
        lost = RequestFailed("decode-0 is gone")
        return [Output(ids, 0), lost if number_of(submission) == 1 else SILENCE]

    service.script = play
    body = {"prompt": "a", "n": 3, "stream": stream}
    response = await client.post(COMPLETIONS, json=body, headers={"x-request-id": "r"})
    assert sorted(service.abandoned) == ["r#0", "r#2"]
    if not stream:
        assert error_of(response, 500)["message"] == "decode-0 is gone"
        return
    *_, last = events(response.text)
    assert last["error"]["message"] == "decode-0 is gone"
    assert response.text.count('"error"') == 1
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_breaks_off_is_no_answer(
    client: httpx.AsyncClient, service: ScriptedService, stream: bool
) -> None:
    service.script = lambda s: [] if number_of(s) else [Output((70,), 0, FinishReason.LENGTH)]
    response = await client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "stream": stream})
    assert "broke off" in response.text
    assert len(service.abandoned) == 1


async def test_cancelling_the_request_cancels_every_choice(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = lambda _: [SILENCE]
    posted = client.post(CHAT, json={**HELLO, "n": 3}, headers={"x-request-id": "r"})
    running = asyncio.create_task(posted)  # type: ignore[arg-type]  # httpx returns a coroutine
    await service.until(lambda: len(service.submissions) == 3)
    answer = await client.post("/v1/requests/r/cancel")
    assert answer.json() == {"request_id": "r", "was_running": True}
    assert error_of(await running, 499)["code"] == "cancelled"
    again = await client.post("/v1/requests/chatcmpl-r/cancel")
    assert again.json() == {"request_id": "r", "was_running": False}


async def test_a_timeline_has_every_choice(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.script = says_words
    await client.post(CHAT, json={**HELLO, "n": 3}, headers={"x-request-id": "r"})
    for name in ("r", "chatcmpl-r"):
        timeline = (await client.get(f"/v1/requests/{name}/timeline")).json()
        assert timeline["request_id"] == "r"
        assert [(c["choice"], c["request_id"]) for c in timeline["choices"]] == [(0, "r"), (1, "r"), (2, "r")]


async def test_as_many_choices_as_there_may_be_are_answered(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says_words
    answer = (await client.post(COMPLETIONS, json={"prompt": ["a"] * 64, "n": 2})).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(128))
    assert answer["choices"][127]["text"] == WORDS[3]
