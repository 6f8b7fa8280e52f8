"""What is read of a streamed answer, how its tokens are counted, and what a server of each kind is sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from twinpool.bench.events import EventSplitter
from twinpool.bench.serving.answer import StreamedAnswer
from twinpool.bench.serving.bodies import body
from twinpool.bench.serving.record import Ending, TokenCount
from twinpool.bench.serving.sender import output_digest
from twinpool.bench.serving.settings import Endpoint, LoadSettings, ServerKind
from twinpool.bench.serving.token_counts import chunk_tokens, scaled
from twinpool.bench.serving.workload import Chat, Message, PlannedRequest
from twinpool.errors import ConfigError


class Answered(StreamedAnswer):
    def over(self) -> None:
        """Nobody waits for it."""


def answered(*events: object, status: int = 200, is_whole: bool = True) -> StreamedAnswer:
    """An answer of these events, which come a second apart; texts are sent as they are."""
    answer = Answered()
    answer.status, answer.is_whole = status, is_whole
    for number, event in enumerate(events):
        data = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
        answer.take(data.encode(), float(number))
    return answer


def text(piece: str | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}], **more}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_wherever_the_network_cuts_them(line_end: str, size: int) -> None:
    lines = [": hello", "", "event: x", "data: one", "", "data:two", "data: three", "", "data: half"]
    stream = line_end.join(lines).encode()
    splitter = EventSplitter()
    found = [each for at in range(0, len(stream), size) for each in splitter.feed(stream[at : at + size])]
    assert found == [b"one", b"two\nthree"]
    assert splitter.rest == b"data: half"


def test_only_pieces_with_output_count_and_a_role_is_none() -> None:
    answer = answered(
        delta(role="assistant", content=""),
        delta(role="assistant", content=None),
        delta(reasoning_content="hm"),
        delta(content="yes"),
        delta("stop"),
        "data: [DONE]\n\n",
    )
    assert (answer.times, answer.texts) == ([2.0, 3.0], ["hm", "yes"])
    assert answer.ending() == (Ending.COMPLETED, "")


def test_a_token_without_text_is_output_if_the_server_says_its_id() -> None:
    incomplete = {"choices": [{"text": "", "token_ids": [7]}]}
    answer = answered(incomplete, text("é", "length"))
    assert answer.times == [0.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "ending", "why"),
    [
        (answered(text("a"), text("", "stop")), Ending.COMPLETED, ""),
        (answered(text("a"), "data: [DONE]\n\n"), Ending.FAILED, "without a finish reason"),
        (answered(text("a", "stop"), is_whole=False), Ending.FAILED, "broke off"),
        (answered(text("a"), text("", "abort")), Ending.FAILED, "gave up: abort"),
        (answered(text("a"), {"error": {"message": "lost", "code": 500}}), Ending.FAILED, "lost"),
        (answered(text("a"), {"error": "lost"}), Ending.FAILED, "lost"),
        (answered(text("a"), {"error": {"code": "deadline_exceeded"}}), Ending.TIMED_OUT, "without words"),
        (
            answered(text("a"), {"error": {"message": "x", "code": "cancelled"}}),
            Ending.CANCELLED,
            "x",
        ),
        (answered("data: {broken\n\n", text("", "stop")), Ending.FAILED, "malformed event"),
        (answered("data: what?\n\n", text("", "stop")), Ending.FAILED, "malformed event"),
        (answered(status=0, is_whole=False), Ending.FAILED, "without an answer"),
        (answered('{"error":{"message":"full","code":"q"}}', status=429), Ending.REJECTED, "full"),
        (answered('{"detail":"no such page"}', status=404), Ending.REJECTED, "no such page"),
        (answered("<html>bad gateway", status=502), Ending.FAILED, "<html>bad gateway"),
        (answered(status=503), Ending.REJECTED, "status 503"),
        (answered(status=504), Ending.TIMED_OUT, "status 504"),
        (answered(status=499), Ending.CANCELLED, "status 499"),
    ],
)
def test_endings(answer: StreamedAnswer, ending: Ending, why: str) -> None:
    found, words = answer.ending()
    assert found is ending
    assert why in words


def letters(whole: str) -> Sequence[int]:
    """Every letter is a token."""
    return range(1, len(whole) + 1)


def pairs(whole: str) -> Sequence[int]:
    """Every two letters are a token."""
    return [*range(2, len(whole) + 1, 2), *([len(whole)] if len(whole) % 2 else [])]


def test_a_token_counts_where_its_last_letter_comes() -> None:
    answer = answered(text("a"), text("bcd"), text("e", "stop"))
    assert chunk_tokens(answer, letters) == ([1, 3, 1], TokenCount.TOKENIZER)
    assert chunk_tokens(answer, pairs) == ([0, 2, 1], TokenCount.TOKENIZER)


def test_as_many_pieces_as_tokens_need_no_tokenizer() -> None:
    answer = answered(text("ab"), text("cd", "stop"), {"choices": [], "usage": {"completion_tokens": 2}})
    assert chunk_tokens(answer, letters) == ([1, 1], TokenCount.CHUNK)


def test_what_is_found_out_is_scaled_to_what_the_server_says() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 10}}
    answer = answered(text("a"), text("bcd"), text("e", "stop"), usage)
    assert chunk_tokens(answer, letters) == ([2, 6, 2], TokenCount.TOKENIZER)
    assert chunk_tokens(answer, None) == ([3, 4, 3], TokenCount.CHUNK)


def test_ids_are_surer_than_usage_and_usage_than_the_text() -> None:
    events = [
        text("ab", usage={"completion_tokens": 1}),
        text("c", "stop", usage={"completion_tokens": 5}),
    ]
    assert chunk_tokens(answered(*events), letters) == ([1, 4], TokenCount.USAGE)
    for event, ids in zip(events, ([1, 2], [3]), strict=True):
        event["choices"][0]["token_ids"] = ids
    assert chunk_tokens(answered(*events), letters) == ([2, 1], TokenCount.IDS)


@pytest.mark.parametrize(
    ("counts", "total", "found"),
    [
        ([1, 1, 1], 3, [1, 1, 1]),
        ([1, 1, 1], 7, [2, 3, 2]),
        ([3, 0], None, [3, 0]),
        ([0, 0], 4, [0, 0]),
        ([], 3, []),
    ],
)
def test_scaling_keeps_the_sum(counts: list[int], total: int | None, found: list[int]) -> None:
    assert scaled(counts, total) == found


def test_equal_output_has_equal_digests_and_ids_are_not_text() -> None:
    assert output_digest([1, 2], "x") == output_digest([1, 2], "y") != output_digest([1, 3], "x")
    assert output_digest([], "x") == output_digest([], "x") != output_digest([], "y")
    assert output_digest([], "") == ""
    assert {output_digest([1], "")[:4], output_digest([], "a")[:5]} == {"ids:", "text:"}


def planned(prompt: str | tuple[int, ...] | Chat = "hello") -> PlannedRequest:
    return PlannedRequest(index=0, prompt=prompt, input_tokens=1, output_tokens=5)


def sent(settings: LoadSettings, prompt: str | tuple[int, ...] | Chat = "hello") -> dict[str, Any]:
    values: dict[str, Any] = json.loads(body(planned(prompt), settings))
    return values


def to(kind: ServerKind, endpoint: Endpoint = Endpoint.COMPLETIONS, **others: Any) -> LoadSettings:
    return LoadSettings(base_url="http://h:1", model="m", kind=kind, endpoint=endpoint, **others)


OPENAI_FIELDS = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}


def test_an_unknown_server_is_sent_only_what_openai_knows() -> None:
    assert sent(to(ServerKind.OPENAI)).keys() == OPENAI_FIELDS
    chat = sent(to(ServerKind.OPENAI, Endpoint.CHAT))
    assert chat.keys() == OPENAI_FIELDS - {"prompt", "max_tokens"} | {"messages", "max_completion_tokens"}
    assert chat["stream_options"] == {"include_usage": True}
    assert sent(to(ServerKind.OPENAI, ignore_eos=True))["ignore_eos"] is True


def test_known_servers_are_asked_for_token_counts_and_whole_lengths() -> None:
    assert sent(to(ServerKind.TWINPOOL)).keys() == OPENAI_FIELDS | {"ignore_eos", "return_token_ids"}
    assert "ignore_eos" not in sent(to(ServerKind.TWINPOOL, ignore_eos=False))
    assert sent(to(ServerKind.VLLM))["stream_options"]["continuous_usage_stats"] is True
    assert sent(to(ServerKind.SGLANG)).keys() == OPENAI_FIELDS | {"ignore_eos"}
    assert sent(to(ServerKind.LLAMACPP, Endpoint.CHAT))["max_tokens"] == 5


def test_the_extra_body_has_the_last_word() -> None:
    values = sent(to(ServerKind.TWINPOOL, extra_body={"temperature": 0.7, "top_k": 4, "ignore_eos": False}))
    assert (values["temperature"], values["top_k"], values["ignore_eos"]) == (0.7, 4, False)


def test_prompts_of_each_kind_go_where_they_fit() -> None:
    chat = Chat((Message("system", "be brief"), Message("user", "hi")))
    assert sent(to(ServerKind.OPENAI), (1, 2))["prompt"] == [1, 2]
    assert sent(to(ServerKind.OPENAI, Endpoint.CHAT), chat)["messages"][0]["role"] == "system"
    with pytest.raises(ConfigError, match="token ids"):
        sent(to(ServerKind.OPENAI, Endpoint.CHAT), (1, 2))
    with pytest.raises(ConfigError, match="the data has chats"):
        sent(to(ServerKind.OPENAI), chat)


def test_settings_say_what_is_wrong_and_keep_secrets() -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        LoadSettings(base_url="h:1", model="m")
    with pytest.raises(ConfigError, match="--max-concurrency is 1; allowed: at least 1 for each of 2 sender"):
        to(ServerKind.OPENAI, max_concurrency=1, num_processes=2)
    settings = to(ServerKind.OPENAI, api_key="secret", headers=("x: secret",))
    assert "secret" not in repr(settings) + str(settings.shown())
