"""Valid requests of every kind for `/v1/completions`, and all of an answer that must not depend on how it came."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from hypothesis import strategies as st

from support.gateway import tiny_tokenizer
from support.server import Server

ANSWER_LIMIT_S = 90.0
_IDS = st.integers(0, tiny_tokenizer().vocab_size - 1)
_TEXTS = st.text(st.sampled_from("the quick brown fox €🙂\n"), min_size=1, max_size=120)
_SAMPLED = st.fixed_dictionaries(
    {"temperature": st.sampled_from((0.5, 1.0, 1.7)), "seed": st.integers(0, 2**31)},
    optional={
        "top_p": st.sampled_from((0.3, 0.9)),
        "top_k": st.sampled_from((1, 5, 60)),
        "min_p": st.sampled_from((0.01, 0.2)),
    },
)
_GREEDY = st.just({"temperature": 0})
_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "presence_penalty": st.sampled_from((-1.0, 0.5, 2.0)),
    "frequency_penalty": st.sampled_from((-0.5, 1.0)),
    "repetition_penalty": st.sampled_from((0.8, 1.3)),
    "logit_bias": st.dictionaries(_IDS.map(str), st.sampled_from((-100, -2.5, 3)), max_size=4),
    "allowed_token_ids": st.lists(_IDS, min_size=60, max_size=120, unique=True),
    "bad_words": st.lists(st.text(st.sampled_from("abeoxth"), min_size=1, max_size=3), max_size=6),
    "stop": st.lists(st.text(st.sampled_from("abeox "), min_size=1, max_size=2), min_size=1, max_size=3),
    "stop_token_ids": st.lists(_IDS, min_size=1, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "min_tokens": st.integers(0, 8),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "n": st.integers(1, 3),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 4),
}


@st.composite
def requests(draw: st.DrawFn, max_tokens: st.SearchStrategy[int] = st.integers(8, 40)) -> dict[str, Any]:  # noqa: B008
    """The body of a valid request whose answer is the same each time: greedy, or with a seed."""
    prompt = draw(st.one_of(_TEXTS, st.lists(_IDS, min_size=1, max_size=150)))
    options = draw(st.fixed_dictionaries({}, optional=_OPTIONS))
    body = {"prompt": prompt, "max_tokens": draw(max_tokens), "return_token_ids": True}
    return body | draw(st.one_of(_GREEDY, _SAMPLED)) | options


@dataclass
class Choice:
    """One of the answers to a request. `logprobs` are the lists of the OpenAI shape, put together."""

    text: str = ""
    finish: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, part: Mapping[str, Any]) -> None:
        """The next chunk of it, or all of it."""
        self.text += part["text"]
        self.token_ids += part.get("token_ids") or []
        for name, values in (part.get("logprobs") or {}).items():
            self.logprobs.setdefault(name, []).extend(values)
        if part["finish_reason"] is not None:
            assert self.finish is None, "a second finish reason"
            self.finish = part["finish_reason"]


@dataclass
class Given:
    """All that a client got: the answers by index, what is billed, and the error that ended it, if one did."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    error: str = ""

    def take(self, body: Mapping[str, Any]) -> None:
        """A whole answer, or a chunk of one."""
        if "error" in body:
            self.error = body["error"]["message"]
            return
        for part in body["choices"]:
            self.choices.setdefault(part["index"], Choice()).add(part)
        if usage := body.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            assert 0 <= cached <= usage["prompt_tokens"]
            self.usage = {name: value for name, value in usage.items() if name.endswith("_tokens")}


def whole(server: Server, body: Mapping[str, Any]) -> Given:
    """The answer in one piece."""
    given = Given()
    response = server.post("/v1/completions", dict(body), ANSWER_LIMIT_S)
    given.take(response.json())
    return given


def streamed(server: Server, body: Mapping[str, Any]) -> Given:
    """The same request as a stream, put together as clients do."""
    given = Given()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    is_done = False
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=asked, timeout=ANSWER_LIMIT_S, verify=False
    ) as response:
        if response.status_code != 200:
            given.take(json.loads(response.read()))
            return given
        for line in response.iter_lines():
            if line.startswith("data: "):
                assert not is_done, "an event behind [DONE]"
                is_done = line == "data: [DONE]"
                if not is_done:
                    given.take(json.loads(line.removeprefix("data: ")))
    assert is_done or given.error, "the stream broke off"
    return given


def assert_same(one: Given, other: Given, tolerance: float) -> None:
    """Texts, tokens, ends, what is billed: equal; log probabilities up to `tolerance`."""
    assert one.error == other.error == ""
    assert one.usage == other.usage
    assert one.choices.keys() == other.choices.keys()
    for index, choice in one.choices.items():
        same = other.choices[index]
        assert (choice.text, choice.finish, choice.token_ids) == (same.text, same.finish, same.token_ids)
        assert choice.logprobs.keys() == same.logprobs.keys()
        for name in choice.logprobs.keys() - {"token_logprobs", "top_logprobs"}:
            assert choice.logprobs[name] == same.logprobs[name], name
        for mine, theirs in zip(_numbers(choice), _numbers(same), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(abs(mine[token] - theirs[token]) <= tolerance for token in mine)


def _numbers(choice: Choice) -> list[dict[str, float]]:
    """Each token's log probability and those of the likeliest of its place."""
    told = choice.logprobs.get("token_logprobs", [])
    tops = choice.logprobs.get("top_logprobs", [])
    found = []
    for logprob, top in zip(told, tops or [None] * len(told), strict=True):
        own = {} if logprob is None else {"": logprob}
        found.append(own | (top or {}))
    return found
