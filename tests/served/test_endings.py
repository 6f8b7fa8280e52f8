"""How answers end, over HTTP with the real model: the same streamed or not, on one pool or two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from support.server import Server, serving

PROMPT = "Once upon a time, in a village by the sea, there lived"
pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Ending:
    """All that a client sees of how an answer ended."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The same model on two pools and on one."""
    logs = tmp_path_factory.mktemp("servers")
    with (
        serving(logs) as split,
        serving(logs, "--colocated", "1") as colocated,
    ):
        yield {"split": split, "colocated": colocated}
        split.wait_until_empty()
        colocated.wait_until_empty()


def whole(server: Server, **fields: object) -> Ending:
    body = {"prompt": PROMPT, "temperature": 0, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    choice, usage = answer["choices"][0], answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return Ending(choice["text"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])


def streamed(server: Server, **fields: object) -> Ending:
    body = {
        "prompt": PROMPT, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip
    text, reasons, usage = "", [], None
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for event in map(json.loads, lines[:-1]):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["text"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(reasons) == 1
    assert usage is not None
    return Ending(text, reasons[0], usage["prompt_tokens"], usage["completion_tokens"])


def everywhere(servers: dict[str, Server], **fields: object) -> Ending:
    """The ending, once it is known to be the same on every way."""
    ways = [(name, way) for name in servers for way in (whole, streamed)]
    with ThreadPoolExecutor(len(ways)) as pool:
        found = list(pool.map(lambda pair: pair[1](servers[pair[0]], **fields), ways))
    endings = {f"{name}, {way.__name__}": ending for (name, way), ending in zip(ways, found, strict=True)}
    assert len(set(endings.values())) == 1, endings
    return next(iter(endings.values()))


def first_tokens(server: Server, count: int) -> list[int]:
    """The first greedy output tokens."""
    body = {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": count,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    ids: list[int] = server.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_is_exact(servers: dict[str, Server], max_tokens: int) -> None:
    """With 1, decode is never involved; with 2 its very first token is the last."""
    handed_off = servers["split"].metric("twinpool_kv_blocks_received_total")
    ending = everywhere(servers, max_tokens=max_tokens)
    assert (ending.finish_reason, ending.completion_tokens) == ("length", max_tokens)
    if max_tokens == 1:
        assert servers["split"].metric("twinpool_kv_blocks_received_total") == handed_off


@pytest.mark.parametrize("index", [0, 1, 5])
def test_a_stop_token_ends_the_answer_where_it_comes(servers: dict[str, Server], index: int) -> None:
    """At token 1 (prefill's), at token 2 (decode's first), and later. It counts; it is not in the text."""
    ids = first_tokens(servers["split"], 8)
    assert ids.index(ids[index]) == index, "the prompt gives the same token twice; choose another prompt"
    ending = everywhere(servers, max_tokens=20, stop_token_ids=[ids[index]])
    assert (ending.finish_reason, ending.completion_tokens) == ("stop", index + 1)


def test_min_tokens_forbids_an_early_stop_token(servers: dict[str, Server]) -> None:
    """The stop token cannot be chosen before `min_tokens`, on either side of the border between the pools."""
    first = first_tokens(servers["split"], 1)
    ending = everywhere(servers, max_tokens=12, min_tokens=6, stop_token_ids=first)
    assert ending.completion_tokens >= 6


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 2), (1, 2), (3, 5)])
def test_a_stop_string_is_found_across_token_borders(
    servers: dict[str, Server], start: int, stop: int
) -> None:
    """A stop string cut out of the text of tokens start..stop, from the middle of the one to that of the other."""
    texts = [whole(servers["split"], max_tokens=n, ignore_eos=True).text for n in range(1, 7)]
    full = texts[-1]
    begin = len(texts[start - 1]) + 1 if start else 0
    end = len(texts[stop - 1]) + (1 if stop - start > 1 else 0)
    needle = full[begin:end]
    assert needle
    ending = everywhere(servers, max_tokens=20, stop=[needle])
    assert ending.finish_reason == "stop"
    assert ending.text == full[: full.index(needle)]


def test_ignore_eos_goes_on_to_max_tokens(servers: dict[str, Server]) -> None:
    """A chat answer that ends by itself goes on when told to, and still ends."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    for server in servers.values():
        body = {"messages": question, "temperature": 0, "max_tokens": 40}
        short = server.post("/v1/chat/completions", body).json()
        long = server.post("/v1/chat/completions", body | {"ignore_eos": True}).json()
        assert short["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert short["choices"][0]["finish_reason"] == "stop"
        assert long["usage"]["completion_tokens"] == 40
        assert long["choices"][0]["finish_reason"] == "length"
        assert short["usage"]["completion_tokens"] < 40


def test_seeded_sampling_is_the_same_everywhere(servers: dict[str, Server]) -> None:
    """The noise depends on seed and position alone: not on the pool, the batch, or the way of delivery."""
    settings = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "max_tokens": 24}
    first = everywhere(servers, seed=7, **settings)
    assert first == everywhere(servers, seed=7, **settings)
    assert first.text != everywhere(servers, seed=8, **settings).text


CONVERSATION = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\nThe capital of France is Paris"
)


@pytest.mark.parametrize(("written", "num_tokens"), [(".", 1), ("", 2)])
def test_end_of_text_at_token_1_and_2(servers: dict[str, Server], written: str, num_tokens: int) -> None:
    """The model ends its own answer with prefill's token, and with decode's first: nothing follows, and it counts."""
    prompt = CONVERSATION + written
    ending = everywhere(servers, prompt=prompt, max_tokens=20)
    assert (ending.finish_reason, ending.completion_tokens) == ("stop", num_tokens)
    assert ending.text == "."[: num_tokens - 1]
    goes_on = everywhere(servers, prompt=prompt, max_tokens=20, ignore_eos=True)
    assert (goes_on.finish_reason, goes_on.completion_tokens) == ("length", 20)
    later = everywhere(servers, prompt=prompt, max_tokens=20, min_tokens=8)
    assert later.completion_tokens >= 8
