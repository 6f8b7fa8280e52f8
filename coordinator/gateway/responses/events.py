"""The events of a streamed response, and the body of a whole one, in the order and with the names of OpenAI's.

Every event carries its number. The whole object comes at the beginning, without output, and at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinpool.coordinator.gateway.blocks import Block, BlockKind, BlockWriter
from twinpool.coordinator.gateway.deltas import Delta
from twinpool.coordinator.gateway.responses.body import ResponsesBody
from twinpool.coordinator.gateway.responses.output import (
    ResponseUsage,
    content_part,
    echoed_fields,
    item_id,
    output_item,
    response_error,
)
from twinpool.coordinator.gateway.shapes import to_json
from twinpool.errors import RequestError

_TEXT_EVENTS = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
}
"""What the events of a block's text begin with."""


class ResponseWriter(BlockWriter):
    """Writes one response. `created_at` is in Unix seconds. The ids of its items follow from the request's."""

    def __init__(self, body: ResponsesBody, request_id: str, model: str, created_at: int) -> None:
        super().__init__()
        self._request_id = request_id
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": created_at,
            "model": model,
            **echoed_fields(body),
        }
        self._num_events = 0
        self._logprobs: dict[int, list[Any]] = {}
        self._held_logprobs: list[Any] = []
        self._before_number = self._before_text = b""

    def opening(self) -> bytes:
        """What a stream begins with."""
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def piece(self, deltas: Sequence[Delta], logprobs: Sequence[Any] = ()) -> bytes:
        """The events of the next part of the answer.

        `logprobs` are the entries of its tokens, as the chat route has them. They come with the text that these tokens
        have, or with the next one while it is held back; those of reasoning and calls are shown nowhere.
        """
        self._held_logprobs += logprobs
        written = self.add(deltas)
        if deltas:
            self._held_logprobs = []
        return written

    def closing(self, usage: ResponseUsage, *, is_cut: bool) -> bytes:
        """What ends a stream. `is_cut`: the answer has as many tokens as it may have."""
        ended = self._finish(is_cut=is_cut)
        status = "incomplete" if is_cut else "completed"
        return ended + self._event(f"response.{status}", response=self._response(status, usage))

    def whole(self, usage: ResponseUsage, *, is_cut: bool) -> bytes:
        """The body of an answer that is not streamed, when all of its pieces were added."""
        self._finish(is_cut=is_cut)
        return to_json(self._response("incomplete" if is_cut else "completed", usage))

    def failed(self, failure: RequestError) -> bytes:
        """What ends a stream that broke: the object as far as it came, with the reason."""
        if self._open is not None:
            self._open.is_cut, self._open = True, None
        # Clients want the beginning first, even of what fails before its first token.
        begun = b"" if self._num_events else self.opening()
        response = {**self._response("failed"), "error": response_error(failure)}
        return begun + self._event("response.failed", response=response)

    def _finish(self, *, is_cut: bool) -> bytes:
        # Clients look for a message: an answer without a word has an empty one.
        begun = b"" if self.blocks else self.begin(BlockKind.TEXT)
        if self._open is not None and self._open.kind is BlockKind.TEXT:
            self._logprobs[self._open.index] += self._held_logprobs
        return begun + self.end(is_cut=is_cut)

    def _response(self, status: str, usage: ResponseUsage | None = None) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(block) for block in self.blocks],
            "usage": usage.as_json() if usage is not None else None,
        }

    def _begun(self, block: Block) -> bytes:
        new = output_item(block, self._request_id, [], is_open=True)
        added = self._event("response.output_item.added", output_index=block.index, item=new)
        place = self._place(block)
        kind = f"{_TEXT_EVENTS[block.kind]}.delta"
        self._before_number = b'event: %s\ndata: {"type":"%s","sequence_number":' % ((kind.encode(),) * 2)
        self._before_text = b"," + to_json(place)[1:-1] + b',"delta":'
        if block.kind is BlockKind.CALL:
            return added
        self._logprobs[block.index] = []
        return added + self._event("response.content_part.added", **place, part=content_part(block, "", []))

    def _more(self, block: Block, text: str) -> bytes:
        logprobs = b""
        if block.kind is BlockKind.TEXT:
            logprobs = b',"logprobs":' + to_json(self._held_logprobs)
            self._logprobs[block.index] += self._held_logprobs
            self._held_logprobs = []
        self._num_events += 1
        number = b"%d" % (self._num_events - 1)
        return b"".join((self._before_number, number, self._before_text, to_json(text), logprobs, b"}\n\n"))

    def _ended(self, block: Block) -> bytes:
        place, kind = self._place(block), f"{_TEXT_EVENTS[block.kind]}.done"
        match block.kind:
            case BlockKind.TEXT:
                done = self._event(kind, **place, text=block.text, logprobs=self._logprobs[block.index])
            case BlockKind.REASONING:
                done = self._event(kind, **place, text=block.text)
            case BlockKind.CALL:
                done = self._event(kind, **place, name=block.name, arguments=block.text)
        if block.kind is not BlockKind.CALL:
            done += self._event("response.content_part.done", **place, part=self._part(block))
        return done + self._event(
            "response.output_item.done", output_index=block.index, item=self._item(block)
        )

    def _item(self, block: Block) -> dict[str, Any]:
        is_call, is_open = block.kind is BlockKind.CALL, block is self._open
        content = [] if is_call else [self._part(block)]
        text = block.text if is_call else ""
        return output_item(block, self._request_id, content, is_open=is_open, text=text)

    def _part(self, block: Block) -> dict[str, Any]:
        return content_part(block, block.text, self._logprobs[block.index])

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": item_id(block, self._request_id), "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), to_json(event))
