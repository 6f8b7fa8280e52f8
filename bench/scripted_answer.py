"""What a scripted server can be told to answer, and the bytes of such an answer."""

from __future__ import annotations

from enum import StrEnum

import msgspec

MODEL = "scripted"
_LAST_CHUNK = b"0\r\n\r\n"


class Then(StrEnum):
    """What follows the last piece."""

    DONE = "done"
    """The finish reason, the usage, `[DONE]`."""
    ERROR = "error"
    """An error event."""
    BREAK = "break"
    """The connection is closed, with nothing to end the stream."""
    NOTHING = "nothing"
    """The stream stays open, and nothing comes any more."""


class Piece(msgspec.Struct, frozen=True):
    """One chunk of output, so long after what was sent before it (the first: after the request)."""

    after_s: float
    num_tokens: int = 1
    text: str = " word"


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a request is answered."""

    pieces: tuple[Piece, ...] = ()
    then: Then = Then.DONE
    status: int = 200
    retry_after_s: int | None = None
    error: str = "as scripted"
    finish_reason: str = "length"
    has_ids: bool = True
    """Token ids in every chunk."""
    has_usage: bool = True
    """A chunk with the counts at the end."""
    has_running_usage: bool = False
    """The counts so far in every chunk."""
    has_role: bool = True
    """Of chats: a chunk with the role and no text comes first, with the head."""
    has_comments: bool = False
    """A comment before every piece."""
    cut_bytes: int = 0
    """The stream's bytes are sent so many at a time, each as a packet of its own; 0: a piece at a time."""
    prompt_tokens: int = 7

    def error_json(self) -> bytes:
        """The error as clients get it, in a body or an event."""
        return msgspec.json.encode({"error": {"message": self.error, "code": "scripted"}})


class AnswerEvents:
    """The events of one answer, as HTTP chunks."""

    def __init__(self, script: Script, is_chat: bool, wants_ids: bool) -> None:
        self.is_chat = is_chat
        self._script = script
        self._has_ids = script.has_ids and wants_ids
        self._num_tokens = 0
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        identity = {"id": "cmpl-scripted", "object": kind, "created": 1, "model": MODEL}
        self._head = b"data: " + msgspec.json.encode(identity)[:-1]
        text = '"delta":{"content":%s}' if is_chat else '"text":%s'
        self._shape = '{"index":0,' + text + ',"logprobs":null,"finish_reason":%s%s}'
        self._known: dict[Piece, bytes] = {}

    def role(self) -> bytes:
        """The first event of a chat."""
        choice = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return _chunk(self._event(choice))

    def piece(self, piece: Piece) -> bytes:
        """A chunk with output."""
        self._num_tokens += piece.num_tokens
        comment = b": keep-alive\n\n" if self._script.has_comments else b""
        if self._script.has_running_usage:
            return _chunk(comment + self._event(self._choice(piece), self._usage()))
        if piece not in self._known:
            self._known[piece] = _chunk(comment + self._event(self._choice(piece)))
        return self._known[piece]

    def closing(self) -> bytes:
        """The finish reason, the usage and the end."""
        empty = self._shape % ('""', f'"{self._script.finish_reason}"', "")
        last = self._event(empty.encode())
        if self._script.has_usage:
            last += self._head + b',"choices":[],"usage":' + self._usage() + b"}\n\n"
        return _chunk(last + b"data: [DONE]\n\n") + _LAST_CHUNK

    def error(self) -> bytes:
        """An error event and the end."""
        return _chunk(b"data: " + self._script.error_json() + b"\n\n") + _LAST_CHUNK

    def _choice(self, piece: Piece) -> bytes:
        ids = f',"token_ids":{list(range(100, 100 + piece.num_tokens))}' if self._has_ids else ""
        text = msgspec.json.encode(piece.text).decode()
        return (self._shape % (text, "null", ids)).encode()

    def _event(self, choice: bytes, usage: bytes = b"") -> bytes:
        tail = b',"usage":' + usage + b"}\n\n" if usage else b"}\n\n"
        return self._head + b',"choices":[' + choice + b"]" + tail

    def _usage(self) -> bytes:
        prompt, answer = self._script.prompt_tokens, self._num_tokens
        return msgspec.json.encode(
            {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
