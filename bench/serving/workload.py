"""What a load sends: requests with their lengths and, in an open loop, the time at which each is to be sent."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: str
    content: str


class Chat(msgspec.Struct, frozen=True):
    """A conversation so far."""

    messages: tuple[Message, ...]


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request before it is sent.

    `prompt` is text, token ids or a chat; `input_tokens` is its length by the tokenizer that it was made with (of a
    chat without what the server's template adds). `at_s` counts from the start of the load, or is None if a closed loop
    decides. Of traces, `hash_ids` are the blocks that the prompt was made of: equal ids are equal text.
    """

    index: int
    prompt: str | tuple[int, ...] | Chat
    input_tokens: int
    output_tokens: int
    """Asked for (`max_tokens`)."""
    at_s: float | None = None
    group: str = ""
    """Whose it is, for reports: a customer, a kind of request, a shared prefix."""
    hash_ids: tuple[int, ...] = ()
