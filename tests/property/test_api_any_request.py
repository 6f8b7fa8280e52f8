"""Whatever valid request a client sends: a stream, put together, says what the whole answer does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.gateway import Stage, events, outputs, tiny_tokenizer

from twinpool.coordinator.service import Output, Submission
from twinpool.request import FinishReason

STAGE = Stage()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EOS = tiny_tokenizer().eos_token_ids
IDS = st.integers(0, tiny_tokenizer().vocab_size - 1)
TEXTS = st.text(st.sampled_from("the fox xy€🙂\n"), min_size=1, max_size=20)
PROMPTS = TEXTS | st.lists(IDS, min_size=1, max_size=8)
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "stop": st.lists(st.text(st.sampled_from("xy€ t"), min_size=1, max_size=3), max_size=2),
    "stop_token_ids": st.lists(IDS, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "min_tokens": st.integers(0, 4),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "max_tokens": st.integers(5, 40),
    "seed": st.integers(0, 9),
    "twinpool": st.booleans(),
}
COMPLETION = st.fixed_dictionaries(
    {
        "prompt": PROMPTS
        | st.lists(TEXTS, min_size=1, max_size=3)
        | st.lists(st.lists(IDS, min_size=1, max_size=8), min_size=1, max_size=3)
    },
    optional={**SHARED, "echo": st.booleans(), "logprobs": st.integers(0, 3)},
)
CHATS = st.tuples(
    st.fixed_dictionaries(
        {"messages": TEXTS.map(lambda text: [{"role": "user", "content": text}])}, optional=SHARED
    ),
    st.one_of(st.just({}), st.integers(0, 3).map(lambda top: {"logprobs": True, "top_logprobs": top})),
).map(lambda parts: parts[0] | parts[1])


@dataclass
class Choice:
    """One choice, put together."""

    text: str = ""
    finish: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, part: dict[str, Any]) -> None:
        """A chunk of it, or all of it."""
        assert self.finish is None, "something follows the finish reason"
        said = part.get("message") or part.get("delta") or part
        self.text += said.get("text" if "text" in part else "content") or ""
        self.finish = part["finish_reason"]
        self.stop_reason = part.get("stop_reason")
        self.token_ids += part.get("token_ids", [])
        for name, values in (part["logprobs"] or {}).items():
            if values:
                self.logprobs.setdefault(name, []).extend(values)


def script(tokens: list[int], splits: list[int], finish: FinishReason) -> Any:
    """Choice i of a request gets the tokens from the i-th on, in outputs that end where `splits` says."""

    def play(submission: Submission) -> list[Output]:
        number = int(submission.request_id.partition("#")[2] or 0)
        own = tokens[number % (len(tokens) or 1) :]
        for place, token_id in enumerate(own):  # a worker ends an answer at a stop token
            if token_id in submission.sampling.stop_token_ids and place >= submission.sampling.min_tokens:
                return outputs(own[: place + 1], splits, FinishReason.STOP)
        return outputs([*own, *EOS] if finish is FinishReason.STOP else own, splits, finish)

    return play


async def ask(path: str, body: dict[str, Any], play: Any, stream: bool) -> tuple[dict[int, Choice], Any]:
    """The choices of the answer, and its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with STAGE.playing(play) as (_, client):
        response = await client.post(path, json=body | options)
    assert response.status_code == 200, response.text
    parts = [response.json()] if not stream else events(response.text)
    if stream:
        assert parts.pop() == "[DONE]"
        assert parts[-1]["choices"] == []
    choices: dict[int, Choice] = {}
    for part in parts:
        for choice in part["choices"]:
            choices.setdefault(choice["index"], Choice()).add(choice)
    return choices, parts[-1]["usage"]


@settings(max_examples=120, deadline=None)
@given(
    asked=st.tuples(st.just(COMPLETIONS), COMPLETION) | st.tuples(st.just(CHAT), CHATS),
    tokens=st.lists(IDS, max_size=16) | TEXTS.map(tiny_tokenizer().encode),
    splits=st.lists(st.integers(0, 20), max_size=6),
    finish=st.sampled_from((FinishReason.STOP, FinishReason.LENGTH)),
)
def test_a_stream_says_what_the_whole_answer_says(
    asked: tuple[str, dict[str, Any]], tokens: list[int], splits: list[int], finish: FinishReason
) -> None:
    path, body = asked
    assume(tokens or finish is FinishReason.STOP)  # no answer has none: the token that ends it is one

    async def all_three() -> list[tuple[dict[int, Choice], Any]]:
        one_by_one = script(tokens, list(range(len(tokens) + 1)), finish)
        return [
            await ask(path, body, script(tokens, splits, finish), stream=False),
            await ask(path, body, script(tokens, splits, finish), stream=True),
            await ask(path, body, one_by_one, stream=True),
        ]

    whole, *streams = asyncio.run(all_three())
    for stream in streams:
        assert stream == whole
    choices, usage = whole
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert ("twinpool" in usage) is body.get("twinpool", False)
    if body.get("return_token_ids"):
        num_tokens = sum(len(choice.token_ids) for choice in choices.values())
        assert usage["completion_tokens"] == num_tokens
    if "logprobs" in body and path == CHAT:
        assert usage["completion_tokens"] == sum(len(c.logprobs.get("content", ())) for c in choices.values())
    for choice in choices.values():
        offsets = choice.logprobs.get("text_offset", [])
        assert offsets == sorted(offsets)
        assert len({len(values) for values in choice.logprobs.values()}) <= 1
