"""The events of a streamed message, and the body of a whole one, in the order and with the names of Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from twinpool.coordinator.gateway.blocks import Block, BlockKind, BlockWriter
from twinpool.coordinator.gateway.messages_api.errors import error_object
from twinpool.coordinator.gateway.shapes import to_json
from twinpool.errors import RequestError
from twinpool.request import FinishReason

BROKEN_INPUT = "INVALID_JSON"
"""The one name of a tool's input whose JSON breaks off: Anthropic's own advice for handing such an input on."""

_DELTAS = {
    BlockKind.TEXT: b'{"type":"text_delta","text":',
    BlockKind.REASONING: b'{"type":"thinking_delta","thinking":',
    BlockKind.CALL: b'{"type":"input_json_delta","partial_json":',
}


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """Tokens of one prompt, of which `num_cached` were found in a cache; and our own block of the usage, if the client
    wants it."""

    num_tokens: int
    num_cached: int
    facts: Mapping[str, Any] | None = None

    def as_json(self, num_output: int) -> dict[str, Any]:
        """The usage as Anthropic has it: input tokens are those that no cache had."""
        usage = {
            "input_tokens": self.num_tokens - self.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.num_cached,
            "output_tokens": num_output,
        }
        return usage if self.facts is None else {**usage, "twinpool": self.facts}


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """How an answer ended, after `num_output` tokens. `stop_sequence` is the one that ended it, if one did."""

    finish: FinishReason
    stop_sequence: str | None
    num_output: int


class MessageWriter(BlockWriter):
    """Writes one message."""

    def __init__(self, request_id: str, model: str) -> None:
        super().__init__()
        self._head = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._before_text = b""

    def opening(self, prompt: PromptUsage) -> bytes:
        """What a stream begins with."""
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": prompt.as_json(0),
        }
        return _event("message_start", message=message)

    def closing(self, prompt: PromptUsage, end: MessageEnd) -> bytes:
        """What ends a stream."""
        ended = self.end(is_cut=end.finish is FinishReason.LENGTH)
        usage = prompt.as_json(end.num_output)
        return ended + _event("message_delta", delta=self._stop(end), usage=usage) + _event("message_stop")

    def whole(self, prompt: PromptUsage, end: MessageEnd) -> bytes:
        """The body of an answer that is not streamed, when all of its deltas were added."""
        self.end(is_cut=end.finish is FinishReason.LENGTH)
        body = {
            **self._head,
            "content": [_whole_block(block) for block in self.blocks],
            **self._stop(end),
            "usage": prompt.as_json(end.num_output),
        }
        return to_json(body)

    def failed(self, failure: RequestError) -> bytes:
        """What ends a stream that broke."""
        return _event("error", error=error_object(failure))

    def _stop(self, end: MessageEnd) -> dict[str, Any]:
        if end.finish is FinishReason.LENGTH:
            reason = "max_tokens"
        elif end.stop_sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": end.stop_sequence}

    def _begun(self, block: Block) -> bytes:
        begun = _event("content_block_start", index=block.index, content_block=_new_block(block))
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
        self._before_text = head % block.index + _DELTAS[block.kind]
        return begun if block.index else begun + _event("ping")

    def _more(self, block: Block, text: str) -> bytes:  # noqa: ARG002  # the block is in what stands before the text
        return self._before_text + to_json(text) + b"}}\n\n"

    def _ended(self, block: Block) -> bytes:
        return _event("content_block_stop", index=block.index)


def _new_block(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole_block(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT:
            return {**_new_block(block), "text": block.text}
        case BlockKind.REASONING:
            return {**_new_block(block), "thinking": block.text}
        case BlockKind.CALL:
            return {**_new_block(block), "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """A tool's input from its JSON text, which breaks off if the answer did."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {BROKEN_INPUT: arguments}
    return value if isinstance(value, dict) else {BROKEN_INPUT: arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), to_json({"type": kind, **fields}))
