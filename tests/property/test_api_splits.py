"""However the tokens of an answer are split over outputs, every client gets the same answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway import Stage, events, outputs, tiny_tokenizer

from twinpool.request import FinishReason

STAGE = Stage()
EOS = tiny_tokenizer().eos_token_ids
TEXT = st.text(st.sampled_from("ab xy€🙂\n"), max_size=24)


@dataclass(frozen=True)
class Got:
    """What a client sees of an answer."""

    text: str
    finish: str
    num_tokens: int
    token_ids: tuple[int, ...]
    told_to_stop_at: int | None


async def ask(ids: list[int], splits: list[int], finish: FinishReason, stop: list[str], stream: bool) -> Got:
    """Asks a gateway whose coordinator answers `ids`, split at `splits`."""
    body = {
        "prompt": "a", "stop": stop or None, "stream": stream, "return_token_ids": True,
        "stream_options": {"include_usage": True} if stream else None,
    }  # fmt: skip
    async with STAGE.playing(lambda _: outputs(ids, splits, finish)) as (service, client):
        response = await client.post("/v1/completions", json=body)
    told = [num_tokens for _, num_tokens in service.completed]
    if not stream:
        answer = response.json()
        (choice,) = answer["choices"]
        return Got(
            choice["text"],
            choice["finish_reason"],
            answer["usage"]["completion_tokens"],
            tuple(choice["token_ids"]),
            told[0] if told else None,
        )
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    return Got(
        "".join(choice["text"] for choice in choices),
        choices[-1]["finish_reason"],
        usage["usage"]["completion_tokens"],
        tuple(id_ for choice in choices for id_ in choice.get("token_ids", [])),
        told[0] if told else None,
    )


@settings(max_examples=150, deadline=None)
@given(
    text=TEXT,
    ends=st.booleans(),
    cut=st.integers(0, 3),
    splits=st.lists(st.integers(0, 60), max_size=12),
    stop=st.lists(st.text(st.sampled_from("xy€ "), min_size=1, max_size=3), max_size=2),
)
def test_stream_and_whole_answers_are_equal_for_every_split(
    text: str, ends: bool, cut: int, splits: list[int], stop: list[str]
) -> None:
    ids = tiny_tokenizer().encode(text)
    ids = [*ids, *EOS] if ends else ids[: max(0, len(ids) - cut)]
    finish = FinishReason.STOP if ends else FinishReason.LENGTH

    async def both() -> tuple[Got, Got, Got]:
        return (
            await ask(ids, splits, finish, stop, stream=True),
            await ask(ids, splits, finish, stop, stream=False),
            await ask(ids, list(range(len(ids))), finish, stop, stream=True),
        )

    streamed, whole, token_by_token = asyncio.run(both())
    assert streamed == whole
    assert (whole.text, whole.finish, whole.num_tokens, whole.token_ids) == (
        token_by_token.text, token_by_token.finish, token_by_token.num_tokens, token_by_token.token_ids,
    )  # fmt: skip
    assert whole.num_tokens == len(whole.token_ids)
    assert not any(string in whole.text for string in stop)
    if whole.num_tokens == len(ids) and whole.finish == finish and not stop:
        assert whole.text == tiny_tokenizer().decode(ids)
