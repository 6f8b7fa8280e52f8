"""`/v1/chat/completions`: the role first, then content, reasoning and calls, then the finish reason in a chunk of its
own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from twinpool.coordinator.gateway.answer import Piece
from twinpool.coordinator.gateway.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    read,
)
from twinpool.coordinator.gateway.openai_shape import OpenAIChoice, OpenAIShape, stop_reason
from twinpool.coordinator.gateway.shapes import UsageSoFar
from twinpool.request import FinishReason


class ChatShape(OpenAIShape):
    """One answer of `/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int) -> ChatChoice:
        """A new writer of that choice."""
        return ChatChoice(self, index)

    def _whole_choice(self, index: int, answer: Piece) -> dict[str, Any]:
        said = _joined(read(self.wanted.parser(), answer.text, is_last=True))
        calls = said.pop("tool_calls", [])
        content = said.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **said}
        if calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        has_logprobs = self.wanted.num_logprobs is not None
        return {
            "index": index,
            "message": message,
            "logprobs": self.writer.chat(answer.token_ids, answer.logprobs) if has_logprobs else None,
            "finish_reason": finish_reason(answer.finish, has_calls=bool(calls)),
            **stop_reason(answer),
            **({"token_ids": answer.token_ids} if self.wanted.return_token_ids else {}),
        }

    def _whole_extra(self, answers: Sequence[Piece]) -> dict[str, Any]:
        return {**self.prompt_ids(0), **self.prompt_logprobs(0, answers[0])}


class ChatChoice(OpenAIChoice):
    """One choice of a stream."""

    def __init__(self, shape: ChatShape, index: int) -> None:
        super().__init__(shape, index, has_only_text=shape.wanted.make_parser is None)
        self._parser = shape.wanted.parser()
        self._has_calls = False

    def opening(self, first: Piece, usage_so_far: UsageSoFar) -> bytes:  # noqa: ARG002  # none is shown here
        """The role, and the prompt's token ids, if they were asked for."""
        return self._shape.chunk(
            self._saying({"role": "assistant", "content": ""}),
            self._shape.prompt_ids(0) if self._index == 0 else None,
        )

    def ending(self, last: Piece) -> bytes:
        """The finish reason."""
        reason = finish_reason(last.finish, has_calls=self._has_calls)
        return self._shape.chunk(self._saying({}) | {"finish_reason": reason} | stop_reason(last))

    def _said(self, piece: Piece) -> dict[str, Any] | None:
        deltas = read(self._parser, piece.text, is_last=piece.finish is not None)
        self._has_calls |= any(isinstance(delta, ToolCallBegin) for delta in deltas)
        return self._saying(_joined(deltas)) if deltas else None

    def _choice(self, text: str) -> dict[str, Any]:
        return self._saying({"content": text} if text else {})

    def _saying(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return self._shape.writer.chat(piece.token_ids, piece.logprobs)


def finish_reason(finish: FinishReason | None, *, has_calls: bool) -> str | None:
    """`tool_calls` for an answer that calls tools and stopped by itself."""
    return "tool_calls" if has_calls and finish is FinishReason.STOP else finish


def _joined(deltas: Iterable[Delta]) -> dict[str, Any]:
    """What deltas say together, as the fields of one `delta` object; of a whole answer, of its message."""
    said: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                said["content"] = said.get("content", "") + text
            case Reasoning(text):
                said["reasoning_content"] = said.get("reasoning_content", "") + text
            case ToolCallBegin(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case ToolCallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        said["tool_calls"] = list(calls.values())
    return said
