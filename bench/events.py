"""The events of a streamed answer: server-sent events, and what the OpenAI routes put into them."""

from __future__ import annotations

import msgspec


class EventSplitter:
    """Cuts the bytes of a stream of server-sent events into their data, wherever the network cut them."""

    def __init__(self) -> None:
        self.rest = b""
        """What came since the last whole event."""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that `data` completes, in order. Comments and other fields are left out."""
        if self.rest:
            data = self.rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self.rest = data.split(b"\n\n")
        return [found for event in events if (found := _data(event))]


def _data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """What a chat's chunk adds to the answer. Thoughts are output too, under either name."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """What a chunk adds to one answer: `text` (completions) or `delta` (chats)."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def output(self) -> str:
        """The text that it adds."""
        if self.text:
            return self.text
        delta = self.delta
        if delta is None:
            return ""
        return (delta.content or "") + (delta.reasoning_content or delta.reasoning or "")


class PromptDetails(msgspec.Struct):
    """How the prompt was counted."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class ErrorBody(msgspec.Struct):
    """What went wrong. Some servers put the status where others have a word."""

    message: str = ""
    code: str | int | None = None


class Event(msgspec.Struct):
    """One chunk of an answer, or an error in its place; an error's own body has the same shape."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: ErrorBody | str | None = None


decode_event = msgspec.json.Decoder(Event).decode
"""Raises msgspec.MsgspecError for what is no event."""
