"""What the OpenAI routes answer: JSON bodies, stream chunks and errors, as bytes.

A stream's chunks differ only in a few places, so everything around them is encoded once per request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from twinpool.coordinator.gateway.answer import Piece
from twinpool.errors import RequestError
from twinpool.request import FinishReason

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

to_json = msgspec.json.Encoder().encode


def error_json(error: RequestError) -> bytes:
    """The error in the OpenAI shape."""
    body = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return to_json({"error": body})


def error_event(error: RequestError) -> bytes:
    """The event that ends a stream which failed. No `[DONE]` follows it."""
    return b"data: " + error_json(error) + b"\n\n"


class Shape(ABC):
    """How one request's answer is written.

    `created` is in Unix seconds. With `include_usage` a stream ends with a chunk that has the token counts;
    with `return_token_ids` the answer has the token ids of prompt and output, where vLLM puts them.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        prompt_token_ids: tuple[int, ...],
        *,
        include_usage: bool,
        return_token_ids: bool,
    ) -> None:
        self._id = f"{self.id_prefix}-{request_id}"
        self._created = created
        self._model = model
        self._num_prompt = len(prompt_token_ids)
        self._prompt_ids = {"prompt_token_ids": prompt_token_ids} if return_token_ids else {}
        self._include_usage = include_usage
        self._return_token_ids = return_token_ids
        self._head = b"data: " + to_json(self._identity(self.chunk_object))[:-1]
        # With include_usage every chunk but the last says that it has none, as OpenAI's do.
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        ids = {"token_ids": "\1"} if return_token_ids else {}
        before, after = self._chunk({**self._delta_choice("\0"), **ids}).split(b'"\\u0000"')
        self._before_text = before
        self._after_text, *behind_ids = after.split(b'"\\u0001"')
        self._after_ids = b"".join(behind_ids)

    def opening(self) -> bytes:
        """What a stream begins with, before any text."""
        return b""

    def delta(self, piece: Piece) -> bytes:
        """The chunk that carries the next piece, or nothing if there is nothing to show."""
        if self._return_token_ids:
            if not (piece.text or piece.token_ids):
                return b""
            text_and_ids = to_json(piece.text) + self._after_text + to_json(piece.token_ids)
            return self._before_text + text_and_ids + self._after_ids
        return self._before_text + to_json(piece.text) + self._after_text if piece.text else b""

    def closing(self, finish: FinishReason, num_output: int) -> bytes:
        """What ends a stream: the finish reason, the usage if it was asked for, and `[DONE]`."""
        last = self._chunk(self._last_choice(finish))
        if not self._include_usage:
            return last + DONE
        usage = to_json(self._usage(num_output))
        return last + self._head + b',"choices":[],"usage":' + usage + b"}\n\n" + DONE

    def whole(self, text: str, token_ids: list[int], finish: FinishReason) -> bytes:
        """The body of an answer that is not streamed."""
        ids = {"token_ids": token_ids} if self._return_token_ids else {}
        body = {
            **self._identity(self.whole_object),
            "choices": [self._whole_choice(text, finish) | ids],
            "usage": self._usage(len(token_ids)),
        }
        return to_json(self._with_prompt_ids(body))

    def _identity(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self, num_output: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num_output,
            "total_tokens": self._num_prompt + num_output,
        }

    def _chunk(self, choice: dict[str, Any], extra: bytes = b"") -> bytes:
        return self._head + b',"choices":[' + to_json(choice) + b"]" + extra + self._tail

    @abstractmethod
    def _with_prompt_ids(self, body: dict[str, Any]) -> dict[str, Any]: ...

    @abstractmethod
    def _delta_choice(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _last_choice(self, finish: FinishReason) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_choice(self, text: str, finish: FinishReason) -> dict[str, Any]: ...


class ChatShape(Shape):
    """`/v1/chat/completions`: the role first, then content, then the finish reason in a chunk of its own."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> bytes:
        role = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        ids = b"," + to_json(self._prompt_ids)[1:-1] if self._prompt_ids else b""
        return self._chunk(role, ids)

    def _with_prompt_ids(self, body: dict[str, Any]) -> dict[str, Any]:
        return body | self._prompt_ids

    def _delta_choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def _last_choice(self, finish: FinishReason) -> dict[str, Any]:
        return {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish}

    def _whole_choice(self, text: str, finish: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}


class CompletionShape(Shape):
    """`/v1/completions`: text, then the finish reason in a chunk of its own."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self) -> bytes:
        return self._chunk(self._delta_choice("") | self._prompt_ids) if self._prompt_ids else b""

    def _with_prompt_ids(self, body: dict[str, Any]) -> dict[str, Any]:
        (choice,) = body["choices"]
        return body | {"choices": [choice | self._prompt_ids]}

    def _delta_choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": None}

    def _last_choice(self, finish: FinishReason) -> dict[str, Any]:
        return self._whole_choice("", finish)

    def _whole_choice(self, text: str, finish: FinishReason) -> dict[str, Any]:
        return self._delta_choice(text) | {"finish_reason": finish}
